"""What a run of the stand measures, as plain records that can be written to JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One timed iteration (forward, backward, clipping, optimizer). Warm-up iterations have none."""

    round: int
    """0, 1, ...: every contender runs once in each round."""
    step: int
    """The optimizer step, counted from 0 at the pretrained weights in every round."""
    seconds: float
    """Wall-clock time of the slowest rank."""
    compute_seconds: float
    """Time outside the four parts below, mean over ranks: model, optimizer, FSDP2's copies, waiting for others' compute."""
    gather_seconds: float
    """Time in collectives that gather parameters, with sizes and headers, mean over ranks."""
    reduce_scatter_seconds: float
    """Time in collectives that reduce gradients, mean over ranks."""
    other_collective_seconds: float
    """Time in collectives that clip gradients and average the loss, mean over ranks."""
    codec_seconds: float
    """Time in encoding and decoding, mean over ranks; 0 without a codec."""
    counted_bytes: float
    """Bytes that left a host: in gathers by the library's count (`stats(model).wire_bytes` for ours), and in all other
    collectives; mean over hosts."""
    gathered_bytes: float
    """Part of `counted_bytes` in gathers of parameters."""
    interface_bytes: float | None
    """Bytes that left a host by its network interface, mean over hosts; `None` on the loopback."""
    loss: float
    """Mean over ranks, the exact fp32 value."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender: its timed iterations, losses, memory, notes and failure."""

    contender: str
    """A key of `contenders.CONTENDERS`."""
    steps: tuple[Step, ...] = ()
    losses: tuple[float, ...] = ()
    """Losses of all iterations of one round, warm-up included; equal for all lossless contenders with FSDP2's numerics."""
    parameters_digest: str = ""
    """sha256 over all ranks' parameters after the last iteration."""
    peak_memory_bytes: int = 0
    """Peak resident memory of the largest rank."""
    cache_bytes: int = 0
    """Codec caches of the rank with the largest."""
    notes: tuple[str, ...] = ()
    failure: str | None = None
    """Why it could not be measured, in words, `None` if it could; with a failure there may be no steps."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how a run was measured."""

    hosts: int
    ranks_per_host: int
    rate: str | None
    """What each host may send, as `tc` writes it; `None`: no limit."""
    mode: str
    """`"namespaces"` or `"loopback"`."""
    rounds: int
    warmup_steps: int
    timed_steps: int
    """A round of a contender has `warmup_steps + timed_steps` iterations."""
    model: str
    num_parameters: int
    tokens_per_rank: int
    learning_rate: float
    reduce_dtype: str
    reduce_scatter: str
    """`"ring"` or `"gloo"`, see ring.py."""
    machine: str
    num_cores: int
    torch_version: str
    date: str
    """ISO 8601, UTC."""
    command: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """All records of one run, with contenders in the order in which they ran."""

    setting: Setting
    measured: tuple[Measured, ...]

    def of(self, contender: str) -> Measured | None:
        """Returns the record of the contender with this key, `None` if it was not run."""
        return next((measured for measured in self.measured if measured.contender == contender), None)

    def to_json(self) -> str:
        """Returns text that `from_json` reads back to the same records."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Reads what `to_json` wrote. Raises `ValueError` for text of another format."""
        read: dict[str, Any] = json.loads(text)
        if read.get("format") != FORMAT:
            raise ValueError(f"format {read.get('format')!r} of results is not {FORMAT}: measure again")
        return cls(setting=Setting(**read["setting"]), measured=tuple(map(_measured, read["measured"])))

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file with the text of `to_json`. Raises `OSError`, or `ValueError` for other content."""
        return cls.from_json(path.read_text(encoding="utf-8"))


def _measured(read: Mapping[str, Any]) -> Measured:
    lists = {"losses": tuple(read["losses"]), "notes": tuple(read["notes"])}
    return Measured(**{**read, **lists, "steps": tuple(Step(**step) for step in read["steps"])})
