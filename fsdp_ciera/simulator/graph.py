"""A step as nodes on streams: the paper's Fig. 7, with FSDP2's own rules.

serial        one stream, in the recorded order: collectives block the host, as gloo's do
overlapped    streams of compute, gathers, reduce-scatters, sender (Hash, Cmp) and receiver (PreDecmp, Decmp):

    forward     the gather of block k waits until block k - 2 has been copied out of its buffer (FSDP2 defers that by one)
    backward    prefetched one block ahead, in the recorded (reverse) order: it waits for the copy-out of block k - 1
    reduce      reduce-scatter k waits for compute k, and compute k + 2 for it: FSDP2 holds one gradient buffer
    codec       Hash and Cmp run ahead on their own stream; with settled sizes (DESIGN 8) the first gather waits for all of the
                forward's. Decmp k waits for gather k, compute k for Decmp k, and gather k + 1 for neither
    link        gathers and reduce-scatters take turns on it in the order of the host's calls

A block is a stretch of events that gather, with what computes and reduces until the next one gathers. Recorded steps have
compute between the stages of one gather, too (copies, Python); it counts as the block's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fsdp_ciera.errors import SimulationError
from fsdp_ciera.profiling.trace import NODES, Event, Trace
from fsdp_ciera.simulator.engine import Node
from fsdp_ciera.simulator.network import Network
from fsdp_ciera.simulator.place import CODEC, COLLECTIVES, DECODERS, ENCODERS, hierarchical_groups, ring_of

HOST, COMPUTE, GATHER, REDUCE, SENDER, RECEIVER, LINK, IN_NODE_LINK = (
    "host",
    "compute",
    "gather",
    "reduce-scatter",
    "sender",
    "receiver",
    "link",
    "link inside",
)
_GATHERING = (*CODEC, "AllGather", "InNode")


def priced(trace: Trace, network: Network) -> Trace:
    """The same step with the seconds of its collectives as `network` has them."""
    two_level = hierarchical_groups(trace)
    idle_seconds = float("inf")
    events = []
    for event in trace.events:
        if event.node not in NODES:
            raise SimulationError(
                f"the trace of {trace.contender!r} has a node {event.node!r}, allowed: {', '.join(NODES)}"
            )
        seconds = event.seconds
        if event.node in COLLECTIVES:
            ring = ring_of(trace, event, two_level)
            seconds = network.seconds(event.node, event.payload_bytes, event.num_collectives, ring, idle_seconds)
            idle_seconds = 0.0
        else:
            idle_seconds += seconds
        events.append(_with_seconds(event, seconds))
    return replace(trace, events=tuple(events))


def build(trace: Trace, is_serial: bool, settles: bool = False) -> list[Node]:
    """The nodes of a step whose events all have their seconds."""
    return _serial(trace) if is_serial else _Overlapped(trace, settles).nodes


def _serial(trace: Trace) -> list[Node]:
    return [
        Node(event.node, event.seconds, (HOST,), (place - 1,) if place else (), _label(trace, event), event.phase)
        for place, event in enumerate(trace.events)
    ]


@dataclass
class _Block:
    phase: str
    gathering: list[Event] = field(default_factory=list)
    rest: list[Event] = field(default_factory=list)
    copied_out: tuple[int, ...] = ()
    """Nodes after which its gathered parameters have left their buffer."""
    ready: tuple[int, ...] = ()
    """Nodes after which its parameters may be used."""


def _blocks(events: Iterable[Event]) -> list[_Block]:
    made: list[_Block] = []
    for event in events:
        gathers = event.node in _GATHERING and event.phase != "optimizer"
        if not made or event.phase != made[-1].phase or (gathers and made[-1].rest and not _goes_on(made[-1], event)):
            made.append(_Block(event.phase))
        (made[-1].gathering if gathers else made[-1].rest).append(event)
    return made


def _without_prefetch(events: Sequence[Event]) -> list[Event]:
    """Backward gathers behind the reduce-scatter of the group gathered before, as if each waited until it is needed.

    FSDP2 calls the next gather before it computes with the last one, on gloo too, where that gains nothing: a recorded step
    has gather 2, compute 3, reduce-scatter 3. The root's group is gathered first and reduced last: nothing waits for it.
    """
    reduced_at = {event.group: place for place, event in enumerate(events) if event.node == "ReduceScatter"}
    made: list[Event] = []
    held: list[Event] = []
    gathered: int | None = None
    awaited: int | None = None
    for place, event in enumerate(events):
        if event.phase != "backward":
            made += held
            held, gathered = [], None
        elif event.node in _GATHERING and event.group is not None:
            if event.group != gathered:
                gathered, awaited = event.group, gathered
            last = len(events)
            if awaited is not None and place < reduced_at.get(awaited, -1) < reduced_at.get(event.group, last):
                held.append(event)
                continue
        made.append(event)
        if event.node == "ReduceScatter" and held and event.group == awaited:
            made += held
            held = []
    return made + held


def _goes_on(block: _Block, event: Event) -> bool:
    """Whether this is another stage of the block's own gather: what a recorder finds between two stages is compute too."""
    if any(one.node != "Compute" for one in block.rest) or {one.group for one in block.gathering} != {event.group}:
        return False
    return event.node in (*DECODERS, "InNode") or not any(one.node == "Decmp" for one in block.gathering)


class _Overlapped:
    """Builds the list in the order in which the host would launch it."""

    def __init__(self, trace: Trace, settles: bool) -> None:
        self.trace = trace
        self.nodes: list[Node] = []
        self.blocks = _blocks(_without_prefetch(trace.events))
        self.computes: list[int] = []
        """The last compute node of each block so far; -1 where there was none."""
        self.reduces: list[int] = []
        self.settled: tuple[int, ...] = ()
        if settles:
            self._settle()
        launched = 0
        for number, block in enumerate(self.blocks):
            if launched <= number:
                self._launch_gathers(number)
            block.copied_out = (*block.ready, *self._last_compute())
            launched = number + 1
            if launched < len(self.blocks) and self.blocks[launched].phase == block.phase:
                self._launch_gathers(launched)
                launched += 1
            self._launch_rest(number)

    def _settle(self) -> None:
        """Hash and Cmp of the forward's gathers first, one after the other: then all sizes are known."""
        for block in self.blocks:
            if block.phase == "forward":
                for event in block.gathering:
                    if event.node in ENCODERS:
                        self.settled = (self._add(event, (SENDER,)),)
                block.gathering = [event for event in block.gathering if event.node not in ENCODERS]

    def _launch_gathers(self, number: int) -> None:
        block = self.blocks[number]
        is_first = number == 0 or self.blocks[number - 1].phase != block.phase
        room = self._room(number, is_first)
        encoded: dict[int | None, int] = {}
        arrived: dict[int | None, int] = {}
        for event in block.gathering:
            waits = [place for place in (encoded.get(event.group),) if place is not None]
            if event.node in ENCODERS:
                # weights of a new step are there from its beginning; repeats have no reason to run before their phase
                waits += room if is_first and number else []
                encoded[event.group] = self._add(event, (SENDER,), waits)
            elif event.node == "PreDecmp":
                self._add(event, (RECEIVER,))
            elif event.node == "Decmp":
                waits = [arrived[event.group]] if event.group in arrived else list(room)
                arrived[event.group] = self._add(event, (RECEIVER,), waits)
            elif event.node == "AllGather":
                previous = [arrived[event.group]] if event.group in arrived else []
                waits += [*room, *previous, *self.settled]
                arrived[event.group] = self._add(event, (GATHER, LINK), waits)
            else:
                waits = [arrived[event.group]] if event.group in arrived else []
                arrived[event.group] = self._add(event, (GATHER, IN_NODE_LINK), waits)
        block.ready = tuple(arrived.values())

    def _room(self, number: int, is_first: bool) -> tuple[int, ...]:
        """What the gathers of a block wait for, besides the stream."""
        if number == 0:
            return ()
        block = self.blocks[number]
        if is_first:
            return self._last_compute()
        back = 2 if block.phase == "forward" else 1
        return self.blocks[number - back].copied_out if number >= back else ()

    def _launch_rest(self, number: int) -> None:
        block = self.blocks[number]
        for event in block.rest:
            if event.node == "Compute":
                waits = [*block.ready, *self._last_compute()]
                if event.phase == "optimizer":
                    waits += self.reduces[-1:]
                elif len(self.reduces) >= 2:
                    waits.append(self.reduces[-2])
                self.computes.append(self._add(event, (COMPUTE,), waits))
            elif event.node == "ReduceScatter":
                self.reduces.append(self._add(event, (REDUCE, LINK), self._last_compute()))
            else:  # of the gradients' norm and the loss: everything waits for its result
                waits = [*self.reduces[-1:], *self._last_compute()]
                self.computes.append(self._add(event, (COMPUTE, LINK), waits))

    def _last_compute(self) -> tuple[int, ...]:
        return (self.computes[-1],) if self.computes else ()

    def _add(self, event: Event, streams: tuple[str, ...], waits_for: Sequence[int] = ()) -> int:
        label = _label(self.trace, event)
        self.nodes.append(Node(event.node, event.seconds, streams, tuple(waits_for), label, event.phase))
        return len(self.nodes) - 1


def _label(trace: Trace, event: Event) -> str:
    return "" if event.group is None else trace.groups[event.group].name


def _with_seconds(event: Event, seconds: float) -> Event:
    # dataclasses.replace takes microseconds that 1e5 events feel
    return Event(
        node=event.node,
        phase=event.phase,
        group=event.group,
        seconds=seconds,
        payload_bytes=event.payload_bytes,
        num_collectives=event.num_collectives,
    )
