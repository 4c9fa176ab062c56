"""The paper's Table 3: the speed-ups over stock FSDP2 as CIERA's parts are switched on one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_ciera.bench.contenders import ABLATION, CONTENDERS, FSDP2, Contender
from fsdp_ciera.bench.report import median_seconds
from fsdp_ciera.bench.results import Results


@dataclass(frozen=True, kw_only=True)
class AblationStep:
    """One column of the table."""

    label: str
    """Name of the added part, such as `+BSC`."""
    seconds: float
    """Median seconds of a timed iteration; NaN without timed iterations."""
    speedup: float
    """Speed-up over stock FSDP2 of this step and all steps before it; NaN if unknown."""
    reason: str | None
    """Why the speed-up is unknown; `None` if it is known."""
    caveat: str | None
    """What an earlier step has and this one lacks; `None` if nothing."""


def ablation_steps(
    results: Results,
    ablation: Sequence[tuple[str, str]] = ABLATION,
    contenders: Mapping[str, Contender] = CONTENDERS,
) -> list[AblationStep]:
    """Returns one step for each (label, contender key) of `ablation`, in that order."""
    stock_seconds = median_seconds(results.of(FSDP2))
    steps, was_settled = [], False
    for label, key in ablation:
        contender = contenders.get(key)
        is_settled = contender is not None and contender.settle
        caveat = "without sizes settled ahead" if was_settled and not is_settled else None
        was_settled |= is_settled
        steps.append(_step(label, key, results, contender, stock_seconds, caveat))
    return steps


def _step(
    label: str, key: str, results: Results, contender: Contender | None, stock_seconds: float, caveat: str | None
) -> AblationStep:
    measured = results.of(key)
    seconds = median_seconds(measured)
    reason = None
    if math.isnan(seconds):
        if contender is not None and (lack := contender.lacks(results.setting.hosts, results.setting.ranks_per_host)):
            reason = lack
        elif measured is None:
            reason = "was not run"
        else:
            reason = (measured.failure or "has no timed iterations").strip().partition("\n")[0]
    elif math.isnan(stock_seconds):
        reason = "stock FSDP2 was not measured"
    return AblationStep(
        label=label,
        seconds=seconds,
        speedup=stock_seconds / seconds,
        reason=reason,
        caveat=caveat if reason is None else None,
    )
