"""Two runs of the stand side by side: do their ratios agree?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_ciera.bench.contenders import FSDP2
from fsdp_ciera.bench.report import median_seconds
from fsdp_ciera.bench.results import Results, Setting
from fsdp_ciera.errors import ReportError

BAR_PERCENT = 10.0
_MUST_AGREE = ("hosts", "ranks_per_host", "rate", "mode", "model", "num_parameters", "tokens_per_rank", "learning_rate",
               "reduce_dtype", "reduce_scatter")  # fmt: skip
"""Fields of `Setting` that must be equal for ratios to be comparable."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One contender in both runs. A ratio is median seconds of FSDP2 / its median seconds, NaN in a run without it."""

    contender: str
    first_ratio: float
    second_ratio: float

    @property
    def apart_percent(self) -> float:
        """Difference between the two ratios, in percent of the smaller one."""
        return 100 * (max(self.first_ratio, self.second_ratio) / min(self.first_ratio, self.second_ratio) - 1)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of the same job in the same setting."""

    setting: Setting
    """Setting of the first run."""
    stock_seconds: tuple[float, float]
    """Median seconds of FSDP2 in both runs; not judged, since machines are not equally fast every day."""
    rows: tuple[Compared, ...]
    """All contenders of either run except FSDP2, whose ratio is 1."""

    @property
    def both(self) -> list[Compared]:
        """Contenders measured in both runs."""
        return [row for row in self.rows if not math.isnan(row.first_ratio + row.second_ratio)]

    @property
    def worst(self) -> Compared:
        """Contender whose ratios are furthest apart."""
        return max(self.both, key=lambda row: row.apart_percent)

    @property
    def agrees(self) -> bool:
        """Whether the ratios of every contender are at most `BAR_PERCENT` apart."""
        return self.worst.apart_percent <= BAR_PERCENT

    @property
    def text(self) -> str:
        """Verdict in one line."""
        word = "agree" if self.agrees else "DO NOT AGREE"
        return (
            f"{len(self.both)} ratios {word} within {BAR_PERCENT:g} %: furthest apart {self.worst.contender}, "
            f"{self.worst.first_ratio:.2f} and {self.worst.second_ratio:.2f}, {self.worst.apart_percent:.1f} %"
        )


def compare(first: Results, second: Results) -> Comparison:
    """Pairs the contenders of two runs, in the order of the first.

    Raises `ReportError` if the runs are of different jobs or links, or have no contender beside FSDP2 in common.
    """
    for name in _MUST_AGREE:
        ours, theirs = getattr(first.setting, name), getattr(second.setting, name)
        if ours != theirs:
            raise ReportError(f"runs with {name}={ours!r} and {name}={theirs!r} cannot be compared: must be the same")
    seconds = [{measured.contender: median_seconds(measured) for measured in run.measured} for run in (first, second)]
    stock = (seconds[0].get(FSDP2, math.nan), seconds[1].get(FSDP2, math.nan))
    rows = tuple(
        Compared(
            contender=key,
            first_ratio=stock[0] / seconds[0].get(key, math.nan),
            second_ratio=stock[1] / seconds[1].get(key, math.nan),
        )
        for key in dict.fromkeys([*seconds[0], *seconds[1]])
        if key != FSDP2
    )
    comparison = Comparison(setting=first.setting, stock_seconds=stock, rows=rows)
    if not comparison.both:
        raise ReportError(
            f"no ratio was measured in both runs: one has {list(seconds[0])}, the other {list(seconds[1])}"
        )
    return comparison
