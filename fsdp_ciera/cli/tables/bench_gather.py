"""What `ciera bench gather` shows and leaves: tables, gathers.csv, gathers.json and gathers.png."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from fsdp_ciera.bench.frames import frame_of, wide, write_csv
from fsdp_ciera.bench.gather_cells import Cell, Crossover, LinkBreakEven, crossovers, link_break_evens
from fsdp_ciera.cli.tables.rows import table_of
from fsdp_ciera.units import format_bytes, format_host_rate

FORMAT = 1
CSV_COLUMNS = ("rate", "codec", "size_bytes", "changed_percent", "measured_changed_percent", "repeats", "plain_seconds",
               "seconds", "ratio", "raw_bytes", "wire_bytes", "is_equal")  # fmt: skip


def write_report(cells: Sequence[Cell], setting: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Prints the tables and writes the files into `folder`, which is made. Raises `OSError`.

    Without matplotlib there is no picture, and a line says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, over_links = crossovers(cells), link_break_evens(cells)
    rows = [{**cell.to_dict(), "rate": cell.rate or "none", "repeats": len(cell.samples)} for cell in cells]
    write_csv(rows, CSV_COLUMNS, folder / "gathers.csv")
    content = {
        "format": FORMAT,
        "setting": dict(setting),
        "cells": [cell.to_dict() for cell in cells],
        "crossovers": [asdict(one) for one in found],
        "link_break_evens": [asdict(one) for one in over_links],
    }
    (folder / "gathers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for table in tables(cells, found, over_links):
        console.print(table)


def tables(cells: Sequence[Cell], found: Sequence[Crossover], over_links: Sequence[LinkBreakEven]) -> Iterator[Table]:
    """Speed-ups and crossovers for each link speed, and the break-even of link speeds where several were measured."""
    for rate in dict.fromkeys(cell.rate for cell in cells):
        yield _speed_ups([cell for cell in cells if cell.rate == rate], rate)
        yield _crossover_table([one for one in found if one.rate == rate], rate)
    if over_links:
        yield _link_table(over_links)


def _speed_ups(cells: Sequence[Cell], rate: str | None) -> Table:
    frame = frame_of(
        {"size": cell.size_bytes, "percent": cell.changed_percent, "codec": cell.codec, "ratio": _ratio_text(cell),
         "plain": f"{1e3 * cell.plain_seconds:,.1f}"}
        for cell in cells
    )  # fmt: skip
    ratios = wide(frame, ["size", "percent"], "codec", "ratio")
    plain = frame.groupby(["size", "percent"], sort=False)["plain"].first()
    rows, ends, last_size = [], [], None
    for number, (place, of_place) in enumerate(ratios.iterrows()):
        size, percent = place
        if last_size is not None and size != last_size:
            ends.append(number - 1)
        rows.append((format_bytes(size) if size != last_size else "", f"{percent:g} %", plain[place], *of_place))
        last_size = size
    return table_of(
        ("size", "changed", "plain ms", *ratios.columns),
        rows,
        title=f"Seconds of a plain gather / ours, {format_host_rate(rate)} (size: the gathered total)",
        box=SIMPLE,
        section_after=ends,
    )


def _ratio_text(cell: Cell) -> str:
    """Bold where ours is faster, with the share of bytes that it sends."""
    text = f"{cell.ratio:.2f}x ({100 * cell.wire_bytes / cell.raw_bytes:.3g} % B)"
    if not cell.is_equal:
        return f"[red]WRONG BITS[/] {text}"
    return f"[bold]{text}[/]" if cell.ratio > 1 else text


def _crossover_table(found: Sequence[Crossover], rate: str | None) -> Table:
    title = f"Ours is faster from this size on, {format_host_rate(rate)} (~ where both are equal; -: at no size)"
    return _by_percent([(one.changed_percent, one.codec, _crossover_text(one)) for one in found], title)


def _crossover_text(one: Crossover) -> str:
    if one.smallest_faster_bytes is None:
        return "-"
    if one.break_even_bytes is None:
        return f"all, from {format_bytes(one.smallest_faster_bytes)}"
    return f"{format_bytes(one.smallest_faster_bytes)} (~{format_bytes(one.break_even_bytes)})"


def _link_table(over_links: Sequence[LinkBreakEven]) -> Table:
    size = format_bytes(over_links[0].size_bytes)
    title = f"Ours is faster on links up to this speed, at {size} (as plain gathers reach it)"
    return _by_percent([(one.changed_percent, one.codec, _link_text(one)) for one in over_links], title)


def _by_percent(cells: Sequence[tuple[float, str, str]], title: str) -> Table:
    """Texts by share of changed values and codec."""
    frame = frame_of({"percent": percent, "codec": codec, "text": text} for percent, codec, text in cells)
    texts = wide(frame, "percent", "codec", "text")
    rows = [(f"{percent:g} %", *of_percent) for percent, of_percent in texts.iterrows()]
    return table_of(("changed", *texts.columns), rows, title=title, box=SIMPLE)


def _link_text(one: LinkBreakEven) -> str:
    if one.bits_per_second is None:
        return "all measured" if one.always else "none measured"
    return f"{one.bits_per_second / 1e6:,.0f} Mbit/s"
