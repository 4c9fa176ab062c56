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
    """A table of texts with numbers to the right; `left`: the columns of words. A line follows the rows `section_after`."""
    made = Table(title=title) if box is None else Table(title=title, box=box)
    for heading in headings:
        made.add_column(str(heading), justify="left" if heading in left else "right", no_wrap=heading not in left)
    for number, row in enumerate(rows):
        made.add_row(*row, end_section=number in section_after)
    return made
