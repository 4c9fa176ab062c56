"""A recorded training step: the paper's A = [l_1 .. l_m], the order of gathers, with what lies between them.

instruments (bench) or the trainer  ->  Trace (JSON)  ->  simulator
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
NODES = ("Hash", "Cmp", "PreDecmp", "AllGather", "InNode", "Decmp", "Compute", "ReduceScatter", "AllReduce")
"""The nodes of a step: the paper's nodes of a gather, the spreading of shards inside a node (hierarchical gathers), the
model's and the optimizer's own work, and the collectives of gradients, gradient norm and loss."""
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class TracedGroup:
    """One FSDP2 parameter group."""

    name: str
    values_per_rank: int
    """The padded shard: what a rank contributes to a gather, in values."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One node of the step, in the order in which the host began it."""

    node: str
    """One of `NODES`."""
    phase: str
    """One of `PHASES`."""
    group: int | None
    """Index into `Trace.groups`; `None` for an event that belongs to none, such as the optimizer's."""
    seconds: float
    """Wall-clock seconds as recorded; those of a collective include the wait for peers."""
    payload_bytes: int = 0
    """Of a collective: what this rank contributes to it (`AllGather`: its shard or the padded payload, headers included;
    `ReduceScatter`: the shard that it gets; `AllReduce`: all of it)."""
    num_collectives: int = 0
    """Of a collective: the calls that this event sums up, such as a header's and a payload's gather."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One optimizer step of one rank: each event has the median seconds over the recorded steps."""

    contender: str
    """A key of `fsdp_ciera.bench.contenders`; `"fsdp2"` for stock FSDP2, `"default"` for a trainer's run under ours."""
    world_size: int
    ranks_per_host: int
    num_cores: int
    """Cores that all ranks of the machine shared (CPU ranks), or 0 where every rank had a device of its own."""
    rate_bits_per_second: float | None
    """Bits a second that each host could send; `None`: no limit."""
    is_serial: bool
    """Whether collectives block the host, as on gloo: then nothing overlaps."""
    item_bytes: int
    """Bytes of a gathered value."""
    reduce_item_bytes: int
    """Bytes of a reduced gradient."""
    num_parameters: int
    iteration_seconds: tuple[float, ...]
    """Wall-clock seconds of the recorded steps."""
    groups: tuple[TracedGroup, ...]
    events: tuple[Event, ...]

    def to_json(self) -> str:
        """Text that `from_json` reads back to the same trace."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that `to_json` wrote. Raises `ValueError` for another format, or events of an unknown node or phase."""
        fields: dict[str, Any] = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"not a trace of format {FORMAT}: record it again")
        param_groups = tuple(TracedGroup(**param_group) for param_group in fields.pop("groups"))
        events = tuple(map(_event, fields.pop("events")))
        seconds = tuple(fields.pop("iteration_seconds"))
        return cls(groups=param_groups, events=events, iteration_seconds=seconds, **fields)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Reads what `to_json` wrote. Raises `OSError`, or `ValueError` for anything else."""
        return cls.from_json(path.read_text(encoding="utf-8"))


def _event(fields: Mapping[str, Any]) -> Event:
    event = Event(**fields)
    if event.node not in NODES or event.phase not in PHASES:
        raise ValueError(f"event {event.node!r} in {event.phase!r} is none of {NODES} in {PHASES}")
    return event
