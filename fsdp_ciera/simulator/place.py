"""Moves a recorded step to other ranks: what grows, what shrinks, and how ranks that share cores slow one another down.

Factors on W ranks instead of the recorded W0, with the same batch on each rank:
    forward, backward             the same work                    x contention(W) / contention(W0)
    optimizer, Hash, Cmp          a rank's share of the model       x W0 / W                              x contention
    Decmp, PreDecmp               the others' shares                x ((W - 1) / W) / ((W0 - 1) / W0)     x contention
    payloads of shards            a rank's share of the model       x W0 / W      (bits a value stay)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp_ciera.bench.contenders import reshard_size
from fsdp_ciera.errors import SimulationError
from fsdp_ciera.profiling.trace import Event, Trace
from fsdp_ciera.simulator.network import Place, Ring

ENCODERS = ("Hash", "Cmp")
DECODERS = ("PreDecmp", "Decmp")
CODEC = (*ENCODERS, *DECODERS)
COLLECTIVES = ("AllGather", "InNode", "ReduceScatter", "AllReduce")
INT_KEY = "fsdp2-int"
"""The contender whose backward gathers span fewer ranks."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The cores that ranks compute on."""

    num_cores: int = 0
    """The cores that all ranks share; 0: every rank has a device of its own."""
    contention: float = 1.0
    """The share of the ideal slow-down by sharing that is seen; 1: all of it."""

    def slowdown(self, world_size: int) -> float:
        """Returns the factor by which work takes longer than on a rank alone."""
        if self.num_cores < 1:
            return 1.0
        return 1.0 + self.contention * max(0.0, world_size / self.num_cores - 1.0)


def place_of(trace: Trace) -> Place:
    """Returns the place where `trace` was recorded."""
    return Place(world_size=trace.world_size, ranks_per_host=trace.ranks_per_host)


def move(trace: Trace, place: Place, recorded_machine: Machine, target_machine: Machine) -> Trace:
    """Moves the step of `trace` from `recorded_machine` to `place` on `target_machine`.

    Its collectives still have their recorded seconds, which no network gives at `place`: see `graph.priced`. Raises
    `SimulationError` for a coded step that was recorded on 1 rank.
    """
    old_size, new_size = trace.world_size, place.world_size
    slowdown = target_machine.slowdown(new_size) / recorded_machine.slowdown(old_size)
    if old_size == new_size:
        factors = dict.fromkeys(("model", "share", "others"), slowdown)
        payload_factor = 1.0
    else:
        payload_factor = old_size / new_size
        others_factor = ((new_size - 1) / new_size) / ((old_size - 1) / old_size) if old_size > 1 else 0.0
        factors = {"model": slowdown, "share": slowdown * payload_factor, "others": slowdown * others_factor}
    if old_size == 1 and new_size > 1 and any(event.node in CODEC for event in trace.events):
        raise SimulationError(f"the trace of {trace.contender!r} on 1 rank gathers nothing: record it on at least 2")
    events = tuple(
        _moved(event, trace, place, factors, payload_factor)
        for event in trace.events
        if new_size > 1 or event.node == "Compute"
    )
    param_groups = tuple(
        replace(param_group, values_per_rank=-(-param_group.values_per_rank * old_size // new_size))
        for param_group in trace.groups
    )
    return replace(
        trace,
        world_size=new_size,
        ranks_per_host=place.ranks_per_host,
        num_cores=target_machine.num_cores,
        events=events,
        groups=param_groups,
    )


def _moved(event: Event, trace: Trace, place: Place, factors: dict[str, float], payload_factor: float) -> Event:
    if event.node in COLLECTIVES:
        if event.node == "AllReduce":
            return event
        if part := part_size(trace, event):
            new_part = part if place.world_size == trace.world_size else part_of(place)
            return replace(event, payload_bytes=round(event.payload_bytes * part / new_part))
        return replace(event, payload_bytes=round(event.payload_bytes * payload_factor))
    if event.node in DECODERS:
        return replace(event, seconds=event.seconds * factors["others"])
    is_share = event.node in ENCODERS or event.phase == "optimizer"
    return replace(event, seconds=event.seconds * factors["share" if is_share else "model"])


def part_of(place: Place) -> int:
    """Returns the number of ranks that `reshard_after_forward=<int>` cuts parameters among on the stand; all if it cannot."""
    return reshard_size(place.hosts, place.local_size) or place.world_size


def part_size(trace: Trace, event: Event) -> int | None:
    """Returns the number of ranks that a backward gather of `reshard_after_forward=<int>` spans, by its payload, or `None`."""
    if trace.contender != INT_KEY or event.node != "AllGather" or event.phase != "backward" or event.group is None:
        return None
    if event.payload_bytes <= 0:
        return None
    whole_bytes = trace.world_size * trace.groups[event.group].values_per_rank * trace.item_bytes
    part = round(whole_bytes / event.payload_bytes)
    return part if 1 <= part < trace.world_size else None


def hierarchical_param_groups(trace: Trace) -> frozenset[int | None]:
    """Returns the indexes of the param groups whose gathers go between hosts first and then inside them."""
    return frozenset(event.group for event in trace.events if event.node == "InNode")


def ring_of(trace: Trace, event: Event, two_level: frozenset[int | None]) -> Ring:
    """Returns the ranks that a collective of the trace spans; `two_level` are the trace's `hierarchical_param_groups`."""
    place = place_of(trace)
    if event.node == "InNode":
        return Ring(ranks=place.local_size)
    if part := part_size(trace, event):
        return Ring(ranks=part, hosts=-(-part // place.ranks_per_host))
    if event.node == "AllGather" and event.group in two_level:
        return Ring(ranks=place.hosts, hosts=place.hosts, side_by_side=place.local_size)
    return Ring(ranks=place.world_size, hosts=place.hosts)


def hierarchical(trace: Trace) -> Trace:
    """Returns the same step with coded gathers between hosts and plain ones inside.

    Every gather of a param group gets an `InNode` behind it, and a rank decodes what the ranks with its own local rank on other
    hosts sent. A step that has `InNode` events already, or lies on one host or on hosts of one rank, is returned as it is.
    """
    place = place_of(trace)
    if place.hosts < 2 or place.local_size < 2 or any(event.node == "InNode" for event in trace.events):
        return trace
    peer_share = (place.hosts - 1) / (place.world_size - 1)
    return replace(trace, events=tuple(_with_in_node(trace, place, peer_share)))


def _with_in_node(trace: Trace, place: Place, peer_share: float) -> Iterator[Event]:
    pending: Event | None = None
    is_decoded = False
    for event in trace.events:
        goes_on = pending is not None and event.node in ("AllGather", *CODEC) and event.group == pending.group
        if event.node in DECODERS:
            event = replace(event, seconds=event.seconds * peer_share)
            is_decoded = True
        # shards are spread once they are decoded; a header and its payload are one gather, whatever was computed between
        elif pending is not None and not goes_on and (is_decoded or event.node != "Compute"):
            yield pending
            pending, is_decoded = None, False
        yield event
        if event.node == "AllGather" and event.group is not None:
            shard_bytes = trace.groups[event.group].values_per_rank * trace.item_bytes
            pending = replace(
                event, node="InNode", seconds=0.0, payload_bytes=place.hosts * shard_bytes, num_collectives=1
            )
    if pending is not None:
        yield pending
