"""The one file that touches FSDP2's private names (torch 2.9 to 2.14).

What differs between the versions: an FSDP state holds one parameter group (`_fsdp_param_group`, up to 2.11) or a list
of them (`_fsdp_param_groups`, from 2.12), and c10d's gather of one tensor is `all_gather_into_tensor` (up to 2.12) or
`all_gather_single` (from 2.13, where the old name warns). The public `set_custom_all_gather` refuses modules with
several parameter groups, which is what experts on a mesh of their own give; so the collective is set on each parameter
group directly, as FSDP2 itself does for symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ciera.errors import UnsupportedTorchError

OLDEST_TORCH = (2, 9)
NEWEST_TORCH = (2, 14)


def check_torch_version(version: str) -> None:
    """Raises `UnsupportedTorchError` unless `version` is a torch whose FSDP2 takes a custom all-gather."""
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        raise UnsupportedTorchError(
            f"fsdp_ciera needs torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer (FSDP2's custom all-gather came with "
            f"it), but torch {version} is installed: pip install 'torch>=2.9'"
        )


def _check_private_names() -> None:
    missing = [
        name
        for owner, name in (
            (FSDPParamGroup, "lazy_init"),
            (FSDPParamGroup, "unshard"),
            (FSDPParamGroup, "post_backward"),
            (FSDPModule, "set_custom_all_gather"),
            (FSDPModule, "_get_fsdp_state"),
        )
        if not hasattr(owner, name)
    ]
    if missing:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has an FSDP2 that fsdp_ciera does not know (it lacks {', '.join(missing)}). "
            f"Supported are torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
        )


check_torch_version(torch.__version__)
try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError as error:
    raise UnsupportedTorchError(
        f"torch {torch.__version__} has an FSDP2 that fsdp_ciera does not know ({error}). "
        f"Supported are torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
    ) from error
_check_private_names()

__all__ = [
    "AllGather",
    "FSDPModule",
    "FSDPParamGroup",
    "all_gather_bytes",
    "all_gather_flat",
    "all_reduce_max",
    "ambient_defaults",
    "broadcast_bytes",
    "check_torch_version",
    "default_store",
    "gather_dtype",
    "gather_groups",
    "gather_input",
    "gather_length",
    "get_comm",
    "group_phase",
    "is_default_comm",
    "is_in_pass",
    "makes_own_inputs",
    "names_are_known",
    "new_local_group",
    "next_process_group",
    "param_groups",
    "param_names_and_sizes",
    "restore_default_comm",
    "set_comm",
    "shard_world_size",
    "sharded_parameters",
    "sibling_groups",
    "torch_fully_shard",
    "watch_groups",
    "watch_passes",
]


def all_gather_flat(output: torch.Tensor, local: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool) -> Any:
    """Runs c10d's all-gather of `local` ([n]) into `output` ([world_size * n]), under the name this torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, local, group=process_group, async_op=async_op)


def _device_of_numbers(process_group: dist.ProcessGroup) -> torch.device:
    """The device on which this process group takes small messages: CPU, unless it has backends for other devices only (NCCL
    alone). Process groups in Python and those of threads list no device, and take CPU tensors."""
    device_types = {device.type for device in process_group._device_types}
    if not device_types or "cpu" in device_types or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_gather_bytes(local: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers uint8 [n] on CPU, the same n on every rank -> uint8 [world_size, n] on CPU. The host waits."""
    sent = local.to(_device_of_numbers(process_group))
    gathered = torch.empty(process_group.size() * sent.numel(), dtype=torch.uint8, device=sent.device)
    all_gather_flat(gathered, sent, process_group, async_op=False)
    return gathered.view(process_group.size(), -1).cpu()


def broadcast_bytes(data: bytes, process_group: dist.ProcessGroup) -> bytes:
    """Returns on every rank the `data` of the process group's first rank. The host waits."""
    device = _device_of_numbers(process_group)
    num_bytes = torch.full((1,), len(data), dtype=torch.int64, device=device)
    dist.broadcast(num_bytes, group=process_group, group_src=0)
    message = torch.zeros(int(num_bytes), dtype=torch.uint8, device=device)
    if process_group.rank() == 0:
        message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(message, group=process_group, group_src=0)
    return bytes(message.cpu().numpy())


def all_reduce_max(numbers: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Replaces each of `numbers`, int64 of any shape, by the largest over all ranks. Runs on the device of `numbers` where the
    process group takes that."""
    device_types = {device.type for device in process_group._device_types}
    if not device_types or numbers.device.type in device_types:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=process_group)
        return
    moved = numbers.to(_device_of_numbers(process_group))
    dist.all_reduce(moved, dist.ReduceOp.MAX, group=process_group)
    numbers.copy_(moved)


def new_local_group(ranks: Sequence[int], parent: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Makes a process group of these global ranks with the backends and the timeout of `parent`. Collective over these ranks
    alone. `name` must be the same on all of them, and never used before.

    [Note: Names of process groups] c10d names a process group that only its members make after a count of this process, and the
    members meet in the store under that name. Where a rank has made more process groups than another (one for logging, one of
    the first and last stage), the counts differ, and the members wait for each other for ever. So the name is passed in.
    Test: test_faults.py, other process groups.
    """
    with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda _: name):
        process_group = dist.new_group(
            list(ranks),
            timeout=_timeout_of(parent),
            backend=dist.get_backend_config(parent),
            use_local_synchronization=True,
        )
    assert isinstance(process_group, dist.ProcessGroup)
    return process_group


def _timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of the first backend that has one."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def default_store() -> Any:
    """The key-value store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()  # a torch Store, which mypy cannot see


def param_groups(module: nn.Module) -> list[FSDPParamGroup]:
    """The parameter groups that `fully_shard` made for exactly this module (none if it holds no parameter itself)."""
    return _param_groups_of_state(cast(FSDPModule, module)._get_fsdp_state())


def _param_groups_of_state(state: Any) -> list[FSDPParamGroup]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    single = state._fsdp_param_group  # torch 2.9 to 2.11: one parameter group or none
    return [] if single is None else [single]


def get_comm(param_group: FSDPParamGroup) -> AllGather:
    """The all-gather object that the parameter group calls."""
    return param_group._all_gather_comm


def is_default_comm(comm: AllGather) -> bool:
    """Whether `comm` is FSDP2's own plain all-gather (and not a symmetric-memory, pooled or user-made one)."""
    return type(comm) is DefaultAllGather


def set_comm(param_group: FSDPParamGroup, comm: AllGather) -> None:
    """Makes the parameter group call `comm` from the next gather on."""
    param_group._all_gather_comm = comm


def restore_default_comm(param_group: FSDPParamGroup) -> None:
    """Makes the parameter group call FSDP2's plain all-gather again."""
    param_group._all_gather_comm = DefaultAllGather()


def param_names_and_sizes(param_group: FSDPParamGroup, dtype: torch.dtype) -> tuple[str, list[str], list[int]]:
    """The name of the parameter group's module; and for each gathered stretch, the name of its parameter and its length in
    elements of `dtype`.

    Names are full from the root once the root has run its first forward, and relative to the FSDP module before. Lengths
    are those of the padded local shard that the parameter group gathers in its present state; in a uint8 buffer (a parameter
    group of several dtypes) they are in bytes.
    """
    prefixes = {
        id(submodule): prefix for root in reversed(param_group.modules) for prefix, submodule in root.named_modules()
    }
    names: list[str] = []
    sizes: list[int] = []
    for param in param_group.fsdp_params:
        name = param._param_fqn
        if name is None:
            prefix = prefixes.get(id(param._module_info.module), "")
            name = f"{prefix}.{param._module_info.param_name}" if prefix else param._module_info.param_name
        for tensor in _gathered_tensors(param):
            item_bytes = (param.param_dtype or tensor.dtype).itemsize
            names.append(name)
            sizes.append(tensor.numel() * item_bytes // dtype.itemsize if dtype == torch.uint8 else tensor.numel())
    return param_group._module_fqn or type(param_group.modules[0]).__name__, names, sizes


def sharded_parameters(param_group: FSDPParamGroup) -> list[tuple[nn.Parameter, int, torch.dtype | None]]:
    """Each parameter, the number of values of its padded local shard, and the dtype that the parameter group casts to (`None`:
    the parameter's own).

    Unlike `param_names_and_sizes`, it works before the root's first forward, when FSDP2 has settled no dtypes.
    """
    cast_dtype = param_group.mp_policy.param_dtype
    return [
        (param.sharded_param, param.padded_sharded_param_size.numel(), cast_dtype) for param in param_group.fsdp_params
    ]


def _gathered_tensors(param: Any) -> Sequence[torch.Tensor]:
    if param.sharded_state.name == "SHARDED_POST_FORWARD":
        return (param._sharded_post_forward_param_data,)
    return (param._sharded_param_data,)


def _makes_own_inputs(param: Any) -> bool:
    """Whether the parameter is of a tensor subclass that makes its own gather inputs (torchao's float8, and others)."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def makes_own_inputs(param_group: FSDPParamGroup) -> bool:
    """Whether some parameter of the group makes its own gather inputs, whose number, sizes and dtypes are known in the gather
    only. Each such parameter is taken to make one tensor of the shard's length, until a gather says otherwise."""
    return any(_makes_own_inputs(param) for param in param_group.fsdp_params)


def next_process_group(param_group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """The process group over which FSDP2 will gather the parameter group, in its present state; `None` for one that is not
    sharded."""
    if getattr(param_group.mesh_info, "shard_process_group", None) is None:
        return None
    return param_group._all_gather_process_group


def gather_input(param_group: FSDPParamGroup, dtype: torch.dtype, num_values: int) -> torch.Tensor | None:
    """The values that FSDP2 would put into this rank's slot of the next gather, [num_values] of `dtype`.

    `None` while the parameters are gathered, or where they make other inputs. Cost: the cast and copy that the gather makes.
    """
    params = param_group.fsdp_params
    if any(param.sharded_state.name not in ("SHARDED", "SHARDED_POST_FORWARD") for param in params):
        return None
    values = torch.empty(num_values, dtype=dtype, device=param_group.device)
    start = 0
    for param in params:
        makes_inputs = _makes_own_inputs(param) or param.offload_to_cpu
        for tensor in param.all_gather_inputs if makes_inputs else _gathered_tensors(param):
            cast_dtype = tensor.dtype if makes_inputs else param.param_dtype or tensor.dtype
            if dtype == torch.uint8 and cast_dtype != dtype:
                tensor = tensor.to(cast_dtype).view(torch.uint8)
            elif cast_dtype != dtype:
                return None
            stop = start + tensor.numel()
            if stop > num_values:
                return None
            values[start:stop].copy_(tensor.reshape(-1))
            start = stop
    return values if start == num_values else None


def gather_length(param_group: FSDPParamGroup, dtype: torch.dtype) -> int:
    """The number of values of `dtype` that this rank would contribute to the parameter group's next gather."""
    return sum(param_names_and_sizes(param_group, dtype)[2])


def names_are_known(param_group: FSDPParamGroup) -> bool:
    """Whether the FSDP root has run its first forward, and so has told its parameter groups their names."""
    return param_group._module_fqn is not None


def gather_dtype(param_group: FSDPParamGroup) -> torch.dtype:
    """The dtype that the parameter group's buffer will have: the parameters' own after the cast, or uint8 when they differ."""
    dtypes = {param.param_dtype or param._sharded_param_data.dtype for param in param_group.fsdp_params}
    return dtypes.pop() if len(dtypes) == 1 else torch.uint8


def group_phase(param_group: FSDPParamGroup) -> str:
    """The purpose of the gather: "forward", "backward", or "other" (a call of `unshard()` by the user)."""
    state = param_group._training_state
    if state == TrainingState.FORWARD:
        return "forward"
    return "backward" if state == TrainingState.PRE_BACKWARD else "other"


def shard_world_size(param_group: FSDPParamGroup) -> int:
    """The number of ranks that a full gather of this parameter group spans."""
    return int(getattr(param_group.mesh_info, "shard_mesh_size", 1))


def gather_groups(param_group: FSDPParamGroup, *, will_be_root: bool = False) -> list[tuple[dist.ProcessGroup, int]]:
    """The process groups over which these parameters are gathered, each with the number of gathers in a forward and its
    backward.

    With `reshard_after_forward=<int>` there are two (the whole shard mesh in forward, the smaller one in backward); otherwise
    one, with two gathers, or with a single one where parameters are kept after forward. A parameter group that is not sharded
    has none. FSDP2 settles only in the root's first forward that the root keeps its parameters: before, `will_be_root` says so.
    """
    whole, after_forward = param_group.mesh_info, param_group.post_forward_mesh_info
    if will_be_root and cast(FSDPModule, param_group.modules[0])._get_fsdp_state()._auto_reshard_after_forward:
        after_forward = None
    if after_forward is None or after_forward is whole:
        meshes = [(whole, 1 if after_forward is None else 2)]
    else:
        meshes = [(whole, 1), (after_forward, 1)]
    gathers = [(getattr(mesh, "shard_process_group", None), num_gathers) for mesh, num_gathers in meshes]
    return [(process_group, num_gathers) for process_group, num_gathers in gathers if process_group is not None]


def sibling_groups(param_group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """All parameter groups under the same FSDP root, in the root's order; just this one before the root's first forward."""
    root_context = cast(FSDPModule, param_group.modules[0])._get_fsdp_state()._state_ctx
    # fully_shard([a, b]) gives two modules one state, which torch before 2.12 lists twice
    siblings = {id(sibling): sibling for state in root_context.all_states for sibling in _param_groups_of_state(state)}
    return list(siblings.values()) if id(param_group) in siblings else [param_group]


@contextmanager
def ambient_defaults(device: torch.device) -> Iterator[None]:
    """Keeps what a user has set away from our tensors while the block lasts: inference mode, gradients, a default device."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != device.type:
            stack.enter_context(device)
        yield


def is_in_pass(param_group: FSDPParamGroup) -> bool:
    """Whether a forward or backward pass under the parameter group's root runs now. No optimizer step is expected then."""
    state = cast(FSDPModule, param_group.modules[0])._get_fsdp_state()
    context = state._state_ctx
    return (
        context.iter_forward_root is not None
        or context.post_backward_final_callback_queued
        or param_group._training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
    )


def watch_passes(param_group: FSDPParamGroup, on_begin: Callable[[], None]) -> Callable[[], None]:
    """Calls `on_begin` when a forward pass begins under the parameter group's root, on all ranks that run it, before anything
    is gathered. Returns a function that ends the watch. The root must have run its first forward.

    [Note: What begins a pass] The first module whose forward runs while no other's does: mostly the root, but users call
    parts of a model as well, and methods other than forward (`register_fsdp_forward_method`, which no module hook sees). FSDP2
    has one place for all of these. A forward in the middle of a backward is recomputation, and begins nothing.
    Test: test_agreement.py, what begins a pass.
    """
    context = cast(FSDPModule, param_group.modules[0])._get_fsdp_state()._state_ctx
    watchers: list[Callable[[], None]] | None = getattr(context, "_fsdp_ciera_watchers", None)
    if watchers is None:
        watchers = context._fsdp_ciera_watchers = []  # type: ignore[attr-defined]
        for state in context.all_states:
            state._root_pre_forward = _watched(state._root_pre_forward, context, watchers)
    watchers.append(on_begin)

    def end() -> None:
        watchers.remove(on_begin)
        if not watchers:
            del context._fsdp_ciera_watchers  # type: ignore[attr-defined]
            for state in context.all_states:
                vars(state).pop("_root_pre_forward", None)

    return end


def _watched(original: Callable[..., Any], context: Any, watchers: Sequence[Callable[[], None]]) -> Callable[..., Any]:
    @wraps(original)
    def root_pre_forward(*args: Any, **kwargs: Any) -> Any:
        if context.iter_forward_root is None and not context.post_backward_final_callback_queued:
            for on_begin in watchers:
                on_begin()
        return original(*args, **kwargs)

    return root_pre_forward


@contextmanager
def watch_groups(within: Callable[[FSDPParamGroup], AbstractContextManager[None]]) -> Iterator[None]:
    """Runs each parameter group's gathers and reductions of gradients inside `within(param_group)` while the block lasts.

    For measuring: FSDP2's calls of collectives do not say for which parameter group they are.
    """

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(param_group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            with within(param_group):
                return original(param_group, *args, **kwargs)

        return call

    originals = {name: getattr(FSDPParamGroup, name) for name in ("unshard", "post_backward")}
    for name, original in originals.items():
        setattr(FSDPParamGroup, name, watched(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)
