"""The event engine computes when each node starts and ends: nodes wait for others, and take turns on streams.

A stream is a queue: it runs its nodes one at a time in the order in which they are listed, as CUDA streams do. A node may
hold several streams at once, such as its own and the link. It starts when all that it depends on has ended and all its
streams are free. The result is exact and deterministic. Cost: one pass over nodes and edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_ciera.errors import SimulationError


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of work on one or several streams."""

    kind: str
    """One of `fsdp_ciera.profiling.trace.NODES`."""
    seconds: float
    streams: tuple[str, ...]
    """The first is its lane in pictures."""
    waits_for: tuple[int, ...] = ()
    """Indexes of other nodes in the list."""
    label: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Schedule:
    """Nodes, and when each starts and ends, in seconds after the beginning of the step."""

    nodes: tuple[Node, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The end of the last node, in seconds."""
        return max(self.ends, default=0.0)

    def busy_seconds(self, stream: str) -> float:
        """Returns the seconds for which a stream is busy."""
        return sum(node.seconds for node in self.nodes if stream in node.streams)

    def kind_seconds(self, kind: str) -> float:
        """Returns the sum of the seconds of all nodes of a kind, overlapped or not."""
        return sum(node.seconds for node in self.nodes if node.kind == kind)


def simulate(nodes: Sequence[Node]) -> Schedule:
    """Returns the schedule of `nodes`. Each stream runs its nodes in the order of the list.

    Raises `SimulationError` for a negative time, for a node that waits for one that is not there, and for a circle.
    """
    followers: list[list[int]] = [[] for _ in nodes]
    num_awaited = [0] * len(nodes)
    last_on: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if not node.seconds >= 0:
            raise SimulationError(
                f"node {index} ({node.kind} {node.label}) takes {node.seconds!r} s, allowed: at least 0"
            )
        previous = [last_on[stream] for stream in node.streams if stream in last_on]
        for awaited in (*node.waits_for, *previous):
            if not 0 <= awaited < len(nodes):
                raise SimulationError(f"node {index} waits for node {awaited}, allowed: 0 to {len(nodes) - 1}")
            followers[awaited].append(index)
            num_awaited[index] += 1
        for stream in node.streams:
            last_on[stream] = index
    starts, ends = [0.0] * len(nodes), [0.0] * len(nodes)
    ready = deque(index for index, count in enumerate(num_awaited) if not count)
    num_done = 0
    while ready:
        index = ready.popleft()
        num_done += 1
        end = ends[index] = starts[index] + nodes[index].seconds
        for follower in followers[index]:
            if end > starts[follower]:
                starts[follower] = end
            num_awaited[follower] -= 1
            if not num_awaited[follower]:
                ready.append(follower)
    if num_done < len(nodes):
        raise SimulationError(f"{len(nodes) - num_done} of {len(nodes)} nodes wait for one another in a circle")
    return Schedule(tuple(nodes), tuple(starts), tuple(ends))
