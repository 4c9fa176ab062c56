"""Rank 0's view of a run: a progress bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBar

_NUM_PLAIN_LINES = 20


class Progress:
    """Shows steps, loss, wire ratio, seconds per step and time left. A context manager; shows nothing if disabled."""

    def __init__(self, *, first_step: int, num_steps: int, enabled: bool, console: Console | None = None) -> None:
        """`first_step` steps are behind already; `num_steps` is the whole run."""
        self._console = console or Console()
        self._first_step, self._num_steps = first_step, num_steps
        self._seconds = 0.0
        self._enabled = enabled
        self._bar: RichBar | None = None
        if enabled and self._console.is_terminal:
            self._bar = RichBar(*_columns(), console=self._console)
            self._task = self._bar.add_task("fine-tuning", total=num_steps, completed=first_step, text="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows that `step` (counted from 1) is done, with what the metrics record of it."""
        self._seconds += values["seconds"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=_summary(values))
        elif self._enabled and self._is_shown(step):
            left_seconds = (self._num_steps - step) * self._seconds / (step - self._first_step)
            line = f"step {step}/{self._num_steps}  {_summary(values)}  ETA {_clock(left_seconds)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Shows one line of text, above the bar if there is one."""
        if self._enabled:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _is_shown(self, step: int) -> bool:
        every = max(1, self._num_steps // _NUM_PLAIN_LINES)
        return step % every == 0 or step in (self._first_step + 1, self._num_steps)


def _columns() -> list[ProgressColumn]:
    return [
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"), TextColumn("ETA"), TimeRemainingColumn(),
    ]  # fmt: skip


def _summary(values: Mapping[str, float]) -> str:
    parts = [f"loss {values['loss']:.4f}"]
    if "eval_loss" in values:
        parts.append(f"eval {values['eval_loss']:.4f}")
    if "ratio" in values:
        parts.append(f"gathers {values['ratio']:.2f}x smaller")
    parts.append(f"{values['seconds']:.2f} s/step")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
