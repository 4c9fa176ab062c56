"""Projection: every contender's iteration over many world sizes.

a job (recorded traces, or a model) -> a contender's step at a place -> network prices -> graph -> engine -> seconds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fsdp_ciera.bench.contenders import CONTENDERS, Kind
from fsdp_ciera.errors import SimulationError
from fsdp_ciera.profiling.trace import Trace
from fsdp_ciera.simulator.engine import Schedule, simulate
from fsdp_ciera.simulator.graph import build, priced
from fsdp_ciera.simulator.modelled import ComputeCosts, ModelParameters, stock_step
from fsdp_ciera.simulator.network import Network, Place, sent_bytes
from fsdp_ciera.simulator.place import COLLECTIVES, Machine, hierarchical, hierarchical_groups, move, ring_of
from fsdp_ciera.simulator.schemes import BY_KEY, Assumptions, derive

RECORDED, DERIVED = "recorded", "derived"


class Job(Protocol):
    """What is trained."""

    name: str

    def keys(self) -> list[str]:
        """Contenders that it can say something of, stock FSDP2 first."""

    def step(self, key: str, place: Place, given: Assumptions) -> tuple[Trace, str]:
        """A contender's step there, collectives without seconds, and `RECORDED` or `DERIVED`."""


class TraceJob:
    """Recorded: each contender by its own trace where there is one, the rest derived from stock FSDP2's."""

    def __init__(
        self,
        traces: Sequence[Trace],
        machine: Machine,
        then: Machine | None = None,
        speedup: float = 1.0,
        at: Callable[[str, Place], Trace | None] | None = None,
    ) -> None:
        """`machine`: what it shall run on; `then`: what it was recorded on, by default cores shared with no loss;
        `speedup`: of the target's compute and codecs over it. `at` may know a better step for a place, already moved there.

        Raises `SimulationError` without a trace of stock FSDP2.
        """
        self._traces = {trace.contender: trace for trace in traces}
        if "fsdp2" not in self._traces:
            known = ", ".join(sorted(self._traces)) or "nothing"
            raise SimulationError(f"traces of {known}: one of stock FSDP2 ('fsdp2') is needed beside them")
        stock = self._traces["fsdp2"]
        self.name = f"{stock.num_parameters / 1e6:.1f} M parameters, recorded on {stock.world_size} ranks"
        self._machine, self._then, self._speedup, self._at = machine, then, speedup, at

    def keys(self) -> list[str]:
        """Those with traces, and those that can be derived. On the stand itself, where codecs cost what they cost there, no
        codec that was not recorded."""
        on_stand = self._at is not None
        derived = [key for key in BY_KEY if key in self._traces or not (on_stand and BY_KEY[key].needs_costs)]
        return [*derived, *(key for key in self._traces if key not in BY_KEY)]

    def step(self, key: str, place: Place, given: Assumptions) -> tuple[Trace, str]:
        """See `Job`."""
        if key in self._traces:
            trace = self._moved(key, place)
            is_ours = key in CONTENDERS and CONTENDERS[key].kind == Kind.OURS
            return (hierarchical(trace) if given.is_hierarchical and is_ours else trace), RECORDED
        stock = self._moved("fsdp2", place)
        groups = [
            # category and fusion of a group's parameters are not recorded: most of a MoE are experts
            ([f"{group.name}.mlp.experts.down_proj"], [group.values_per_rank * place.world_size])
            for group in stock.groups
        ]
        return derive(stock, BY_KEY[key], groups, place, given), DERIVED

    def _moved(self, key: str, place: Place) -> Trace:
        if self._at is not None and (known := self._at(key, place)) is not None:
            return known
        trace = self._traces[key]
        then = self._then or Machine(num_cores=trace.num_cores)
        return _faster(move(trace, place, then, self._machine), self._speedup)


class ModelJob:
    """A model that nobody ran: everything is derived."""

    def __init__(self, name: str, model: ModelParameters, costs: ComputeCosts, reduce_item_bytes: int) -> None:
        self.name = f"{name}, {model.num_parameters / 1e9:.2f} B parameters"
        self._model, self._costs, self._reduce_item_bytes = model, costs, reduce_item_bytes

    def keys(self) -> list[str]:
        """All that can be derived."""
        return list(BY_KEY)

    def step(self, key: str, place: Place, given: Assumptions) -> tuple[Trace, str]:
        """See `Job`."""
        stock = stock_step(self._model, place, self._costs, self._reduce_item_bytes)
        return derive(stock, BY_KEY[key], self._model.groups, place, given), DERIVED


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where it shall run."""

    ranks_per_host: int
    network: Callable[[Place], Network]
    is_serial: bool
    correct: Callable[[str, Place, float, float], float] | None = None
    """(contender, place, own seconds, network seconds) -> seconds of an iteration, as calibrated; `None`: the schedule's."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One contender at one world size."""

    contender: str
    label: str
    source: str
    """`RECORDED` or `DERIVED`."""
    world_size: int
    seconds: float
    """Of an iteration."""
    speedup: float
    """Of stock FSDP2's seconds over these."""
    compute_seconds: float
    codec_seconds: float
    gather_seconds: float
    """Of the links, overlapped or not, those inside hosts too."""
    reduce_seconds: float
    host_bytes: float
    """What leaves a host in an iteration (a rank, where there is one host)."""


def project(
    job: Job, cluster: Cluster, world_sizes: Sequence[int], keys: Sequence[str], given: Assumptions
) -> list[Point]:
    """All contenders at all world sizes. Raises `SimulationError` for hosts that would not all be full."""
    points = []
    for world_size in world_sizes:
        place = place_at(world_size, cluster.ranks_per_host)
        stock_seconds = _point(job, cluster, place, "fsdp2", given, 1.0).seconds
        points += [_point(job, cluster, place, key, given, stock_seconds) for key in keys]
    return points


def schedule(job: Job, cluster: Cluster, place: Place, key: str, given: Assumptions) -> tuple[Trace, Schedule, str]:
    """A contender's step with the seconds of its collectives, when its nodes run, and its source."""
    trace, source = job.step(key, place, given)
    trace = priced(trace, cluster.network(place))
    settles = given.overlap and key in CONTENDERS and CONTENDERS[key].kind == Kind.OURS and "paper" not in key
    return trace, simulate(build(trace, cluster.is_serial, settles)), source


def label_of(key: str) -> str:
    """A contender's, for tables and pictures."""
    return CONTENDERS[key].label if key in CONTENDERS else key


def place_at(world_size: int, ranks_per_host: int) -> Place:
    """Raises `SimulationError` for hosts that would not all be full."""
    if world_size > ranks_per_host and world_size % ranks_per_host:
        raise SimulationError(
            f"{world_size} GPUs in nodes of {ranks_per_host} are not allowed: nodes that are all full"
        )
    return Place(world_size=world_size, ranks_per_host=min(ranks_per_host, world_size))


def _point(job: Job, cluster: Cluster, place: Place, key: str, given: Assumptions, stock_seconds: float) -> Point:
    trace, found, source = schedule(job, cluster, place, key, given)
    seconds = found.seconds
    if cluster.correct is not None:
        network = sum(found.kind_seconds(kind) for kind in COLLECTIVES)
        seconds = cluster.correct(key, place, found.seconds - network, network)
    codec = sum(found.kind_seconds(kind) for kind in ("Hash", "Cmp", "PreDecmp", "Decmp"))
    return Point(
        contender=key,
        label=label_of(key),
        source=source,
        world_size=place.world_size,
        seconds=seconds,
        speedup=stock_seconds / seconds if seconds > 0 else 1.0,
        compute_seconds=found.kind_seconds("Compute"),
        codec_seconds=codec,
        gather_seconds=found.kind_seconds("AllGather") + found.kind_seconds("InNode"),
        reduce_seconds=found.kind_seconds("ReduceScatter") + found.kind_seconds("AllReduce"),
        host_bytes=_host_bytes(trace, place),
    )


def _host_bytes(trace: Trace, place: Place) -> float:
    two_level = hierarchical_groups(trace)
    total = 0.0
    for event in trace.events:
        if event.node in COLLECTIVES:
            ring = ring_of(trace, event, two_level)
            if place.hosts == 1 or not ring.is_inside:
                total += sent_bytes(event.node, event.payload_bytes, ring)
    return total


def _faster(trace: Trace, speedup: float) -> Trace:
    if speedup == 1.0:
        return trace
    events = [
        event if event.node in COLLECTIVES else replace(event, seconds=event.seconds / speedup)
        for event in trace.events
    ]
    return replace(trace, events=tuple(events))
