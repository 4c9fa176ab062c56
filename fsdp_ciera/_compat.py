"""The one file that touches FSDP2's private names (torch 2.9 to 2.14).

What differs between the versions: an FSDP state holds one parameter group (`_fsdp_param_group`, up to 2.11) or a list
of them (`_fsdp_param_groups`, from 2.12), and c10d's gather of one tensor is `all_gather_into_tensor` (up to 2.12) or
`all_gather_single` (from 2.13, where the old name warns). The public `set_custom_all_gather` refuses modules with
several parameter groups, which is what experts on a mesh of their own give; so the collective is set on each group
directly, as FSDP2 itself does for symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, cast

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
    "check_torch_version",
    "default_store",
    "gather_dtype",
    "gather_groups",
    "gather_input",
    "get_comm",
    "group_phase",
    "is_default_comm",
    "names_are_known",
    "new_local_group",
    "param_groups",
    "param_names_and_sizes",
    "restore_default_comm",
    "set_comm",
    "shard_world_size",
    "sharded_parameters",
    "sibling_groups",
    "torch_fully_shard",
    "watch_groups",
]


def all_gather_flat(output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
    """One c10d all-gather of `local` ([n]) into `output` ([world_size * n]), under the name this torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, local, group=group, async_op=async_op)


def all_gather_bytes(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """uint8 [n] on CPU, the same n on every rank -> uint8 [world_size, n] on CPU.

    A process group without a CPU backend (NCCL alone) moves them over its GPUs, and the host waits.
    """
    has_cpu = any(device.type == "cpu" for device in group._device_types)
    told = local if has_cpu else local.cuda()
    gathered = torch.empty(group.size(), told.numel(), dtype=torch.uint8, device=told.device)
    all_gather_flat(gathered.view(-1), told, group, async_op=False)
    return gathered.cpu()


def new_local_group(ranks: Sequence[int], parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group of these global ranks with the backends and the timeout of `parent`; collective over them alone."""
    backend = parent._get_backend(torch.device("cpu"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    config = dist.get_backend_config(parent)
    group = dist.new_group(list(ranks), timeout=timeout, backend=config, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


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
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        return ()  # an extension makes its own inputs: the layout then falls back to one raw run
    if param.sharded_state.name == "SHARDED_POST_FORWARD":
        return (param._sharded_post_forward_param_data,)
    return (param._sharded_param_data,)


def gather_input(group: FSDPParamGroup) -> tuple[dist.ProcessGroup, torch.Tensor] | None:
    """The process group of the next forward gather, and what FSDP2 would put into this rank's slot of it [num_values].

    `None` unless all parameters are sharded now, and for parameters that make their own gather inputs. Cost: the cast and
    copy that the gather makes.
    """
    params = group.fsdp_params
    if any(
        p.sharded_state.name != "SHARDED" or hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in params
    ):
        return None
    inputs = [tensor for param in params for tensor in param.all_gather_inputs]
    if gather_dtype(group) == torch.uint8:
        inputs = [tensor.view(torch.uint8) for tensor in inputs]
    process_group = cast(Any, group.mesh_info).shard_process_group
    return process_group, torch.cat([tensor.reshape(-1) for tensor in inputs])


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
