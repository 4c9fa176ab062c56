"""Seconds of collectives, as rings over hosts and inside them, from calls, hops and bytes.

    seconds = calls * (call + hops between hosts * hop + hops inside * hop inside) + bytes over the slowest link / its speed

Rings: an all-gather or reduce-scatter over W ranks passes W - 1 pieces over every link in W - 1 steps, an all-reduce 2 (W - 1)
pieces of 1 / W. A ring over N hosts crosses between hosts with one rank of each, so what leaves a host does not depend on its
number of ranks; a piece travels N - 1 hops between hosts and W - N inside, as in NCCL's own model (its src/graph/tuning.cc).
Gathers that the ranks of a host make side by side (hierarchical) share its link.

    flat           (W - 1) S      leaves a host, one ring
    hierarchical   (N - 1) S G    leaves a host, G rings side by side, then (G - 1) N S inside it       (S: a rank's payload)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from fsdp_ciera.policies.links import Link

NCCL_HOP_SECONDS, NCCL_IN_NODE_HOP_SECONDS = 9.6e-6, 3.4e-6
"""Latency of a hop in NCCL's ring with its "simple" protocol, over a network and over NVLink (NCCL's src/graph/tuning.cc)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """How many ranks there are, and how they lie on hosts."""

    world_size: int
    ranks_per_host: int = 1

    @property
    def hosts(self) -> int:
        """The number of hosts that the ranks fill."""
        return -(-self.world_size // self.ranks_per_host)

    @property
    def local_size(self) -> int:
        """The number of ranks of a host."""
        return min(self.world_size, self.ranks_per_host)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ranks of one collective, as a ring."""

    ranks: int
    hosts: int = 1
    """The number of hosts that the ranks lie on."""
    side_by_side: int = 1
    """The number of rings that share a host's link at the same time."""

    @property
    def is_inside(self) -> bool:
        """Whether nothing leaves the host."""
        return self.hosts == 1


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The constants of one kind of collective over one kind of link."""

    call_seconds: float = 0.0
    hop_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    """Seconds that the link needs for a byte; the inverse of its goodput."""
    copy_seconds_per_byte: float = 0.0
    """Seconds that the processor needs to move a byte; the slower of link and processor counts."""

    @classmethod
    def of_link(cls, link: Link, hop_seconds: float) -> Wire:
        """Returns the wire with the latency and the bus bandwidth of `link`."""
        return cls(
            call_seconds=link.latency_seconds, hop_seconds=hop_seconds, seconds_per_byte=1 / link.bytes_per_second
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between hosts and inside them: wires by the kind of node; the wire `"any"` is for all other kinds."""

    between: Mapping[str, Wire]
    inside: Mapping[str, Wire]
    burst_bytes: float = 0.0
    """Bytes that a throttled link lets through at once after a pause (tbf's bucket); 0 where nothing is throttled."""
    label: str = ""
    rate_bytes_per_second: float = field(default=inf)
    """The rate at which the bucket fills."""

    @classmethod
    def of_links(
        cls,
        between: Link,
        inside: Link,
        hop_seconds: float = NCCL_HOP_SECONDS,
        inside_hop_seconds: float = NCCL_IN_NODE_HOP_SECONDS,
    ) -> Network:
        """Returns the network of a cluster whose links are given in numbers, as `ciera plan` takes them."""
        return cls(
            between={"any": Wire.of_link(between, hop_seconds)},
            inside={"any": Wire.of_link(inside, inside_hop_seconds)},
            label=f"{between} between nodes, {inside} inside",
        )

    def seconds(self, kind: str, payload_bytes: float, num_calls: int, ring: Ring, idle_seconds: float = 0.0) -> float:
        """Returns the seconds of one event: `num_calls` collectives over `ring`, which carry `payload_bytes` together, after
        the link was idle for `idle_seconds`. A ring of one rank takes 0."""
        if ring.ranks < 2 or (num_calls < 1 and payload_bytes <= 0):
            return 0.0
        inside = self.inside.get(kind) or self.inside["any"]
        between = inside if ring.is_inside else self.between.get(kind) or self.between["any"]
        hops_between, hops_inside = hops(kind, ring)
        latency_seconds = between.call_seconds + hops_between * between.hop_seconds + hops_inside * inside.hop_seconds
        link_bytes = sent_bytes(kind, payload_bytes, ring)
        free_bytes = 0.0 if ring.is_inside else min(self.burst_bytes, idle_seconds * self.rate_bytes_per_second)
        link_seconds = max(0.0, link_bytes - free_bytes) * between.seconds_per_byte
        copy_seconds = link_bytes * between.copy_seconds_per_byte
        return max(1, num_calls) * latency_seconds + max(link_seconds, copy_seconds)


def hops(kind: str, ring: Ring) -> tuple[int, int]:
    """Returns the hops of a piece on its way round the ring: between hosts, and inside hosts."""
    rounds = 2 if kind == "AllReduce" else 1
    return rounds * (ring.hosts - 1), rounds * (ring.ranks - ring.hosts)


def sent_bytes(kind: str, payload_bytes: float, ring: Ring) -> float:
    """Returns the bytes that pass over the slowest link: out of a host or, in a ring inside a host, out of a rank."""
    if ring.ranks < 2:
        return 0.0
    pieces = 2 * (ring.ranks - 1) / ring.ranks if kind == "AllReduce" else ring.ranks - 1
    return pieces * payload_bytes * ring.side_by_side
