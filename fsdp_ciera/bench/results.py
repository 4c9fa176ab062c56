"""What a run of the stand measured, as plain records that go to JSON and back."""

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
    """Wall-clock time, of the slowest rank."""
    compute_seconds: float
    """What the four below leave of it, mean over ranks: model, optimizer, FSDP2's copies, waiting for other ranks' compute."""
    gather_seconds: float
    """In collectives that gather parameters, sizes and headers included, mean over ranks."""
    reduce_scatter_seconds: float
    """In collectives that reduce gradients, mean over ranks."""
    other_collective_seconds: float
    """In those that clip and average the loss, mean over ranks."""
    codec_seconds: float
    """In encoding and decoding, mean over ranks; 0 without a codec."""
    counted_bytes: float
    """What left a host by the library's count (`stats(model).wire_bytes` for ours) and what all other collectives carried,
    mean over hosts."""
    gathered_bytes: float
    """The part of `counted_bytes` that gathers parameters."""
    interface_bytes: float | None
    """What left a host by its network interface, mean over hosts; `None` without interfaces of their own (loopback)."""
    loss: float
    """Mean over ranks, the exact fp32 value."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender: its timed iterations, and what it took."""

    contender: str
    """A key of `contenders.CONTENDERS`."""
    steps: tuple[Step, ...] = ()
    losses: tuple[float, ...] = ()
    """Of all iterations of one round, warm-up included; every lossless contender with FSDP2's numerics has the same."""
    parameters_digest: str = ""
    """sha256 over all ranks' parameters after the last iteration."""
    peak_memory_bytes: int = 0
    """Peak resident memory of the largest rank."""
    cache_bytes: int = 0
    """Caches of a codec on a rank."""
    notes: tuple[str, ...] = ()
    failure: str | None = None
    """Why it could not be measured, in words; then there may be no steps."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how it was measured."""

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
    """`"ring"` or `"gloo"`, see job.py."""
    machine: str
    num_cores: int
    torch_version: str
    date: str
    """ISO 8601, UTC."""
    command: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """All of one run, contenders in the order in which they ran."""

    setting: Setting
    measured: tuple[Measured, ...]

    def of(self, contender: str) -> Measured | None:
        """The record of a contender, by key."""
        return next((one for one in self.measured if one.contender == contender), None)

    def to_json(self) -> str:
        """Text that `from_json` reads back to the same records."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Raises `ValueError` for the text of another format."""
        read: dict[str, Any] = json.loads(text)
        if read.get("format") != FORMAT:
            raise ValueError(f"format {read.get('format')!r} of results is not {FORMAT}: measure again")
        return cls(setting=Setting(**read["setting"]), measured=tuple(map(_measured, read["measured"])))

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads what `to_json` wrote. Raises `OSError`, or `ValueError` for anything else."""
        return cls.from_json(path.read_text(encoding="utf-8"))


def _measured(read: Mapping[str, Any]) -> Measured:
    lists = {"losses": tuple(read["losses"]), "notes": tuple(read["notes"])}
    return Measured(**{**read, **lists, "steps": tuple(Step(**step) for step in read["steps"])})
