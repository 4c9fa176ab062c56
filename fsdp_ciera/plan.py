"""The plan: which codec each parameter's shard is sent with. Decided once per group, from figures that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from fsdp_ciera._compat import (
    FSDPParamGroup,
    gather_dtype,
    gather_world_sizes,
    get_comm,
    param_names_and_sizes,
    shard_world_size,
    sibling_groups,
)
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.policies.budget import select_within_budget
from fsdp_ciera.policies.categories import categorize
from fsdp_ciera.presence import wait_for_peers

if TYPE_CHECKING:
    from fsdp_ciera.collective import CieraAllGather


class _Shard(NamedTuple):
    comm: CieraAllGather
    codec: str
    cache_bytes: int


def codecs_of(comm: CieraAllGather, dtype: torch.dtype, group: dist.ProcessGroup) -> Sequence[str]:
    """The codec of every parameter of `comm`'s group when gathered as `dtype`.

    The first call plans for all groups under the same FSDP root that carry an equal policy, since they share its
    `cache_budget`, and waits a little for the peers in the process group `group` (fsdp_ciera.presence). A group that is
    planned keeps its plan, and its share of the budget.
    """
    if comm.planned_codecs is None:
        module, _, _ = param_names_and_sizes(comm.param_group, dtype)
        wait_for_peers(group, module)
        _plan(comm)
    assert comm.planned_codecs is not None
    return tuple(codec if CODECS[codec].supports(dtype) else "raw" for codec in comm.planned_codecs)


def _plan(first: CieraAllGather) -> None:
    policy = first.policy
    siblings = [get_comm(group) for group in sibling_groups(first.param_group)]
    comms = [comm for comm in siblings if isinstance(comm, type(first)) and comm.policy == policy]
    left_bytes = policy.cache_budget_bytes
    shards: list[_Shard] = []
    for comm in comms:
        if comm.planned_codecs is None:
            shards += _shards(comm, None)
        elif left_bytes is not None:
            left_bytes -= sum(shard.cache_bytes for shard in _shards(comm, comm.planned_codecs))
    keep = select_within_budget([shard.cache_bytes for shard in shards], left_bytes)
    for comm in comms:
        if comm.planned_codecs is None:
            mine = [(shard, kept) for shard, kept in zip(shards, keep, strict=True) if shard.comm is comm]
            comm.planned_codecs = tuple(shard.codec if kept else "raw" for shard, kept in mine)


def _shards(comm: CieraAllGather, codecs: Sequence[str] | None) -> list[_Shard]:
    """The parameters of a group with the given codecs, or with those that the policy gives their categories."""
    group, policy = comm.param_group, comm.policy
    dtype = gather_dtype(group)
    _, names, sizes = param_names_and_sizes(group, dtype)
    if codecs is None:
        codecs = [policy.codec_for(categorize(name)) for name in names]
    return [
        _Shard(comm, codec, cache_bytes_of(group, codec, size, dtype, policy.block_size))
        for codec, size in zip(codecs, sizes, strict=True)
    ]


def cache_bytes_of(group: FSDPParamGroup, codec: str, shard_values: int, dtype: torch.dtype, block_size: int) -> int:
    """Most bytes of cache on one rank for a parameter with `shard_values` values in the full shard mesh, in all gathers."""
    world_size = shard_world_size(group)
    if not CODECS[codec].supports(dtype):
        return 0
    return sum(
        CODECS[codec].cache_bytes(-(-shard_values * world_size // size), dtype, block_size, size - 1)
        for size in gather_world_sizes(group)
    )
