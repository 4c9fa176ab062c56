"""Counts of bytes, gathers, caches and seconds, beside the bytes that stock FSDP2 would have sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fsdp_ciera.units import format_in

OVERHEAD = "overhead"
"""The entry of every breakdown that holds heads, padding to the largest payload, agreements, and checks by `verify=`."""

if TYPE_CHECKING:
    from fsdp_ciera.planning.plan import Plan


@dataclass
class Bytes:
    """Bytes that left this rank, beside what stock FSDP2 would have sent for the same."""

    raw_bytes: int = 0
    wire_bytes: int = 0

    def add(self, raw_bytes: int, wire_bytes: int) -> None:
        """Counts a transfer."""
        self.raw_bytes += raw_bytes
        self.wire_bytes += wire_bytes

    @property
    def ratio(self) -> float:
        """The ratio of raw to wire bytes; 1.0 when nothing was sent."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0


@dataclass
class CieraStats:
    """Counts of one rank over the gathers of a model since `attach` (or `fully_shard`).

    `wire_bytes` are all bytes that left the rank for gathers of parameters: payloads, padding, heads, checks, agreements.
    `raw_bytes` are those that stock FSDP2 would have sent: (world_size - 1) x the padded local shard. `by_phase` is keyed
    "cold/forward", "first/forward", "repeat/backward" and so on: *cold* = no cache to build on; *first* = the weights
    changed since the last gather; *repeat* = they did not; *plain* = gathered as stock FSDP2 does; "agreement" =
    before gathers. `by_link` tells "flat" gathers from the two halves of hierarchical gathers, "between_nodes" and "in_node"
    (plain, over fast links). Each breakdown adds up to the totals.
    """

    num_gathers: int = 0
    cache_bytes: int = 0
    held_output_bytes: int = 0
    """Bytes of outputs that are kept between gathers, since `value_delta` decodes in place there, beyond the caches in them."""
    world_size: int = 1
    total: Bytes = field(default_factory=Bytes)
    by_category: dict[str, Bytes] = field(default_factory=dict)
    by_codec: dict[str, Bytes] = field(default_factory=dict)
    by_phase: dict[str, Bytes] = field(default_factory=dict)
    by_link: dict[str, Bytes] = field(default_factory=dict)
    gathers_by_phase: dict[str, int] = field(default_factory=dict)
    num_blocks: int = 0
    """The number of blocks that this rank's encoders looked at with a cache to build on; cold gathers are left out."""
    num_blocks_reused: int = 0
    """The number of these blocks that did not have to be sent."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """The host's seconds, by stage."""
    plans: list[Plan] = field(default_factory=list)
    """The plan in force, with the bytes that a step is expected to send. Empty before the first gather; several where modules
    carry different policies, or are gathered over process groups of which none holds the others."""
    notes: list[str] = field(default_factory=list)
    """Texts for the user: parameter groups that go raw and why, and so on. Each once."""

    @property
    def raw_bytes(self) -> int:
        """The bytes that stock FSDP2 would have sent from this rank."""
        return self.total.raw_bytes

    @property
    def wire_bytes(self) -> int:
        """The bytes that were sent from this rank."""
        return self.total.wire_bytes

    @property
    def ratio(self) -> float:
        """The ratio of raw to wire bytes over everything."""
        return self.total.ratio

    @property
    def warm(self) -> Bytes:
        """The totals without the cold gathers."""
        warm = Bytes()
        for phase, amount in self.by_phase.items():
            if not phase.startswith("cold/"):
                warm.add(amount.raw_bytes, amount.wire_bytes)
        return warm

    @property
    def repeat_share(self) -> float:
        """The share of gathers that found no weight changed since the last gather."""
        repeats = sum(count for phase, count in self.gathers_by_phase.items() if phase.startswith("repeat/"))
        return repeats / self.num_gathers if self.num_gathers else 0.0

    @property
    def reuse_rate(self) -> float:
        """The share of blocks whose exponents were reused, without cold gathers (1 - the paper's block change rate)."""
        return self.num_blocks_reused / self.num_blocks if self.num_blocks else 0.0

    def note(self, text: str) -> None:
        """Adds a note unless it is there."""
        if text not in self.notes:
            self.notes.append(text)

    def count(
        self, phase: str, links: Iterable[tuple[str, int, int]], runs: Iterable[tuple[str, str, int, int]]
    ) -> None:
        """Counts one gather: `links` are (link, raw bytes, wire bytes) and make its total; `runs` are (category, codec, raw
        bytes, wire bytes), and the rest of the total is overhead."""
        self.num_gathers += 1
        overhead_bytes = 0
        for link, raw_bytes, wire_bytes in links:
            self.total.add(raw_bytes, wire_bytes)
            self.by_link.setdefault(link, Bytes()).add(raw_bytes, wire_bytes)
            self.by_phase.setdefault(phase, Bytes()).add(raw_bytes, wire_bytes)
            overhead_bytes += wire_bytes
        self.gathers_by_phase[phase] = self.gathers_by_phase.get(phase, 0) + 1
        for category, codec, run_raw_bytes, run_wire_bytes in runs:
            self.by_category.setdefault(category, Bytes()).add(run_raw_bytes, run_wire_bytes)
            self.by_codec.setdefault(codec, Bytes()).add(run_raw_bytes, run_wire_bytes)
            overhead_bytes -= run_wire_bytes
        for breakdown in (self.by_category, self.by_codec):
            breakdown.setdefault(OVERHEAD, Bytes()).add(0, overhead_bytes)

    def count_overhead(self, phase: str, wire_bytes: int, link: str) -> None:
        """Counts bytes that belong to no run: a check by `verify=` after its gather, or an agreement."""
        self.total.add(0, wire_bytes)
        for breakdown, key in (
            (self.by_phase, phase),
            (self.by_link, link),
            (self.by_category, OVERHEAD),
            (self.by_codec, OVERHEAD),
        ):
            breakdown.setdefault(key, Bytes()).add(0, wire_bytes)

    def merge(self, other: CieraStats) -> None:
        """Adds the counts of another parameter group."""
        self.num_gathers += other.num_gathers
        self.cache_bytes += other.cache_bytes
        self.held_output_bytes += other.held_output_bytes
        self.num_blocks += other.num_blocks
        self.num_blocks_reused += other.num_blocks_reused
        self.world_size = max(self.world_size, other.world_size)
        self.total.add(other.raw_bytes, other.wire_bytes)
        for mine, theirs in (
            (self.by_category, other.by_category),
            (self.by_codec, other.by_codec),
            (self.by_phase, other.by_phase),
            (self.by_link, other.by_link),
        ):
            for key, amount in theirs.items():
                mine.setdefault(key, Bytes()).add(amount.raw_bytes, amount.wire_bytes)
        for phase, count in other.gathers_by_phase.items():
            self.gathers_by_phase[phase] = self.gathers_by_phase.get(phase, 0) + count
        for stage, seconds in other.stage_seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
        for text in other.notes:
            self.note(text)

    def to_dict(self) -> dict[str, Any]:
        """All counts as plain JSON values."""
        return {
            "raw_bytes": self.raw_bytes,
            "wire_bytes": self.wire_bytes,
            "ratio": self.ratio,
            "warm_ratio": self.warm.ratio,
            "repeat_share": self.repeat_share,
            "reuse_rate": self.reuse_rate,
            **{key: value for key, value in asdict(self).items() if key not in ("total", "plans")},
            "plans": [plan.to_dict() for plan in self.plans],
        }

    def __str__(self) -> str:
        if not self.num_gathers:
            reason = "world_size is 1" if self.world_size == 1 else "no forward has run yet"
            return f"fsdp_ciera: nothing was gathered ({reason})" + "".join(f"\n  note: {note}" for note in self.notes)
        raw, wire, caches = self.raw_bytes, self.wire_bytes, self.cache_bytes
        return (
            f"fsdp_ciera: {self.num_gathers} gathers, {format_in(raw, 'MB', 2)} MB raw -> {format_in(wire, 'MB', 2)} MB "
            f"sent ({self.ratio:.2f}x), {format_in(caches, 'MiB')} MiB of caches"
            + "".join(f"\n  note: {note}" for note in self.notes)
        )
