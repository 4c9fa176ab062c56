"""The one file that touches FSDP2's private names (torch 2.9 to 2.14).

What differs between the versions: an FSDP state holds one parameter group (`_fsdp_param_group`, up to 2.11) or a list
of them (`_fsdp_param_groups`, from 2.12), and c10d's gather of one tensor is `all_gather_into_tensor` (up to 2.12) or
`all_gather_single` (from 2.13, where the old name warns). The public `set_custom_all_gather` refuses modules with
several parameter groups, which is what experts on a mesh of their own give; so the collective is set on each group
directly, as FSDP2 itself does for symmetric memory.
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


def all_gather_flat(output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    """One c10d all-gather of `local` ([n]) into `output` ([world_size * n]), under the name this torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, local, group=group, async_op=async_op)


def _device_of_numbers(group: dist.ProcessGroup) -> torch.device:
    """Where this process group takes small messages: on CPU, unless it has backends for other devices only (NCCL alone).
    Process groups in Python and those of threads list no device, and take CPU tensors."""
    kinds = {device.type for device in group._device_types}
    if not kinds or "cpu" in kinds or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_gather_bytes(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """uint8 [n] on CPU, the same n on every rank -> uint8 [world_size, n] on CPU. The host waits."""
    told = local.to(_device_of_numbers(group))
    gathered = torch.empty(group.size() * told.numel(), dtype=torch.uint8, device=told.device)
    all_gather_flat(gathered, told, group, async_op=False)
    return gathered.view(group.size(), -1).cpu()


def broadcast_bytes(data: bytes, group: dist.ProcessGroup) -> bytes:
    """The bytes of the group's first rank, on all ranks. The host waits."""
    device = _device_of_numbers(group)
    size = torch.full((1,), len(data), dtype=torch.int64, device=device)
    dist.broadcast(size, group=group, group_src=0)
    told = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if group.rank() == 0:
        told.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(told, group=group, group_src=0)
    return bytes(told.cpu().numpy())


def all_reduce_max(numbers: torch.Tensor, group: dist.ProcessGroup) -> None:
    """int64 of any shape, in place: the largest of each over all ranks. On the device of `numbers`, where the group takes
    that."""
    kinds = {device.type for device in group._device_types}
    if not kinds or numbers.device.type in kinds:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        return
    told = numbers.to(_device_of_numbers(group))
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    numbers.copy_(told)


def new_local_group(ranks: Sequence[int], parent: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A process group of these global ranks with the backends and the timeout of `parent`; collective over them alone. `name`
    must be the same for all of them, and never used before.

    [Note: Names of process groups] c10d names a group that only its members make after a count of this process, and the members
    meet in the store under that name. Where a rank has made more groups than another (a group for logging, one of the first
    and last stage), the counts differ, and the members wait for each other for ever. So the name is given.
    Test: test_faults.py, other process groups.
    """
    with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda _: name):
        group = dist.new_group(
            list(ranks),
            timeout=_timeout_of(parent),
            backend=dist.get_backend_config(parent),
            use_local_synchronization=True,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Of whichever backend says one."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def default_store() -> Any:
    """The key-value store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()  # a torch Store, which mypy cannot see


def param_groups(module: nn.Module) -> list[FSDPParamGroup]:
    """The parameter groups that `fully_shard` made for exactly this module (none if it holds no parameter itself)."""
    return _groups_of_state(cast(FSDPModule, module)._get_fsdp_state())


def _groups_of_state(state: Any) -> list[FSDPParamGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.9 to 2.11: one group or none
        only = state._fsdp_param_group
        groups = [] if only is None else [only]
    return list(groups)


def get_comm(group: FSDPParamGroup) -> AllGather:
    """The all-gather object that the group calls."""
    return group._all_gather_comm


def is_default_comm(comm: AllGather) -> bool:
    """Whether `comm` is FSDP2's own plain all-gather (and not a symmetric-memory, pooled or user-made one)."""
    return type(comm) is DefaultAllGather


def set_comm(group: FSDPParamGroup, comm: AllGather) -> None:
    """Makes the group call `comm` from the next gather on."""
    group._all_gather_comm = comm


def restore_default_comm(group: FSDPParamGroup) -> None:
    """Makes the group call FSDP2's plain all-gather again."""
    group._all_gather_comm = DefaultAllGather()


def param_names_and_sizes(group: FSDPParamGroup, dtype: torch.dtype) -> tuple[str, list[str], list[int]]:
    """The group's module name, and per gathered stretch its parameter name and its length in elements of `dtype`.

    Names are full from the root once the root has run its first forward, relative to the FSDP module before. Lengths
    are those of the padded local shard that the group gathers in its present state; in a uint8 buffer (a group of
    several dtypes) they are in bytes.
    """
    relative = {id(submodule): prefix for root in reversed(group.modules) for prefix, submodule in root.named_modules()}
    names: list[str] = []
    sizes: list[int] = []
    for param in group.fsdp_params:
        name = param._param_fqn
        if name is None:
            prefix = relative.get(id(param._module_info.module), "")
            name = f"{prefix}.{param._module_info.param_name}" if prefix else param._module_info.param_name
        for tensor in _gathered_tensors(param):
            item_bytes = (param.param_dtype or tensor.dtype).itemsize
            names.append(name)
            sizes.append(tensor.numel() * item_bytes // dtype.itemsize if dtype == torch.uint8 else tensor.numel())
    return group._module_fqn or type(group.modules[0]).__name__, names, sizes


def sharded_parameters(group: FSDPParamGroup) -> list[tuple[nn.Parameter, int, torch.dtype | None]]:
    """Each parameter, the values of its padded local shard, and the dtype that the group casts to (`None`: its own).

    Other than `param_names_and_sizes` it works before the root's first forward, when FSDP2 has settled no dtypes.
    """
    cast_dtype = group.mp_policy.param_dtype
    return [(p.sharded_param, p.padded_sharded_param_size.numel(), cast_dtype) for p in group.fsdp_params]


def _gathered_tensors(param: Any) -> Sequence[torch.Tensor]:
    if param.sharded_state.name == "SHARDED_POST_FORWARD":
        return (param._sharded_post_forward_param_data,)
    return (param._sharded_param_data,)


def _makes_own_inputs(param: Any) -> bool:
    """Whether the parameter is of a tensor subclass that makes its own gather inputs (torchao's float8, and others)."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def makes_own_inputs(group: FSDPParamGroup) -> bool:
    """Whether some parameter of the group makes its own gather inputs: their number, sizes and dtypes are known in the gather
    only. They are taken to be one tensor of the shard's length each, until a gather says otherwise."""
    return any(_makes_own_inputs(param) for param in group.fsdp_params)


def next_process_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """What FSDP2 will gather the group over, in its present state; `None` for a group that is not sharded."""
    if getattr(group.mesh_info, "shard_process_group", None) is None:
        return None
    return group._all_gather_process_group


def gather_input(group: FSDPParamGroup, dtype: torch.dtype, num_values: int) -> torch.Tensor | None:
    """What FSDP2 would put into this rank's slot of the next gather, [num_values] of `dtype`.

    `None` while the parameters are gathered, or where they make something else. Cost: the cast and copy that the gather makes.
    """
    params = group.fsdp_params
    if any(param.sharded_state.name not in ("SHARDED", "SHARDED_POST_FORWARD") for param in params):
        return None
    values = torch.empty(num_values, dtype=dtype, device=group.device)
    start = 0
    for param in params:
        own = _makes_own_inputs(param) or param.offload_to_cpu
        for tensor in param.all_gather_inputs if own else _gathered_tensors(param):
            cast_dtype = tensor.dtype if own else param.param_dtype or tensor.dtype
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


def gather_length(group: FSDPParamGroup, dtype: torch.dtype) -> int:
    """Values of `dtype` that the group would contribute to its next gather."""
    return sum(param_names_and_sizes(group, dtype)[2])


def names_are_known(group: FSDPParamGroup) -> bool:
    """Whether the FSDP root has run its first forward, and so has told its groups their names."""
    return group._module_fqn is not None


def gather_dtype(group: FSDPParamGroup) -> torch.dtype:
    """The dtype that the group's buffer will have: the parameters' own after the cast, or uint8 when they differ."""
    dtypes = {param.param_dtype or param._sharded_param_data.dtype for param in group.fsdp_params}
    return dtypes.pop() if len(dtypes) == 1 else torch.uint8


def group_phase(group: FSDPParamGroup) -> str:
    """What the gather is for: "forward", "backward", or "other" (a call of `unshard()` by the user)."""
    state = group._training_state
    if state == TrainingState.FORWARD:
        return "forward"
    return "backward" if state == TrainingState.PRE_BACKWARD else "other"


def shard_world_size(group: FSDPParamGroup) -> int:
    """The number of ranks that a full gather of this group spans."""
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def gather_groups(group: FSDPParamGroup, *, will_be_root: bool = False) -> list[tuple[dist.ProcessGroup, int]]:
    """The process groups that this group's parameters are gathered over, and how often in a forward and its backward.

    With `reshard_after_forward=<int>` two (the whole shard mesh in forward, the smaller one in backward), otherwise one, of
    two gathers or, where parameters are kept after forward, of a single one. None for a group that is not sharded. FSDP2
    settles only in the root's first forward that the root keeps its parameters: before, `will_be_root` says so.
    """
    whole, after_forward = group.mesh_info, group.post_forward_mesh_info
    if will_be_root and cast(FSDPModule, group.modules[0])._get_fsdp_state()._auto_reshard_after_forward:
        after_forward = None
    if after_forward is None or after_forward is whole:
        infos = [(whole, 1 if after_forward is None else 2)]
    else:
        infos = [(whole, 1), (after_forward, 1)]
    found = [(getattr(info, "shard_process_group", None), num_gathers) for info, num_gathers in infos]
    return [(process_group, num_gathers) for process_group, num_gathers in found if process_group is not None]


def sibling_groups(group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """All parameter groups under the same FSDP root, in the root's order; just `group` before the root's first forward."""
    state = cast(FSDPModule, group.modules[0])._get_fsdp_state()
    # fully_shard([a, b]) gives two modules one state, which torch before 2.12 lists twice
    groups = {id(sibling): sibling for other in state._state_ctx.all_states for sibling in _groups_of_state(other)}
    return list(groups.values()) if id(group) in groups else [group]


@contextmanager
def ambient_defaults(device: torch.device) -> Iterator[None]:
    """While the block lasts, what a user has set does not reach our tensors: inference mode, gradients, a default device."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != device.type:
            stack.enter_context(device)
        yield


def is_in_pass(group: FSDPParamGroup) -> bool:
    """Whether a forward pass under the group's root runs now, or a backward pass: then no optimizer step is expected."""
    state = cast(FSDPModule, group.modules[0])._get_fsdp_state()
    context = state._state_ctx
    return (
        context.iter_forward_root is not None
        or context.post_backward_final_callback_queued
        or group._training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
    )


def watch_passes(group: FSDPParamGroup, on_begin: Callable[[], None]) -> Callable[[], None]:
    """Calls `on_begin` when a forward pass begins under the group's root, on all ranks that run it, before anything is
    gathered. -> what ends the watch. The root must have run its first forward.

    [Note: What begins a pass] The first module whose forward runs while no other's does: mostly the root, but users call
    parts of a model as well, and methods other than forward (`register_fsdp_forward_method`, which no module hook sees). FSDP2
    has one place for all of these. A forward in the middle of a backward is recomputation, and begins nothing.
    Test: test_agreement.py, what begins a pass.
    """
    context = cast(FSDPModule, group.modules[0])._get_fsdp_state()._state_ctx
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
    """While the block lasts, every group's gathering and its reduction of gradients run inside `within(group)`.

    For measuring: what FSDP2 does with collectives does not say for which group.
    """

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            with within(group):
                return original(group, *args, **kwargs)

        return call

    originals = {name: getattr(FSDPParamGroup, name) for name in ("unshard", "post_backward")}
    for name, original in originals.items():
        setattr(FSDPParamGroup, name, watched(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)
