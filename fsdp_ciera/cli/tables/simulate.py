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
    """Returns the table of all checks, one line for each."""
    table = Table(title=f"predicted beside measured iteration times (bar: {100 * BAR:g} %)")
    for heading in ("contender", "setting", "predicted s", "measured s", "scatter", "error", ""):
        table.add_column(heading, justify="left" if heading in ("contender", "setting", "") else "right")
    for check in validation.checks:
        misses = check.is_independent and abs(check.error) > BAR
        table.add_row(
            check.contender,
            str(check.setting),
            format_number(check.predicted_seconds, 3),
            format_number(check.measured_seconds, 3),
            format_share(check.measured_scatter),
            format_share(check.error, signed=True),
            remark(check),
            style="red" if misses else None if check.is_independent else "dim",
        )
    return table


def projection_table(
    name: str, where: str, points: Sequence[Point], is_unvalidated: bool, validated: Sequence[str]
) -> Table:
    """Returns the table of seconds and speed-up over FSDP2, by contender and world size."""
    stamp = f"{STAMP}: " if is_unvalidated else ""
    frame = frame_of(
        {"key": point.contender, "size": f"{point.world_size:,} GPU" + "s" * (point.world_size > 1),
         "text": f"{format_digits(point.seconds)} ({point.speedup:.2f}x)"}
        for point in points
    )  # fmt: skip
    first_points = {point.contender: point for point in reversed(points)}
    texts = wide(frame, "key", "size", "text")
    rows = [
        (
            first_points[str(key)].label,
            first_points[str(key)].source + (", validated" if key in validated else ""),
            *key_texts,
        )
        for key, key_texts in texts.iterrows()
    ]
    table = table_of(
        ("contender", "from", *texts.columns),
        rows,
        title=f"{stamp}projected iteration of {name}, {where}",
        left=("contender", "from"),
    )
    table.caption = "seconds (speed-up over FSDP2)" + (f"; {STAMP}" if is_unvalidated else "")
    table.columns[0].no_wrap = True
    return table
