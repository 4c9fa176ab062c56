"""The plan: which codec each parameter's shard is sent with. Decided once per group, from figures that all ranks share.

The figures are those of a `GroupShape`. Live groups have one, and so have the groups that a model would get
(fsdp_ciera.memory), so that one implementation plans both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from fsdp_ciera._compat import (
    FSDPParamGroup,
    gather_dtype,
    gather_ranks,
    get_comm,
    param_names_and_sizes,
    shard_world_size,
    sibling_groups,
)
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.layout import Layout, build_layout
from fsdp_ciera.policies.budget import choose_within_budget
from fsdp_ciera.policies.categories import categorize
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.presence import wait_for_peers
from fsdp_ciera.topology import Cut, cut_of

if TYPE_CHECKING:
    from fsdp_ciera.collective import CieraAllGather


class Span(NamedTuple):
    """A process group that a group is gathered over: this rank's cut of it, and the most nodes in any rank's cut."""

    cut: Cut
    most_nodes: int


@dataclass(frozen=True)
class GroupShape:
    """All that the plan of a group depends on, and all that its caches cost.

    `sizes` are those of the padded local shards in the shard mesh of `world_size` ranks, in values of `dtype` and in the
    order of the buffer.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    world_size: int
    spans: tuple[Span, ...]

    @property
    def shard_bytes(self) -> int:
        """Bytes that one rank contributes to a gather over the whole shard mesh."""
        return sum(self.sizes) * self.dtype.itemsize

    def size_in(self, span: Span, size: int) -> int:
        """The values of a shard when it is gathered over `span`: all ranks' together are as many as ever."""
        return -(-size * self.world_size // span.cut.world_size)

    def layouts(self, codecs: Sequence[str]) -> Iterator[tuple[Span, Layout]]:
        """The runs of every span, as its gathers will have them."""
        for span in self.spans:
            sizes = [self.size_in(span, size) for size in self.sizes]
            yield span, build_layout(self.names, sizes, codecs, sum(sizes), self.dtype)


def spans_of(process_groups: Sequence[Sequence[int]], policy: CieraPolicy) -> tuple[Span, ...]:
    """What a group spans that is gathered over these process groups (global ranks): the whole shard mesh, then its parts.

    A process group of one rank gathers nothing. [Note: Ranks whose parts lie differently] With
    `reshard_after_forward=<int>` nodes may cut the parts of different ranks differently. The plan must not depend on
    that, so `most_nodes` looks at all parts: the equally long stretches of the whole. Test: test_budget.py, parts.
    """
    spans = []
    for ranks in process_groups:
        length, whole = len(ranks), process_groups[0]
        if length > 1:
            cuts = [cut_of(whole[start : start + length], policy) for start in range(0, len(whole), length)]
            spans.append(Span(cut_of(ranks, policy), max(cut.num_nodes for cut in cuts)))
    return tuple(spans)


def shape_of(group: FSDPParamGroup, policy: CieraPolicy) -> GroupShape:
    """The shape of a live group; its root must have run its first forward."""
    dtype = gather_dtype(group)
    _, names, sizes = param_names_and_sizes(group, dtype)
    spans = spans_of(gather_ranks(group), policy)
    return GroupShape(tuple(names), tuple(sizes), dtype, shard_world_size(group), spans)


def cost_bytes(shape: GroupShape, codec: str, size: int, policy: CieraPolicy) -> int:
    """Most bytes of caches that one parameter of `shape` costs any rank, over all spans.

    The caches that are held are never more: neighbours with the same codec share a run, and so a last block.
    """
    return sum(
        CODECS[codec].cache_bytes(shape.size_in(span, size), shape.dtype, policy.block_size, span.most_nodes - 1)
        for span in shape.spans
    )


def choose_codecs(shapes: Sequence[GroupShape], policy: CieraPolicy, budget_bytes: int | None) -> list[tuple[str, ...]]:
    """The codec of every parameter of every group, within `budget_bytes` for all of them. The same on every rank.

    Each takes the first of the policy's codecs that knows its dtype and still fits; what takes none goes raw.
    """
    rows: list[list[int | None]] = []
    for shape in shapes:
        for name, size in zip(shape.names, shape.sizes, strict=True):
            allowed = [codec for codec in policy.codecs_for(categorize(name)) if CODECS[codec].supports(shape.dtype)]
            rows.append(
                [cost_bytes(shape, codec, size, policy) if codec in allowed else None for codec in policy.codecs]
            )
    choices = iter(choose_within_budget(rows, budget_bytes))
    return [
        tuple("raw" if (choice := next(choices)) is None else policy.codecs[choice] for _ in shape.names)
        for shape in shapes
    ]


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
    if left_bytes is not None:
        left_bytes = max(0, left_bytes - sum(_planned_bytes(comm) for comm in comms))
    fresh = [comm for comm in comms if comm.planned_codecs is None]
    plans = choose_codecs([shape_of(comm.param_group, policy) for comm in fresh], policy, left_bytes)
    for comm, codecs in zip(fresh, plans, strict=True):
        comm.planned_codecs = codecs


def _planned_bytes(comm: CieraAllGather) -> int:
    """The share of the budget that a group has; 0 before it is planned."""
    if comm.planned_codecs is None:
        return 0
    shape = shape_of(comm.param_group, comm.policy)
    return sum(
        cost_bytes(shape, codec, size, comm.policy)
        for codec, size in zip(comm.planned_codecs, shape.sizes, strict=True)
    )
