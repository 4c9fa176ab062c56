"""What `ciera bench gather` prints and writes: tables, gathers.csv and gathers.json."""

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
    """Prints the tables and writes the files into `folder`, which it makes if needed. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    all_crossovers, all_break_evens = crossovers(cells), link_break_evens(cells)
    rows = [{**cell.to_dict(), "rate": cell.rate or "none", "repeats": len(cell.samples)} for cell in cells]
    write_csv(rows, CSV_COLUMNS, folder / "gathers.csv")
    content = {
        "format": FORMAT,
        "setting": dict(setting),
        "cells": [cell.to_dict() for cell in cells],
        "crossovers": [asdict(crossover) for crossover in all_crossovers],
        "link_break_evens": [asdict(break_even) for break_even in all_break_evens],
    }
    (folder / "gathers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for table in tables(cells, all_crossovers, all_break_evens):
        console.print(table)


def tables(
    cells: Sequence[Cell], all_crossovers: Sequence[Crossover], break_evens: Sequence[LinkBreakEven]
) -> Iterator[Table]:
    """Yields speed-ups and crossovers for each link speed, and break-evens of link speeds if several were measured."""
    for rate in dict.fromkeys(cell.rate for cell in cells):
        yield _speed_ups([cell for cell in cells if cell.rate == rate], rate)
        yield _crossover_table([crossover for crossover in all_crossovers if crossover.rate == rate], rate)
    if break_evens:
        yield _link_table(break_evens)


def _speed_ups(cells: Sequence[Cell], rate: str | None) -> Table:
    frame = frame_of(
        {"size": cell.size_bytes, "percent": cell.changed_percent, "codec": cell.codec, "ratio": _ratio_text(cell),
         "plain": f"{1e3 * cell.plain_seconds:,.1f}"}
        for cell in cells
    )  # fmt: skip
    ratios = wide(frame, ["size", "percent"], "codec", "ratio")
    plain = frame.groupby(["size", "percent"], sort=False)["plain"].first()
    rows, ends, last_size = [], [], None
    for number, (size_and_percent, ratios_by_codec) in enumerate(ratios.iterrows()):
        size, percent = size_and_percent
        if last_size is not None and size != last_size:
            ends.append(number - 1)
        size_text = format_bytes(size) if size != last_size else ""
        rows.append((size_text, f"{percent:g} %", plain[size_and_percent], *ratios_by_codec))
        last_size = size
    return table_of(
        ("size", "changed", "plain ms", *ratios.columns),
        rows,
        title=f"Seconds of a plain gather / ours, {format_host_rate(rate)} (size: the gathered total)",
        box=SIMPLE,
        section_after=ends,
    )


def _ratio_text(cell: Cell) -> str:
    """Returns the ratio and the share of bytes that ours sends, bold if ours is faster."""
    text = f"{cell.ratio:.2f}x ({100 * cell.wire_bytes / cell.raw_bytes:.3g} % B)"
    if not cell.is_equal:
        return f"[red]WRONG BITS[/] {text}"
    return f"[bold]{text}[/]" if cell.ratio > 1 else text


def _crossover_table(rate_crossovers: Sequence[Crossover], rate: str | None) -> Table:
    title = f"Ours is faster from this size on, {format_host_rate(rate)} (~ where both are equal; -: at no size)"
    texts = [(crossover.changed_percent, crossover.codec, _crossover_text(crossover)) for crossover in rate_crossovers]
    return _by_percent(texts, title)


def _crossover_text(crossover: Crossover) -> str:
    if crossover.smallest_faster_bytes is None:
        return "-"
    if crossover.break_even_bytes is None:
        return f"all, from {format_bytes(crossover.smallest_faster_bytes)}"
    return f"{format_bytes(crossover.smallest_faster_bytes)} (~{format_bytes(crossover.break_even_bytes)})"


def _link_table(break_evens: Sequence[LinkBreakEven]) -> Table:
    size = format_bytes(break_evens[0].size_bytes)
    title = f"Ours is faster on links up to this speed, at {size} (as plain gathers reach it)"
    texts = [(break_even.changed_percent, break_even.codec, _link_text(break_even)) for break_even in break_evens]
    return _by_percent(texts, title)


def _by_percent(cells: Sequence[tuple[float, str, str]], title: str) -> Table:
    """Returns a table of (changed percent, codec, text) with a row for each percentage and a column for each codec."""
    frame = frame_of({"percent": percent, "codec": codec, "text": text} for percent, codec, text in cells)
    texts = wide(frame, "percent", "codec", "text")
    rows = [(f"{percent:g} %", *texts_by_codec) for percent, texts_by_codec in texts.iterrows()]
    return table_of(("changed", *texts.columns), rows, title=title, box=SIMPLE)


def _link_text(break_even: LinkBreakEven) -> str:
    if break_even.bits_per_second is None:
        return "all measured" if break_even.always else "none measured"
    return f"{break_even.bits_per_second / 1e6:,.0f} Mbit/s"
