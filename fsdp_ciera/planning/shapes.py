"""`GroupShape`: all that the plan of a parameter group depends on. Live parameter groups have a shape, and so have those that a
model would get (fsdp_ciera.planning.estimate, fsdp_ciera.planning.forecast), so that one implementation plans all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_ciera._compat import FSDPParamGroup, gather_dtype, gather_groups, param_names_and_sizes, shard_world_size
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.gather.layout import Layout, build_layout
from fsdp_ciera.gather.topology import Cut, cut_of
from fsdp_ciera.policy import CieraPolicy


class Span(NamedTuple):
    """A process group that a parameter group is gathered over: this rank's cut of it, the most nodes in any rank's cut, and the
    number of gathers in a forward and its backward."""

    cut: Cut
    most_nodes: int
    num_gathers: int


@dataclass(frozen=True)
class GroupShape:
    """All that the plan of a parameter group depends on, and what its caches cost.

    `sizes` are the sizes of the padded local shards in the shard mesh of `world_size` ranks, in values of `dtype` and in the
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
        """The number of values of a shard when it is gathered over `span`, if it has `size` values in the whole shard mesh: all
        shards together keep their number of values."""
        return -(-size * self.world_size // span.cut.world_size)

    def layouts(self, codecs: Sequence[str]) -> Iterator[tuple[Span, Layout]]:
        """Each span with the layout that its gathers will have."""
        for span in self.spans:
            sizes = [self.size_in(span, size) for size in self.sizes]
            yield span, build_layout(self.names, sizes, codecs, sum(sizes), self.dtype)

    def held_output_bytes(self, codecs: Sequence[str]) -> int:
        """The bytes of outputs that are held for codecs that decode in place, beyond the part that counts as their caches: the
        runs of other codecs. 0 if no codec decodes in place. See [Note: The output is the cache] in codecs/value_delta.py."""
        in_place = [CODECS[codec].can_decode_in_place for codec in codecs]
        if not any(in_place):
            return 0
        others = [size for size, is_in_place in zip(self.sizes, in_place, strict=True) if not is_in_place]
        return self.dtype.itemsize * sum(
            self.size_in(span, size) * span.most_nodes for span in self.spans for size in others
        )

    def cost_bytes(self, codec: str, size: int, block_size: int) -> int:
        """The most bytes of caches that one parameter costs any rank, over all spans.

        The caches that are held are never larger: neighbours with the same codec share a run, and so a last block.
        """
        return sum(
            CODECS[codec].cache_bytes(self.size_in(span, size), self.dtype, block_size, span.most_nodes - 1)
            for span in self.spans
        )


def spans_of(process_groups: Sequence[tuple[Sequence[int], int]], policy: CieraPolicy) -> tuple[Span, ...]:
    """The spans of a parameter group that is gathered over `process_groups` (global ranks, and the number of gathers in a
    forward and its backward): the whole shard mesh, then its parts.

    A process group of one rank gathers nothing. [Note: Ranks whose parts lie differently] With
    `reshard_after_forward=<int>` nodes may cut the parts of different ranks differently. The plan must not depend on
    that, so `most_nodes` looks at all parts: the equally long stretches of the whole. Test: test_budget.py, parts.
    """
    spans = []
    for ranks, num_gathers in process_groups:
        length, whole = len(ranks), process_groups[0][0]
        if length > 1:
            cuts = [cut_of(whole[start : start + length], policy) for start in range(0, len(whole), length)]
            spans.append(Span(cut_of(ranks, policy), max(cut.num_nodes for cut in cuts), num_gathers))
    return tuple(spans)


def spans_of_group(param_group: FSDPParamGroup, policy: CieraPolicy, *, will_be_root: bool = False) -> tuple[Span, ...]:
    """The spans of a live parameter group. Before its root's first forward `will_be_root` says whether it is the root's."""
    gathers = gather_groups(param_group, will_be_root=will_be_root)
    process_groups = [
        (dist.get_process_group_ranks(process_group), num_gathers) for process_group, num_gathers in gathers
    ]
    return spans_of(process_groups, policy)


def shape_of(param_group: FSDPParamGroup, policy: CieraPolicy) -> GroupShape:
    """The shape of a live parameter group; its root must have run its first forward."""
    dtype = gather_dtype(param_group)
    _, names, sizes = param_names_and_sizes(param_group, dtype)
    spans = spans_of_group(param_group, policy)
    return GroupShape(tuple(names), tuple(sizes), dtype, shard_world_size(param_group), spans)
