"""The event engine: nodes wait for others and take turns on streams; when does each start and end?

A stream is a queue: it runs its nodes one at a time in the order in which they are listed, as CUDA streams do. A node may
hold several streams at once, such as its own and the link. It starts when all that it depends on has ended and all its
streams are free. Exact and deterministic; one pass over nodes and edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_ciera.errors import SimulationError


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of work."""

    kind: str
    """One of `fsdp_ciera.profiling.trace.NODES`."""
    seconds: float
    streams: tuple[str, ...]
    """The first is its lane in pictures."""
    waits_for: tuple[int, ...] = ()
    """Places of other nodes in the list."""
    label: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Schedule:
    """Nodes, and when each runs, in seconds after the beginning of the step."""

    nodes: tuple[Node, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """When the last node ends."""
        return max(self.ends, default=0.0)

    def busy_seconds(self, stream: str) -> float:
        """The load of a stream."""
        return sum(node.seconds for node in self.nodes if stream in node.streams)

    def kind_seconds(self, kind: str) -> float:
        """What all nodes of a kind take, overlapped or not."""
        return sum(node.seconds for node in self.nodes if node.kind == kind)


def simulate(nodes: Sequence[Node]) -> Schedule:
    """The schedule of `nodes`; streams run theirs in the order of the list.

    Raises `SimulationError` for a negative time, a node that waits for one that is not there, or a circle.
    """
    followers: list[list[int]] = [[] for _ in nodes]
    num_awaited = [0] * len(nodes)
    last_on: dict[str, int] = {}
    for place, node in enumerate(nodes):
        if not node.seconds >= 0:
            raise SimulationError(
                f"node {place} ({node.kind} {node.label}) takes {node.seconds!r} s, allowed: at least 0"
            )
        before = [last_on[stream] for stream in node.streams if stream in last_on]
        for awaited in (*node.waits_for, *before):
            if not 0 <= awaited < len(nodes):
                raise SimulationError(f"node {place} waits for node {awaited}, allowed: 0 to {len(nodes) - 1}")
            followers[awaited].append(place)
            num_awaited[place] += 1
        for stream in node.streams:
            last_on[stream] = place
    starts, ends = [0.0] * len(nodes), [0.0] * len(nodes)
    ready = deque(place for place, number in enumerate(num_awaited) if not number)
    num_done = 0
    while ready:
        place = ready.popleft()
        num_done += 1
        end = ends[place] = starts[place] + nodes[place].seconds
        for follower in followers[place]:
            if end > starts[follower]:
                starts[follower] = end
            num_awaited[follower] -= 1
            if not num_awaited[follower]:
                ready.append(follower)
    if num_done < len(nodes):
        raise SimulationError(f"{len(nodes) - num_done} of {len(nodes)} nodes wait for one another in a circle")
    return Schedule(tuple(nodes), tuple(starts), tuple(ends))
