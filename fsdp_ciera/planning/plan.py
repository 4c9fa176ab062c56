"""`Plan`: the codec of each parameter's shard, and the bytes and seconds that it is expected to save. `Conditions`: what a plan
depends on besides the parameter groups and the policy. fsdp_ciera.planning.choose makes plans.
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
    """By parameter group and span. `None`: only bytes count, as if the links were very slow."""
    costs: Mapping[str, CodecCost] = field(default_factory=dict)
    """By codec; a codec that is left out takes no time."""
    budget_bytes: int | None = None
    """Bytes of caches that the plan may use. `None`: no limit."""
    table: Table | None = None
    """Change rates. `None`: the policy's own table."""
    missing_codecs: frozenset[str] = frozenset()
    """Codecs that the device cannot run."""
    overlap: bool = False
    """Whether encoding overlaps with other work, and so costs no time (the paper's CCP). On CPU every gather blocks."""
    measured: Sequence[npt.NDArray[np.float64] | None] | None = None
    """By parameter group: bytes that each rank would have sent in a gather after a change of the weights, float64 [ranks,
    parameters, codecs of the policy]; NaN where nobody measured. Known values replace the table's."""
    current: Sequence[Sequence[str]] | None = None
    """By parameter group and parameter: the codecs in force when a plan is renewed. A parameter group changes its codecs only
    if that gains more until the next renewal than the full gather after the change costs."""

    def per_gather_seconds(self, codecs: Collection[str]) -> float:
        """The seconds that a gather takes besides its runs if its parameter group has these codecs, not all of them raw: those
        of the slowest codec."""
        return max(self.costs.get(codec, FREE).per_gather_seconds(self.overlap) for codec in codecs)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Expected traffic, caches and gain of the shards of one category with one codec, in an optimizer step. Traffic is counted
    in bytes that leave a rank."""

    category: Category
    codec: str
    num_shards: int = 0
    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    in_node_bytes: float = 0.0
    """The part of `wire_bytes` that stays inside the node: the plain half of hierarchical gathers."""
    cache_bytes: int = 0
    gain_seconds: float = 0.0
    """Seconds that the codec saves over raw gathers; 0 where only bytes count."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One codec for each shard of each parameter group, and what it is expected to save one rank in an optimizer step."""

    codecs: tuple[tuple[str, ...], ...]
    """By parameter group and parameter, in the order of the shapes."""
    rows: tuple[PlanRow, ...]
    """By category and codec."""
    overhead_bytes: float
    """Bytes of agreements, heads and section tables. Where ranks were measured, `rows` count each shard as large as on its
    largest rank, and the bytes that this counts too much are subtracted here."""
    budget_bytes: int | None
    table: str
    learning_rate: float
    step: int = 0
    """The optimizer step after which the plan was made, counted from the first gather."""
    link: Link | None = None
    """The slowest link; `None` where only bytes counted."""
    notes: tuple[str, ...] = ()

    @property
    def raw_bytes(self) -> float:
        """Bytes that a rank sends in a step with stock FSDP2."""
        return sum(row.raw_bytes for row in self.rows)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank is expected to send in a step."""
        return sum(row.wire_bytes for row in self.rows) + self.overhead_bytes

    @property
    def in_node_bytes(self) -> float:
        """The part of `wire_bytes` that stays inside the node, in bytes."""
        return sum(row.in_node_bytes for row in self.rows)

    @property
    def cache_bytes(self) -> int:
        """Bytes of caches as the budget counts them: never less than the caches that are held."""
        return sum(row.cache_bytes for row in self.rows)

    def held_output_bytes(self, shapes: Sequence[GroupShape]) -> int:
        """The bytes that outputs of the planned parameter groups, whose shapes these are, take between gathers: see
        `GroupShape.held_output_bytes`."""
        held = sum(shape.held_output_bytes(codecs) for shape, codecs in zip(shapes, self.codecs, strict=True))
        return held if self.has_room_for(held) else 0

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether `num_bytes` fit into the budget besides the caches."""
        return self.budget_bytes is None or self.cache_bytes + num_bytes <= self.budget_bytes

    @property
    def gain_seconds(self) -> float:
        """Seconds that the gathers of a step save."""
        return sum(row.gain_seconds for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The fields and the totals as plain JSON values."""
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
