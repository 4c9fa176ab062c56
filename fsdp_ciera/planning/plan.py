"""`Plan`: which codec each parameter's shard is sent with and what that is expected to bring, and `Conditions`: what it depends
on besides the groups and the policy. fsdp_ciera.planning.choose makes plans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fsdp_ciera.policies.categories import Category
from fsdp_ciera.policies.costs import FREE, CodecCost
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policies.tables import Table
from fsdp_ciera.units import format_bytes

if TYPE_CHECKING:
    from fsdp_ciera.planning.shapes import GroupShape


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a plan depends on besides shapes and policy."""

    links: Sequence[Sequence[Link]] | None = None
    """By group and span. `None`: the links are so slow that bytes are all that counts."""
    costs: Mapping[str, CodecCost] = field(default_factory=dict)
    """By codec; a codec that is left out takes no time."""
    budget_bytes: int | None = None
    table: Table | None = None
    """`None`: the policy's own."""
    missing_codecs: frozenset[str] = frozenset()
    """Those that the device cannot run."""
    overlap: bool = False
    """Whether encoding runs beside other work, and so costs no time (the paper's CCP). On CPU every gather blocks."""
    measured: Sequence[npt.NDArray[np.float64] | None] | None = None
    """By group: bytes that each rank would have sent, float64 [ranks, parameters, codecs of the policy], in a gather after a
    change of the weights; NaN where nobody measured. Goes before the table."""
    current: Sequence[Sequence[str]] | None = None
    """By group and parameter: the codecs in force, when a plan is renewed. A group changes them only when that gains more
    until the next renewal than the full gather that follows a change costs."""

    def per_gather_seconds(self, codecs: Collection[str]) -> float:
        """What a gather takes besides its runs when its group has these codecs, not all raw: that of the slowest one."""
        return max(self.costs.get(codec, FREE).per_gather_seconds(self.overlap) for codec in codecs)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What shards of one category with one codec do in an optimizer step, as expected. Bytes are those that leave a rank."""

    category: Category
    codec: str
    num_shards: int = 0
    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    in_node_bytes: float = 0.0
    """Those of the wire bytes that stay inside the node: the plain half of hierarchical gathers."""
    cache_bytes: int = 0
    gain_seconds: float = 0.0
    """Seconds that raw gathers would take longer; 0 where only bytes count."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One codec for each shard of each group, and what is expected of it in an optimizer step of one rank."""

    codecs: tuple[tuple[str, ...], ...]
    """By group and parameter, in the order of the shapes."""
    rows: tuple[PlanRow, ...]
    """By category and codec."""
    overhead_bytes: float
    """Headers and section tables; less what shards of several ranks promise too much together, where that was measured."""
    budget_bytes: int | None
    table: str
    learning_rate: float
    step: int = 0
    """The optimizer step after which it was made, counted from the first gather."""
    link: Link | None = None
    """The slowest one; `None` where only bytes counted."""
    notes: tuple[str, ...] = ()

    @property
    def raw_bytes(self) -> float:
        """Bytes a step that stock FSDP2 sends from a rank."""
        return sum(row.raw_bytes for row in self.rows)

    @property
    def wire_bytes(self) -> float:
        """Bytes a step that a rank is expected to send."""
        return sum(row.wire_bytes for row in self.rows) + self.overhead_bytes

    @property
    def in_node_bytes(self) -> float:
        """Those of the wire bytes that stay inside the node."""
        return sum(row.in_node_bytes for row in self.rows)

    @property
    def cache_bytes(self) -> int:
        """Caches, as the budget counts them: never less than those that are held."""
        return sum(row.cache_bytes for row in self.rows)

    def held_output_bytes(self, shapes: Sequence[GroupShape]) -> int:
        """What the outputs of these groups, which it plans, take between gathers: see `GroupShape.held_output_bytes`."""
        held = sum(shape.held_output_bytes(codecs) for shape, codecs in zip(shapes, self.codecs, strict=True))
        return held if self.has_room_for(held) else 0

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether the budget holds so many bytes besides the caches."""
        return self.budget_bytes is None or self.cache_bytes + num_bytes <= self.budget_bytes

    @property
    def gain_seconds(self) -> float:
        """Seconds a step that the gathers get shorter."""
        return sum(row.gain_seconds for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        totals = {
            name: getattr(self, name)
            for name in ("raw_bytes", "wire_bytes", "in_node_bytes", "cache_bytes", "gain_seconds")
        }
        return {**asdict(self), **totals}

    def describe(self, title: str = "the plan") -> str:
        """One line for each category and codec: bytes and milliseconds of a step, for logs."""
        lines = [f"fsdp_ciera: {title}; rates: {self.table} at LR {self.learning_rate:g}"]
        lines += [f"  {row.category}, {row.codec}: {_amounts(row)}, {row.num_shards} shards" for row in self.rows]
        lines.append(f"  all: {_amounts(self)}; {format_bytes(self.overhead_bytes)} for heads, agreements")
        return "\n".join(lines)


def _amounts(amounts: Plan | PlanRow) -> str:
    raw, sent, caches = map(format_bytes, (amounts.raw_bytes, amounts.wire_bytes, amounts.cache_bytes))
    gain = f", {1e3 * amounts.gain_seconds:,.1f} ms gained" if amounts.gain_seconds else ""
    return f"{raw} raw, {sent} sent, {caches} of caches{gain}"
