"""What all reports share: records as pandas frames, CSV files, and wide frames.

records -> frame_of -> median, mean, quantiles, groups     records -> write_csv
                    -> wide (one column for each codec, or world size)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from math import fsum, nan
from pathlib import Path
from typing import Any

import pandas as pd


def frame_of(records: Iterable[Any], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Returns one row for each record (dataclass or mapping). Values stay as they are; `numbers` makes NaN of `None`."""
    rows = [
        asdict(record) if is_dataclass(record) and not isinstance(record, type) else dict(record) for record in records
    ]
    return pd.DataFrame(rows, columns=None if columns is None else list(columns), dtype=object)


def numbers(frame: pd.DataFrame, column: str) -> pd.Series[float]:
    """Returns a column as floats, with NaN for `None`."""
    return frame[column].astype(float)


def median(frame: pd.DataFrame, column: str) -> float:
    """Returns the median of a column; NaN without rows or if a value is unknown."""
    return float(numbers(frame, column).median(skipna=False))


def mean(frame: pd.DataFrame, column: str) -> float:
    """Returns the mean of a column; NaN without rows or if a value is unknown."""
    values = numbers(frame, column)
    return fsum(values) / len(values) if len(values) else nan  # exact, where pandas rounds at each addition


def quantiles(frame: pd.DataFrame, column: str, shares: Sequence[float]) -> list[float]:
    """Returns the quantiles of a column at `shares` (0 to 1), interpolated linearly; NaN without rows."""
    return [float(value) for value in numbers(frame, column).quantile(list(shares))]


def write_csv(records: Iterable[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Writes these columns with exact figures; cells of `None` and NaN stay empty. Raises `OSError`."""
    frame_of(records, columns).to_csv(path, index=False, lineterminator="\n", encoding="utf-8")


def wide(frame: pd.DataFrame, rows: str | Sequence[str], columns: str, values: str) -> pd.DataFrame:
    """Returns `values` by `rows` and `columns`, both in the order of their first appearance."""
    keys = [rows] if isinstance(rows, str) else list(rows)
    table = frame.set_index([*keys, columns])[values].unstack(columns)
    index = (
        pd.Index(frame[keys[0]].unique()) if len(keys) == 1 else pd.MultiIndex.from_frame(frame[keys].drop_duplicates())
    )
    return table.reindex(index=index, columns=pd.Index(frame[columns].unique()))
