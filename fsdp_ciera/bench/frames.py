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
    """One row for each dataclass or mapping, with the values as they are; `None` counts as unknown where figures are made."""
    rows = [asdict(one) if is_dataclass(one) and not isinstance(one, type) else dict(one) for one in records]
    return pd.DataFrame(rows, columns=None if columns is None else list(columns), dtype=object)


def numbers(frame: pd.DataFrame, column: str) -> pd.Series[float]:
    """A column as floats; NaN for `None`."""
    return frame[column].astype(float)


def median(frame: pd.DataFrame, column: str) -> float:
    """NaN for no rows, and where a value is not known."""
    return float(numbers(frame, column).median(skipna=False))


def mean(frame: pd.DataFrame, column: str) -> float:
    """NaN for no rows, and where a value is not known."""
    values = numbers(frame, column)
    return fsum(values) / len(values) if len(values) else nan  # exact, where pandas rounds at each addition


def quantiles(frame: pd.DataFrame, column: str, shares: Sequence[float]) -> list[float]:
    """Linear between two values; NaN for no rows."""
    return [float(value) for value in numbers(frame, column).quantile(list(shares))]


def write_csv(records: Iterable[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """These columns, exact figures; nothing where a value is `None` or NaN. Raises `OSError`."""
    frame_of(records, columns).to_csv(path, index=False, lineterminator="\n", encoding="utf-8")


def wide(frame: pd.DataFrame, rows: str | Sequence[str], columns: str, values: str) -> pd.DataFrame:
    """`values` by `rows` and `columns`, both in the order in which they first come."""
    keys = [rows] if isinstance(rows, str) else list(rows)
    made = frame.set_index([*keys, columns])[values].unstack(columns)
    index = (
        pd.Index(frame[keys[0]].unique()) if len(keys) == 1 else pd.MultiIndex.from_frame(frame[keys].drop_duplicates())
    )
    return made.reindex(index=index, columns=pd.Index(frame[columns].unique()))
