"""Projects every contender's iteration to many world sizes.

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
from fsdp_ciera.simulator.place import COLLECTIVES, Machine, hierarchical, hierarchical_param_groups, move, ring_of
from fsdp_ciera.simulator.schemes import BY_KEY, Assumptions, derive

RECORDED, DERIVED = "recorded", "derived"
"""Where a contender's step comes from: its own trace, or stock FSDP2's step."""


class ProjectedJob(Protocol):
    """The training that is projected."""

    name: str

    def keys(self) -> list[str]:
        """Returns the keys of the contenders whose steps it knows, stock FSDP2 first."""

    def step(self, key: str, place: Place, assumptions: Assumptions) -> tuple[Trace, str]:
        """Returns a contender's step at `place`, before a network prices its collectives, and `RECORDED` or `DERIVED`."""


class TraceJob:
    """A recorded job: contenders with a trace have the step of that trace, all others a step derived from stock FSDP2's."""

    def __init__(
        self,
        traces: Sequence[Trace],
        machine: Machine,
        recorded_machine: Machine | None = None,
        speedup: float = 1.0,
        step_at: Callable[[str, Place], Trace | None] | None = None,
    ) -> None:
        """`machine`: what the job shall run on. `recorded_machine`: what it was recorded on, by default the cores that a trace
        names, with a contention of 1. `speedup`: how many times as fast `machine` computes and codes. `step_at`: returns a
        contender's step at a place if it knows a better one than the moved trace, else `None`.

        Raises `SimulationError` without a trace of stock FSDP2.
        """
        self._traces = {trace.contender: trace for trace in traces}
        if "fsdp2" not in self._traces:
            recorded_keys = ", ".join(sorted(self._traces)) or "nothing"
            raise SimulationError(f"traces of {recorded_keys}: one of stock FSDP2 ('fsdp2') is needed beside them")
        stock = self._traces["fsdp2"]
        self.name = f"{stock.num_parameters / 1e6:.1f} M parameters, recorded on {stock.world_size} ranks"
        self._machine, self._recorded_machine = machine, recorded_machine
        self._speedup, self._step_at = speedup, step_at

    def keys(self) -> list[str]:
        """Returns the keys of contenders with traces, and of those that can be derived.

        On the stand itself no step of a codec is derived: what a codec costs there is only known from a recording.
        """
        on_stand = self._step_at is not None
        derived = [key for key in BY_KEY if key in self._traces or not (on_stand and BY_KEY[key].needs_costs)]
        return [*derived, *(key for key in self._traces if key not in BY_KEY)]

    def step(self, key: str, place: Place, assumptions: Assumptions) -> tuple[Trace, str]:
        """See `ProjectedJob`."""
        if key in self._traces:
            trace = self._moved(key, place)
            is_ours = key in CONTENDERS and CONTENDERS[key].kind == Kind.OURS
            return (hierarchical(trace) if assumptions.is_hierarchical and is_ours else trace), RECORDED
        stock = self._moved("fsdp2", place)
        param_groups = [
            # category and fusion of a param group's parameters are not recorded: most of a MoE are experts
            ([f"{param_group.name}.mlp.experts.down_proj"], [param_group.values_per_rank * place.world_size])
            for param_group in stock.groups
        ]
        return derive(stock, BY_KEY[key], param_groups, place, assumptions), DERIVED

    def _moved(self, key: str, place: Place) -> Trace:
        if self._step_at is not None and (step := self._step_at(key, place)) is not None:
            return step
        trace = self._traces[key]
        recorded_machine = self._recorded_machine or Machine(num_cores=trace.num_cores)
        return _faster(move(trace, place, recorded_machine, self._machine), self._speedup)


class ModelJob:
    """A job of a model that nobody ran: all its steps are derived."""

    def __init__(self, name: str, model: ModelParameters, costs: ComputeCosts, reduce_item_bytes: int) -> None:
        self.name = f"{name}, {model.num_parameters / 1e9:.2f} B parameters"
        self._model, self._costs, self._reduce_item_bytes = model, costs, reduce_item_bytes

    def keys(self) -> list[str]:
        """Returns the keys of all contenders that can be derived."""
        return list(BY_KEY)

    def step(self, key: str, place: Place, assumptions: Assumptions) -> tuple[Trace, str]:
        """See `ProjectedJob`."""
        stock = stock_step(self._model, place, self._costs, self._reduce_item_bytes)
        return derive(stock, BY_KEY[key], self._model.groups, place, assumptions), DERIVED


@dataclass(frozen=True, kw_only=True)
class SimulatedCluster:
    """The hosts, the network and the schedule that a job is projected to."""

    ranks_per_host: int
    network: Callable[[Place], Network]
    is_serial: bool
    correct: Callable[[str, Place, float, float], float] | None = None
    """(contender, place, own seconds, network seconds) -> calibrated seconds of an iteration; `None`: those of the schedule."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One contender at one world size."""

    contender: str
    label: str
    source: str
    """`RECORDED` or `DERIVED`."""
    world_size: int
    seconds: float
    """Seconds of an iteration."""
    speedup: float
    """Stock FSDP2's seconds of an iteration over these."""
    compute_seconds: float
    codec_seconds: float
    gather_seconds: float
    """Seconds of gathers on the links between and inside hosts, overlapped or not."""
    reduce_seconds: float
    host_bytes: float
    """Bytes that leave a host in an iteration; that leave a rank, where there is one host."""


def project(
    job: ProjectedJob,
    cluster: SimulatedCluster,
    world_sizes: Sequence[int],
    keys: Sequence[str],
    assumptions: Assumptions,
) -> list[Point]:
    """Projects all contenders to all world sizes. Raises `SimulationError` for hosts that would not all be full."""
    points = []
    for world_size in world_sizes:
        place = place_at(world_size, cluster.ranks_per_host)
        stock_seconds = _point(job, cluster, place, "fsdp2", assumptions, 1.0).seconds
        points += [_point(job, cluster, place, key, assumptions, stock_seconds) for key in keys]
    return points


def schedule(
    job: ProjectedJob, cluster: SimulatedCluster, place: Place, key: str, assumptions: Assumptions
) -> tuple[Trace, Schedule, str]:
    """Returns a contender's step with the seconds of its collectives, its schedule, and its source."""
    trace, source = job.step(key, place, assumptions)
    trace = priced(trace, cluster.network(place))
    settles = assumptions.overlap and key in CONTENDERS and CONTENDERS[key].kind == Kind.OURS and "paper" not in key
    return trace, simulate(build(trace, cluster.is_serial, settles)), source


def label_of(key: str) -> str:
    """Returns a contender's label for tables and pictures."""
    return CONTENDERS[key].label if key in CONTENDERS else key


def place_at(world_size: int, ranks_per_host: int) -> Place:
    """Returns the place of `world_size` ranks. Raises `SimulationError` for hosts that would not all be full."""
    if world_size > ranks_per_host and world_size % ranks_per_host:
        raise SimulationError(
            f"{world_size} GPUs in nodes of {ranks_per_host} are not allowed: nodes that are all full"
        )
    return Place(world_size=world_size, ranks_per_host=min(ranks_per_host, world_size))


def _point(
    job: ProjectedJob, cluster: SimulatedCluster, place: Place, key: str, assumptions: Assumptions, stock_seconds: float
) -> Point:
    trace, step_schedule, source = schedule(job, cluster, place, key, assumptions)
    seconds = step_schedule.seconds
    if cluster.correct is not None:
        network_seconds = sum(step_schedule.kind_seconds(kind) for kind in COLLECTIVES)
        seconds = cluster.correct(key, place, step_schedule.seconds - network_seconds, network_seconds)
    codec_seconds = sum(step_schedule.kind_seconds(kind) for kind in ("Hash", "Cmp", "PreDecmp", "Decmp"))
    return Point(
        contender=key,
        label=label_of(key),
        source=source,
        world_size=place.world_size,
        seconds=seconds,
        speedup=stock_seconds / seconds if seconds > 0 else 1.0,
        compute_seconds=step_schedule.kind_seconds("Compute"),
        codec_seconds=codec_seconds,
        gather_seconds=step_schedule.kind_seconds("AllGather") + step_schedule.kind_seconds("InNode"),
        reduce_seconds=step_schedule.kind_seconds("ReduceScatter") + step_schedule.kind_seconds("AllReduce"),
        host_bytes=_host_bytes(trace, place),
    )


def _host_bytes(trace: Trace, place: Place) -> float:
    two_level = hierarchical_param_groups(trace)
    total_bytes = 0.0
    for event in trace.events:
        if event.node in COLLECTIVES:
            ring = ring_of(trace, event, two_level)
            if place.hosts == 1 or not ring.is_inside:
                total_bytes += sent_bytes(event.node, event.payload_bytes, ring)
    return total_bytes


def _faster(trace: Trace, speedup: float) -> Trace:
    if speedup == 1.0:
        return trace
    events = [
        event if event.node in COLLECTIVES else replace(event, seconds=event.seconds / speedup)
        for event in trace.events
    ]
    return replace(trace, events=tuple(events))
