"""A recorded step moved to other ranks: what grows, what shrinks, and what ranks that share cores do to one another.

On W ranks instead of the recorded W0, with the same batch on each rank:
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
    """What ranks compute on."""

    num_cores: int = 0
    """That all ranks share; 0: every rank has a device of its own."""
    contention: float = 1.0
    """How much of the ideal slow-down by sharing is seen; 1: all of it."""

    def slowdown(self, world_size: int) -> float:
        """How much longer work takes than on a rank alone."""
        if self.num_cores < 1:
            return 1.0
        return 1.0 + self.contention * max(0.0, world_size / self.num_cores - 1.0)


def place_of(trace: Trace) -> Place:
    """Where it was recorded."""
    return Place(world_size=trace.world_size, ranks_per_host=trace.ranks_per_host)


def move(trace: Trace, place: Place, then: Machine, now: Machine) -> Trace:
    """The step of `trace`, recorded on `then`, at `place` on `now`. Seconds of collectives are no longer those of a network."""
    before, after = trace.world_size, place.world_size
    if before == after:
        factors = dict.fromkeys(("model", "share", "others"), now.slowdown(after) / then.slowdown(before))
        payload_factor = 1.0
    else:
        slower = now.slowdown(after) / then.slowdown(before)
        payload_factor = before / after
        others = ((after - 1) / after) / ((before - 1) / before) if before > 1 else 0.0
        factors = {"model": slower, "share": slower * payload_factor, "others": slower * others}
    if before == 1 and after > 1 and any(event.node in CODEC for event in trace.events):
        raise SimulationError(f"the trace of {trace.contender!r} on 1 rank gathers nothing: record it on at least 2")
    events = tuple(
        _moved(event, trace, place, factors, payload_factor)
        for event in trace.events
        if after > 1 or event.node == "Compute"
    )
    groups = tuple(
        replace(group, values_per_rank=-(-group.values_per_rank * before // after)) for group in trace.groups
    )
    return replace(
        trace,
        world_size=after,
        ranks_per_host=place.ranks_per_host,
        num_cores=now.num_cores,
        events=events,
        groups=groups,
    )


def _moved(event: Event, trace: Trace, place: Place, factors: dict[str, float], payload_factor: float) -> Event:
    if event.node in COLLECTIVES:
        if event.node == "AllReduce":
            return event
        if part := part_size(trace, event):
            now = part if place.world_size == trace.world_size else part_of(place)
            return replace(event, payload_bytes=round(event.payload_bytes * part / now))
        return replace(event, payload_bytes=round(event.payload_bytes * payload_factor))
    if event.node in DECODERS:
        return replace(event, seconds=event.seconds * factors["others"])
    is_share = event.node in ENCODERS or event.phase == "optimizer"
    return replace(event, seconds=event.seconds * factors["share" if is_share else "model"])


def part_of(place: Place) -> int:
    """The ranks that `reshard_after_forward=<int>` shares parameters among, as the stand chooses them; all where it cannot."""
    return reshard_size(place.hosts, place.local_size) or place.world_size


def part_size(trace: Trace, event: Event) -> int | None:
    """Of `reshard_after_forward=<int>`: the ranks that a backward gather spans, told from its payload; else `None`."""
    if trace.contender != INT_KEY or event.node != "AllGather" or event.phase != "backward" or event.group is None:
        return None
    if event.payload_bytes <= 0:
        return None
    whole = trace.world_size * trace.groups[event.group].values_per_rank * trace.item_bytes
    part = round(whole / event.payload_bytes)
    return part if 1 <= part < trace.world_size else None


def hierarchical_groups(trace: Trace) -> frozenset[int | None]:
    """The groups whose gathers go between hosts first and then inside them."""
    return frozenset(event.group for event in trace.events if event.node == "InNode")


def ring_of(trace: Trace, event: Event, two_level: frozenset[int | None]) -> Ring:
    """The ranks that a collective of the trace spans; `two_level` are its `hierarchical_groups`."""
    place = place_of(trace)
    if event.node == "InNode":
        return Ring(ranks=place.local_size)
    if part := part_size(trace, event):
        return Ring(ranks=part, hosts=-(-part // place.ranks_per_host))
    if event.node == "AllGather" and event.group in two_level:
        return Ring(ranks=place.hosts, hosts=place.hosts, side_by_side=place.local_size)
    return Ring(ranks=place.world_size, hosts=place.hosts)


def hierarchical(trace: Trace) -> Trace:
    """The same step with compressed gathers between hosts and plain ones inside: every gather that a codec made gets an
    `InNode` behind it, and a rank decodes what the ranks of its own number on other hosts sent."""
    place = place_of(trace)
    if place.hosts < 2 or place.local_size < 2 or any(event.node == "InNode" for event in trace.events):
        return trace
    fewer = (place.hosts - 1) / (place.world_size - 1)
    return replace(trace, events=tuple(_with_in_node(trace, place, fewer)))


def _with_in_node(trace: Trace, place: Place, fewer: float) -> Iterator[Event]:
    waiting: Event | None = None
    is_decoded = False
    for event in trace.events:
        goes_on = waiting is not None and event.node in ("AllGather", *CODEC) and event.group == waiting.group
        if event.node in DECODERS:
            event = replace(event, seconds=event.seconds * fewer)
            is_decoded = True
        # shards are spread once they are decoded; a header and its payload are one gather, whatever was computed between
        elif waiting is not None and not goes_on and (is_decoded or event.node != "Compute"):
            yield waiting
            waiting, is_decoded = None, False
        yield event
        if event.node == "AllGather" and event.group is not None:
            raw = trace.groups[event.group].values_per_rank * trace.item_bytes
            waiting = replace(event, node="InNode", seconds=0.0, payload_bytes=place.hosts * raw, num_collectives=1)
    if waiting is not None:
        yield waiting
