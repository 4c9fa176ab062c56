"""Builds a step as nodes on streams: the paper's Fig. 7, with FSDP2's own rules.

serial        one stream, in the recorded order: collectives block the host, as gloo's do
overlapped    streams of compute, gathers, reduce-scatters, sender (Hash, Cmp) and receiver (PreDecmp, Decmp):

    forward     gather k waits until block k - 2 has been copied out of its buffer (FSDP2 defers that by one)
    backward    gathers are prefetched one block ahead, in the recorded (reverse) order: gather k waits until block k - 1 has
                been copied out
    reduce      reduce-scatter k waits for compute k, and compute k + 2 waits for reduce-scatter k: FSDP2 holds one buffer of
                gradients
    codec       Hash and Cmp run ahead on their own stream. With settled sizes (DESIGN 8) the first gather waits for all Hash
                and Cmp of the forward. Decmp k waits for gather k, compute k for Decmp k, and gather k + 1 for neither
    link        gathers and reduce-scatters take turns on the link in the order of the host's calls

A block is a run of events that gather, followed by the events that compute and reduce until the next gather. Recorded steps
also have compute between the stages of one gather (copies, Python); it counts as compute of that block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fsdp_ciera.errors import SimulationError
from fsdp_ciera.profiling.trace import NODES, Event, Trace
from fsdp_ciera.simulator.engine import Node
from fsdp_ciera.simulator.network import Network
from fsdp_ciera.simulator.place import CODEC, COLLECTIVES, DECODERS, ENCODERS, hierarchical_param_groups, ring_of

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
    """Returns the same step, its collectives with the seconds that they take on `network`."""
    two_level = hierarchical_param_groups(trace)
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
    """Returns the nodes of a step whose events all have their seconds.

    `settles`: the sizes of an overlapped step's payloads are settled before its first gather.
    """
    return _serial(trace) if is_serial else _Overlapped(trace, settles).nodes


def _serial(trace: Trace) -> list[Node]:
    return [
        Node(event.node, event.seconds, (HOST,), (index - 1,) if index else (), _label(trace, event), event.phase)
        for index, event in enumerate(trace.events)
    ]


@dataclass
class _Block:
    phase: str
    gathering: list[Event] = field(default_factory=list)
    rest: list[Event] = field(default_factory=list)
    copied_out: tuple[int, ...] = ()
    """Indexes of the nodes after which its gathered parameters have left their buffer."""
    ready: tuple[int, ...] = ()
    """Indexes of the nodes after which its parameters may be used."""


def _blocks(events: Iterable[Event]) -> list[_Block]:
    blocks: list[_Block] = []
    for event in events:
        gathers = event.node in _GATHERING and event.phase != "optimizer"
        last = blocks[-1] if blocks else None
        if last is None or event.phase != last.phase or (gathers and last.rest and not _goes_on(last, event)):
            last = _Block(event.phase)
            blocks.append(last)
        (last.gathering if gathers else last.rest).append(event)
    return blocks


def _without_prefetch(events: Sequence[Event]) -> list[Event]:
    """Moves each backward gather behind the reduce-scatter of the param group gathered before it, as if FSDP2 did not prefetch.

    FSDP2 calls the next gather before it computes with the last one, on gloo too, where that gains nothing: a recorded step
    has gather 2, compute 3, reduce-scatter 3. The root's param group is gathered first and reduced last: no gather is moved
    behind its reduce-scatter.
    """
    reduced_at = {event.group: index for index, event in enumerate(events) if event.node == "ReduceScatter"}
    reordered: list[Event] = []
    held: list[Event] = []
    gathered_param_group: int | None = None
    awaited_param_group: int | None = None
    for index, event in enumerate(events):
        if event.phase != "backward":
            reordered += held
            held, gathered_param_group = [], None
        elif event.node in _GATHERING and event.group is not None:
            if event.group != gathered_param_group:
                gathered_param_group, awaited_param_group = event.group, gathered_param_group
            if awaited_param_group is not None:
                awaited_index = reduced_at.get(awaited_param_group, -1)
                if index < awaited_index < reduced_at.get(event.group, len(events)):
                    held.append(event)
                    continue
        reordered.append(event)
        if event.node == "ReduceScatter" and held and event.group == awaited_param_group:
            reordered += held
            held = []
    return reordered + held


def _goes_on(block: _Block, event: Event) -> bool:
    """Whether `event` is another stage of the block's own gather. Compute may lie between two stages of a recorded gather."""
    if any(other.node != "Compute" for other in block.rest):
        return False
    if {stage.group for stage in block.gathering} != {event.group}:
        return False
    return event.node in (*DECODERS, "InNode") or not any(stage.node == "Decmp" for stage in block.gathering)


class _Overlapped:
    """Builds the list of nodes in the order in which the host would launch them."""

    def __init__(self, trace: Trace, settles: bool) -> None:
        self.trace = trace
        self.nodes: list[Node] = []
        self.blocks = _blocks(_without_prefetch(trace.events))
        self.computes: list[int] = []
        """Indexes of all compute nodes so far; among them collectives whose result all compute waits for."""
        self.reduces: list[int] = []
        self.settled: tuple[int, ...] = ()
        if settles:
            self._settle()
        num_launched = 0
        for index, block in enumerate(self.blocks):
            if num_launched <= index:
                self._launch_gathers(index)
            block.copied_out = (*block.ready, *self._last_compute())
            num_launched = index + 1
            if num_launched < len(self.blocks) and self.blocks[num_launched].phase == block.phase:
                self._launch_gathers(num_launched)
                num_launched += 1
            self._launch_rest(index)

    def _settle(self) -> None:
        """Adds Hash and Cmp of the forward's gathers before everything else, one after the other: then all sizes are known."""
        for block in self.blocks:
            if block.phase == "forward":
                for event in block.gathering:
                    if event.node in ENCODERS:
                        self.settled = (self._add(event, (SENDER,)),)
                block.gathering = [event for event in block.gathering if event.node not in ENCODERS]

    def _launch_gathers(self, index: int) -> None:
        block = self.blocks[index]
        is_first = index == 0 or self.blocks[index - 1].phase != block.phase
        room = self._room(index, is_first)
        encoded: dict[int | None, int] = {}
        arrived: dict[int | None, int] = {}
        for event in block.gathering:
            waits = [node for node in (encoded.get(event.group),) if node is not None]
            if event.node in ENCODERS:
                # weights of a new step are there from its beginning; repeats have no reason to run before their phase
                waits += room if is_first and index else []
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

    def _room(self, index: int, is_first: bool) -> tuple[int, ...]:
        """Returns the nodes that the gathers of a block wait for, besides those of their stream."""
        if index == 0:
            return ()
        block = self.blocks[index]
        if is_first:
            return self._last_compute()
        distance = 2 if block.phase == "forward" else 1
        return self.blocks[index - distance].copied_out if index >= distance else ()

    def _launch_rest(self, index: int) -> None:
        block = self.blocks[index]
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
            else:  # the all-reduces of the gradients' norm and the loss: everything waits for their results
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
