"""Rows of texts as a table."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from rich.box import Box
from rich.table import Table


def table_of(
    headings: Sequence[Hashable],
    rows: Iterable[Sequence[Any]],
    *,
    title: str,
    box: Box | None = None,
    left: Sequence[Hashable] = (),
    section_after: Sequence[int] = (),
) -> Table:
    """Returns a table of texts. Columns in `left` align left, all others right. A line follows each row in `section_after`."""
    table = Table(title=title) if box is None else Table(title=title, box=box)
    for heading in headings:
        table.add_column(str(heading), justify="left" if heading in left else "right", no_wrap=heading not in left)
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=number in section_after)
    return table
