"""What `ciera bench gather` measures, as plain records, and the crossovers that follow from them."""

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
    """Bytes of all ranks' shards together, in bf16."""
    changed_percent: float
    """Percent of values that were to change between two gathers."""
    measured_changed_percent: float
    """Percent of values that did change: at least one of each rank if `changed_percent` is above 0."""
    plain_samples: tuple[float, ...]
    """Seconds of each plain gather, on its slowest rank."""
    samples: tuple[float, ...]
    """Seconds of each gather of the codec, on its slowest rank; plain gathers and the codec's take turns."""
    raw_bytes: float
    """Bytes that a rank sends in a plain gather."""
    wire_bytes: float
    """Bytes that a rank sends in a gather of the codec, mean over ranks, by the library's count: with headers and padding."""
    is_equal: bool
    """Whether every gather gave every rank the bits of the plain one."""

    @property
    def plain_seconds(self) -> float:
        """Median seconds of a plain gather."""
        return statistics.median(self.plain_samples)

    @property
    def seconds(self) -> float:
        """Median seconds of a gather of the codec."""
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float:
        """Seconds of plain / seconds of ours: above 1 ours is faster."""
        return self.plain_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the figures derived from them, as JSON values."""
        derived = {"plain_seconds": self.plain_seconds, "seconds": self.seconds, "ratio": self.ratio}
        return {**asdict(self), **derived}


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Size from which on a codec is faster than plain, at one link speed and one share of changed values."""

    rate: str | None
    codec: str
    changed_percent: float
    smallest_faster_bytes: int | None
    """Smallest measured size from which on ours is faster at all measured sizes; `None`: not even at the largest."""
    break_even_bytes: float | None
    """Size at which both take equally long, interpolated between `smallest_faster_bytes` and the measured size below it (the
    logarithm of the ratio over the logarithm of the size); `None` if ours is faster at all measured sizes or not at the
    largest."""


@dataclass(frozen=True, kw_only=True)
class LinkBreakEven:
    """Link speed up to which a codec is faster than plain, at one size and one share of changed values."""

    codec: str
    changed_percent: float
    size_bytes: int
    bits_per_second: float | None
    """Interpolated between two measured speeds, each as the plain gather reached it; `None`: there is none, see `always`."""
    always: bool | None
    """Without a break-even: whether ours is faster at all measured speeds (`True`) or at none (`False`)."""


def crossovers(cells: Iterable[Cell]) -> list[Crossover]:
    """Returns one crossover for each (rate, codec, share of changed values), in the order of the cells."""
    return [_crossover(series) for series in _series(cells, ["rate", "codec", "changed_percent"])]


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
    cell = by_size[0]
    return Crossover(
        rate=cell.rate,
        codec=cell.codec,
        changed_percent=cell.changed_percent,
        smallest_faster_bytes=smallest,
        break_even_bytes=break_even,
    )


def link_break_evens(cells: Iterable[Cell]) -> list[LinkBreakEven]:
    """Returns one break-even for each (codec, share of changed values) at the largest size; none for a single link speed."""
    cells = list(cells)
    if len({cell.rate for cell in cells}) < 2:
        return []
    largest = max(cell.size_bytes for cell in cells)
    largest_cells = [cell for cell in cells if cell.size_bytes == largest]
    return [_link_break_even(series) for series in _series(largest_cells, ["codec", "changed_percent"])]


def _series(cells: Iterable[Cell], keys: Sequence[str]) -> list[list[Cell]]:
    """Returns lists of cells with equal `keys`, in the order of their first appearance."""
    cells = list(cells)
    frames = frame_of(cells).groupby(list(keys), sort=False, dropna=False) if cells else ()
    return [[cells[index] for index in frame.index] for _, frame in frames]


def _link_break_even(cells: Sequence[Cell]) -> LinkBreakEven:
    from_slow = sorted(cells, key=_reached_bits_per_second)
    break_even, always = None, None
    # The fastest link on which ours is still faster bounds it from below.
    faster = [index for index, cell in enumerate(from_slow) if cell.ratio > 1]
    if not faster:
        always = False
    elif faster[-1] == len(from_slow) - 1:
        always = True
    else:
        slow, fast = from_slow[faster[-1]], from_slow[faster[-1] + 1]
        break_even = _where_equal(
            _reached_bits_per_second(slow), slow.ratio, _reached_bits_per_second(fast), fast.ratio
        )
    cell = cells[0]
    return LinkBreakEven(
        codec=cell.codec,
        changed_percent=cell.changed_percent,
        size_bytes=cell.size_bytes,
        bits_per_second=break_even,
        always=always,
    )


def _reached_bits_per_second(cell: Cell) -> float:
    """Returns the speed of the plain gather: the only figure that there is for a link without a limit."""
    return 8 * cell.raw_bytes / cell.plain_seconds


def _where_equal(x: float, ratio: float, other_x: float, other_ratio: float) -> float:
    """Returns the x at which the ratio is 1, between two points on either side of it; both axes are logarithmic."""
    if ratio == other_ratio:  # both 1
        return x
    share = math.log(ratio) / (math.log(ratio) - math.log(other_ratio))
    return math.exp(math.log(x) + share * (math.log(other_x) - math.log(x)))
