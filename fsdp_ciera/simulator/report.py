"""The JSON output of `ciera simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fsdp_ciera.simulator.calibrate import Calibration
from fsdp_ciera.simulator.project import Point
from fsdp_ciera.simulator.validate import BAR, Check, Validation

STAMP = "UNVALIDATED"
FORMAT = 1


def remark(check: Check) -> str:
    """Says why a check does not count, or that it misses the bar; empty for all others."""
    if not check.is_independent:
        return "does not count: calibrated on"
    return "misses the bar" if abs(check.error) > BAR else ""


def as_json(
    points: Sequence[Point],
    validation: Validation,
    calibration: Calibration | None,
    assumptions: Sequence[str],
    is_unvalidated: bool,
) -> dict[str, Any]:
    """Returns everything as plain JSON values; `unvalidated` says whether the output is stamped."""
    return {
        "format": FORMAT,
        "unvalidated": is_unvalidated,
        "stamp": STAMP if is_unvalidated else None,
        "validation": {
            "verdict": validation.verdict(),
            "bar": BAR,
            "passes": validation.passes,
            "worst_error": None if validation.worst is None else validation.worst.error,
            "checks": [{**asdict(check), "error": check.error, "remark": remark(check)} for check in validation.checks],
            "uncovered": list(validation.uncovered),
        },
        "calibration": None if calibration is None else asdict(calibration),
        "assumptions": list(assumptions),
        "projection": [asdict(point) for point in points],
    }
