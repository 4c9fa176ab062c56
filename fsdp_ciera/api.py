"""The public surface: put compressed all-gathers on FSDP2 modules, take them off, and read what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_ciera._compat import (
    FSDPModule,
    FSDPParamGroup,
    ambient_defaults,
    get_comm,
    is_default_comm,
    param_groups,
    restore_default_comm,
    set_comm,
    shard_world_size,
    torch_fully_shard,
)
from fsdp_ciera.errors import CieraConflictError, CieraDesyncError, CieraMismatchError, CieraPeerError, CieraPolicyError
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.session import Session
from fsdp_ciera.statistics import CieraStats

ModuleT = TypeVar("ModuleT", nn.Module, list[nn.Module])


@dataclass(frozen=True)
class AttachReport:
    """The FSDP modules that gather through fsdp_ciera since `attach`."""

    modules: tuple[str, ...]
    num_groups: int
    world_size: int

    def __str__(self) -> str:
        note = "; world_size is 1, so nothing will be gathered" if self.world_size == 1 else ""
        return f"fsdp_ciera: {self.num_groups} groups of {len(self.modules)} FSDP modules attached{note}"


def fully_shard(
    module: ModuleT,
    *,
    ciera_policy: CieraPolicy | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    **newer_arguments: Any,
) -> ModuleT:
    """Calls torch's `fully_shard`. With a `ciera_policy`, the module's all-gathers run through fsdp_ciera.

    Every other argument goes to torch unchanged, also those of a newer torch that are not named here; an argument that is
    `None` is left to torch's own default. The return value is torch's. Without a policy the module is stock FSDP2. All ranks
    must pass the same policy; the first gather checks that. For what it costs see `CieraPolicy`.

    Raises `CieraPolicyError` when `ciera_policy` is no `CieraPolicy`, or when the module is already under FSDP2 (call `attach`
    then), and whatever torch's `fully_shard` raises.
    """
    named_arguments = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    fsdp_arguments = {name: value for name, value in named_arguments.items() if value is not None} | newer_arguments
    if ciera_policy is None:
        return cast(ModuleT, torch_fully_shard(module, **fsdp_arguments))
    _check_policy(ciera_policy, "ciera_policy")
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for submodule in modules:
        if isinstance(submodule, FSDPModule):
            raise CieraPolicyError(
                f"{type(submodule).__name__} is already under FSDP2, so fully_shard(ciera_policy=...) cannot shard it again: "
                "call fsdp_ciera.attach(model, policy) to compress the all-gathers of a model that is already sharded"
            )
    sharded = torch_fully_shard(module, **fsdp_arguments)
    for param_group in param_groups(modules[0]):
        set_comm(param_group, CieraAllGather(param_group, ciera_policy, Session.of))
    return cast(ModuleT, sharded)


fully_shard.state = torch_fully_shard.state  # type: ignore[attr-defined]


def attach(model: nn.Module, policy: CieraPolicy) -> AttachReport:
    """Compresses the all-gathers of every FSDP2 module in `model`, whoever sharded it, from the next gather on.

    Call it on all ranks with the same policy, at any time between steps. Modules with several parameter groups (experts
    on a mesh of their own) get one collective per parameter group.

    Raises `CieraPolicyError` when there is no FSDP2 module or `policy` is no `CieraPolicy`, and `CieraConflictError` when a
    module already has a custom all-gather (ours or another). Either way nothing has been changed.
    """
    _check_policy(policy, "policy")
    if not isinstance(model, nn.Module):
        raise CieraPolicyError(f"model={model!r} must be the torch module that holds the FSDP2 modules")
    fsdp_modules = list(_fsdp_modules(model))
    if not fsdp_modules:
        raise CieraPolicyError(
            f"{type(model).__name__} holds no FSDP2 module: call fully_shard on it first, or "
            "fsdp_ciera.fully_shard(module, ciera_policy=policy) instead"
        )
    for name, param_group in _named_param_groups(model):
        comm = get_comm(param_group)
        if isinstance(comm, CieraAllGather):
            raise CieraConflictError(f"module {name!r} already has a CieraPolicy: call fsdp_ciera.detach(model) first")
        if not is_default_comm(comm):
            raise CieraConflictError(
                f"module {name!r} already has a custom all-gather, {type(comm).__name__}: fsdp_ciera replaces the "
                "all-gather, so it cannot be combined with symmetric memory, process-group allocation or another "
                "custom one. Turn that off before attach()"
            )
    attached = [param_group for _, param_group in _named_param_groups(model)]
    for param_group in attached:
        set_comm(param_group, CieraAllGather(param_group, policy, Session.of))
    world_size = max(map(shard_world_size, attached), default=1)
    return AttachReport(tuple(name for name, _ in fsdp_modules), len(attached), world_size)


def detach(model: nn.Module) -> None:
    """Makes every FSDP2 module in `model` gather as stock FSDP2 again, and frees the caches. Call it on all ranks."""
    for _, param_group in _named_param_groups(model):
        comm = get_comm(param_group)
        if isinstance(comm, CieraAllGather):
            restore_default_comm(param_group)
            comm.release()
            if isinstance(comm.session, Session):
                comm.session.remove(comm)


def invalidate(model: nn.Module) -> None:
    """Drops all caches of `model`: the next gather of every parameter group is a full one.

    Never needed for correctness (the encoder compares bytes, so `load_state_dict` and `param.data` writes are seen); it
    frees memory, and clears doubt after an exception. One rank alone may call it: the others follow. On CPU the memory is
    free at once. On CUDA this rank must first send what it has agreed on: the memory is free, and gathers are full ones,
    from the next agreement on, which comes with the next forward pass or `settle_sizes`.
    """
    for comm in _comms(model):
        comm.invalidate()


def settle_sizes(model: nn.Module) -> int:
    """Agrees on the payloads of all parameter groups of `model` at once, right now.

    Optional: the first gather of a forward pass agrees by itself. Call it on all ranks after `optimizer.step()` where the wait
    for the slowest rank suits you better there. Parameter groups that have not been gathered yet, or whose parameters are
    gathered now, are left out, and so are the backward gathers of `reshard_after_forward=<int>`. Weights may change afterwards:
    on CPU the next gather notices, on all ranks, and sends the shards as they are; on CUDA the next pass agrees once more.

    Returns the number of parameter groups settled. Memory: the encoded changes of all parameter groups until their first
    gather. Communication: one small all-reduce a process group. Raises on all ranks together as a gather does.
    """
    sessions = list(
        {id(comm.session): comm.session for comm in _comms(model) if isinstance(comm.session, Session)}.values()
    )
    by_name = {
        process_group.group_name: process_group for session in sessions for process_group in session.process_groups()
    }
    # ranks may hold other process groups, and must come to those they share in one order
    process_groups = sorted(
        by_name.values(),
        key=lambda process_group: (
            -process_group.size(),
            dist.get_process_group_ranks(process_group),
            process_group.group_name,
        ),
    )
    error: Exception | None = None
    num_settled = 0
    for process_group in process_groups:
        for session in sessions:
            if any(coming.group_name == process_group.group_name for coming in session.process_groups()):
                try:  # ranks of other process groups may fail where these do not: all meet in all of them
                    with ambient_defaults(session.backend.device):
                        num_settled += session.agree_ahead(process_group)
                except (CieraDesyncError, CieraMismatchError, CieraPeerError) as failure:
                    error = error or failure
    if error is not None:
        raise error
    return num_settled


def stats(model: nn.Module) -> CieraStats:
    """Counts what this rank has sent for the parameter gathers of `model` since `attach` or `fully_shard`. No communication.

    Raises `CieraConflictError` when no module of `model` gathers through fsdp_ciera (nobody attached it, or another tool
    has replaced the all-gather).
    """
    comms = list(_comms(model))
    if not comms:
        raise CieraConflictError(
            f"no module of {type(model).__name__} gathers through fsdp_ciera: call attach(model, policy), or see whether "
            "another tool has replaced the all-gather since"
        )
    report = CieraStats(world_size=max(shard_world_size(comm.param_group) for comm in comms))
    for comm in comms:
        report.merge(comm.stats())
        for plan in comm.session.plans if isinstance(comm.session, Session) else ():
            if not any(plan is other for other in report.plans):
                report.plans.append(plan)
    return report


def _check_policy(policy: object, argument: str) -> None:
    if not isinstance(policy, CieraPolicy):
        raise CieraPolicyError(
            f"{argument}={policy!r} must be a fsdp_ciera.CieraPolicy, for example CieraPolicy.paper()"
        )


def _fsdp_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name or type(module).__name__, cast(nn.Module, module)


def _named_param_groups(model: nn.Module) -> Iterator[tuple[str, FSDPParamGroup]]:
    seen: set[int] = set()  # fully_shard([a, b]) gives several modules the same parameter group
    for name, module in _fsdp_modules(model):
        for param_group in param_groups(module):
            if id(param_group) not in seen:
                seen.add(id(param_group))
                yield name, param_group


def _comms(model: nn.Module) -> Iterator[CieraAllGather]:
    for _, param_group in _named_param_groups(model):
        comm = get_comm(param_group)
        if isinstance(comm, CieraAllGather):
            yield comm
