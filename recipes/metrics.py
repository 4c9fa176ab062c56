"""Writes one record per optimizer step: JSON lines, TensorBoard events, or both, from rank 0 only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from fsdp_ciera.recipes.config import Metrics


class MetricWriter(Protocol):
    """Writes the numbers of a step somewhere."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records `values` of optimizer step `step`, counted from 1. Visible to readers on return."""

    def close(self) -> None:
        """Ends the record. Nothing is lost when it is never called."""


class JsonlWriter:
    """`{"step": 1, "loss": ...}`, one line per step. Numbers are written so that they read back to the same bits."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Starts the file, or continues it: lines of steps before `first_step` stay, later or damaged ones go."""
        kept = _lines_before(path, first_step) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN and no infinity.
        record = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """One scalar per value, under its name."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # the tensorboard package is optional

        self._writer = SummaryWriter(str(folder), purge_step=first_step)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


def open_writers(metrics: Metrics, output: Path, *, rank: int, first_step: int) -> list[MetricWriter]:
    """The writers that the recipe asks for, none on ranks other than 0. `first_step` is the first to be written."""
    writers: list[MetricWriter] = []
    if rank == 0 and metrics.jsonl:
        writers.append(JsonlWriter(output / "metrics.jsonl", first_step))
    if rank == 0 and metrics.tensorboard:
        writers.append(TensorBoardWriter(output / "tensorboard", first_step))
    return writers


def _lines_before(path: Path, first_step: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(step, int) and step < first_step and line.endswith("\n"):
            kept.append(line)
    return kept
