"""What `ciera bench gather` measures, as plain records, and what follows from them: where the crossover is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_ciera.bench.frames import frame_of


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One codec at one size, one share of changed values and one link speed, beside a plain all-gather."""

    rate: str | None
    """What each host may send, as `tc` writes it; `None`: no limit."""
    codec: str
    size_bytes: int
    """The gathered total, all ranks' shards together, in bf16."""
    changed_percent: float
    """Of all values between two gathers, as asked for."""
    measured_changed_percent: float
    """The same as it came out: at least one value of each rank changes where any should."""
    plain_samples: tuple[float, ...]
    """Seconds of each plain gather, of its slowest rank."""
    samples: tuple[float, ...]
    """The same of the codec's gathers, taken in turn with them."""
    raw_bytes: float
    """What a rank sends in a plain gather."""
    wire_bytes: float
    """What a rank sends in a gather of the codec by the library's count, headers and padding included; mean over ranks."""
    is_equal: bool
    """Whether every gather gave every rank the bits of the plain one."""

    @property
    def plain_seconds(self) -> float:
        """Median."""
        return statistics.median(self.plain_samples)

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float:
        """Seconds of plain / ours: above 1 ours is faster."""
        return self.plain_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The fields and what is derived from them, as JSON values."""
        derived = {"plain_seconds": self.plain_seconds, "seconds": self.seconds, "ratio": self.ratio}
        return {**asdict(self), **derived}


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """From which size on a codec is faster than plain, at one link speed and one share of changed values."""

    rate: str | None
    codec: str
    changed_percent: float
    smallest_faster_bytes: int | None
    """The smallest measured size from which on ours is faster at all measured sizes; `None`: not even at the largest."""
    break_even_bytes: float | None
    """Where both take equally long, interpolated between that size and the one below (the logarithm of the ratio over the
    logarithm of the size); `None` where ours is faster at all measured sizes or not at the largest."""


@dataclass(frozen=True, kw_only=True)
class LinkBreakEven:
    """Up to which link speed a codec is faster than plain, at one size and one share of changed values."""

    codec: str
    changed_percent: float
    size_bytes: int
    bits_per_second: float | None
    """Interpolated between two measured speeds, each as the plain gather reached it; `None`: see `always`."""
    always: bool | None
    """Without a break-even: whether ours is faster at all measured speeds (`True`) or at none (`False`)."""


def crossovers(cells: Iterable[Cell]) -> list[Crossover]:
    """One for each (rate, codec, share), in the order of the cells."""
    return [_crossover(of_one) for of_one in _series(cells, ["rate", "codec", "changed_percent"])]


def _crossover(cells: Sequence[Cell]) -> Crossover:
    by_size = sorted(cells, key=lambda cell: cell.size_bytes)
    first = len(by_size)
    while first and by_size[first - 1].ratio > 1:
        first -= 1
    smallest = by_size[first].size_bytes if first < len(by_size) else None
    break_even = None
    if smallest is not None and first > 0:
        below, above = by_size[first - 1], by_size[first]
        break_even = _where_equal(below.size_bytes, below.ratio, above.size_bytes, above.ratio)
    one = by_size[0]
    return Crossover(
        rate=one.rate,
        codec=one.codec,
        changed_percent=one.changed_percent,
        smallest_faster_bytes=smallest,
        break_even_bytes=break_even,
    )


def link_break_evens(cells: Iterable[Cell]) -> list[LinkBreakEven]:
    """One for each (codec, share) at the largest size; empty unless at least two link speeds were measured."""
    cells = list(cells)
    if len({cell.rate for cell in cells}) < 2:
        return []
    largest = max(cell.size_bytes for cell in cells)
    of_largest = [cell for cell in cells if cell.size_bytes == largest]
    return [_link_break_even(of_one) for of_one in _series(of_largest, ["codec", "changed_percent"])]


def _series(cells: Iterable[Cell], keys: Sequence[str]) -> list[list[Cell]]:
    """Cells with the same keys, in the order in which they first come."""
    cells = list(cells)
    groups = frame_of(cells).groupby(list(keys), sort=False, dropna=False) if cells else ()
    return [[cells[number] for number in of_one.index] for _, of_one in groups]


def _link_break_even(cells: Sequence[Cell]) -> LinkBreakEven:
    from_slow = sorted(cells, key=_reached_bits_per_second)
    found, always = None, None
    # The fastest link on which ours is still faster bounds it from below.
    faster = [place for place, cell in enumerate(from_slow) if cell.ratio > 1]
    if not faster:
        always = False
    elif faster[-1] == len(from_slow) - 1:
        always = True
    else:
        slow, fast = from_slow[faster[-1]], from_slow[faster[-1] + 1]
        found = _where_equal(_reached_bits_per_second(slow), slow.ratio, _reached_bits_per_second(fast), fast.ratio)
    one = cells[0]
    return LinkBreakEven(
        codec=one.codec,
        changed_percent=one.changed_percent,
        size_bytes=one.size_bytes,
        bits_per_second=found,
        always=always,
    )


def _reached_bits_per_second(cell: Cell) -> float:
    """Of the plain gather: with no limit there is no other figure for the link."""
    return 8 * cell.raw_bytes / cell.plain_seconds


def _where_equal(x: float, ratio: float, other_x: float, other_ratio: float) -> float:
    """Where the ratio is 1 between two points on either side of it; both axes logarithmic."""
    if ratio == other_ratio:  # both 1
        return x
    share = math.log(ratio) / (math.log(ratio) - math.log(other_ratio))
    return math.exp(math.log(x) + share * (math.log(other_x) - math.log(x)))
