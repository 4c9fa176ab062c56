"""Tables of `ciera simulate`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fsdp_ciera.bench.frames import frame_of, wide
from fsdp_ciera.cli.tables.rows import table_of
from fsdp_ciera.simulator.project import Point
from fsdp_ciera.simulator.report import STAMP, remark
from fsdp_ciera.simulator.validate import BAR, Validation
from fsdp_ciera.units import format_digits, format_number, format_share


def validation_table(validation: Validation) -> Table:
    """One line a check."""
    made = Table(title=f"predicted beside measured iteration times (bar: {100 * BAR:g} %)")
    for heading in ("contender", "setting", "predicted s", "measured s", "scatter", "error", ""):
        made.add_column(heading, justify="left" if heading in ("contender", "setting", "") else "right")
    for check in validation.checks:
        misses = check.is_independent and abs(check.error) > BAR
        made.add_row(
            check.contender,
            str(check.setting),
            format_number(check.predicted_seconds, 3),
            format_number(check.measured_seconds, 3),
            format_share(check.measured_scatter),
            format_share(check.error, signed=True),
            remark(check),
            style="red" if misses else None if check.is_independent else "dim",
        )
    return made


def projection_table(
    name: str, where: str, points: Sequence[Point], is_unvalidated: bool, validated: Sequence[str]
) -> Table:
    """Seconds and speed-up by contender and world size."""
    stamp = f"{STAMP}: " if is_unvalidated else ""
    frame = frame_of(
        {"key": point.contender, "size": f"{point.world_size:,} GPU" + "s" * (point.world_size > 1),
         "text": f"{format_digits(point.seconds)} ({point.speedup:.2f}x)"}
        for point in points
    )  # fmt: skip
    first = {point.contender: point for point in reversed(points)}
    texts = wide(frame, "key", "size", "text")
    rows = [
        (first[str(key)].label, first[str(key)].source + (", validated" if key in validated else ""), *of_key)
        for key, of_key in texts.iterrows()
    ]
    made = table_of(
        ("contender", "from", *texts.columns),
        rows,
        title=f"{stamp}projected iteration of {name}, {where}",
        left=("contender", "from"),
    )
    made.caption = "seconds (speed-up over FSDP2)" + (f"; {STAMP}" if is_unvalidated else "")
    made.columns[0].no_wrap = True
    return made
