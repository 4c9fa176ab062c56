"""Seconds of collectives: rings over hosts and inside them, by calls, hops and bytes.

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
"""Of NCCL's ring with its "simple" protocol, over a network and over NVLink: constants of its src/graph/tuning.cc."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """How many ranks, and where."""

    world_size: int
    ranks_per_host: int = 1

    @property
    def hosts(self) -> int:
        """Hosts that they fill."""
        return -(-self.world_size // self.ranks_per_host)

    @property
    def local_size(self) -> int:
        """Ranks of a host."""
        return min(self.world_size, self.ranks_per_host)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ranks of one collective."""

    ranks: int
    hosts: int = 1
    """Hosts that they lie on."""
    side_by_side: int = 1
    """Rings at the same time that share a host's link."""

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
    """What the link needs; the inverse of its goodput."""
    copy_seconds_per_byte: float = 0.0
    """What the processor needs to move a byte; the slower of the two counts."""

    @classmethod
    def of_link(cls, link: Link, hop_seconds: float) -> Wire:
        """From a latency and a bus bandwidth."""
        return cls(
            call_seconds=link.latency_seconds, hop_seconds=hop_seconds, seconds_per_byte=1 / link.bytes_per_second
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links between and inside hosts. A wire is found by the kind of node, or else under `"any"`."""

    between: Mapping[str, Wire]
    inside: Mapping[str, Wire]
    burst_bytes: float = 0.0
    """What a throttled link lets through at once after a pause (tbf's bucket); 0 where there is no such thing."""
    label: str = ""
    rate_bytes_per_second: float = field(default=inf)
    """At which the bucket fills."""

    @classmethod
    def of_links(
        cls,
        between: Link,
        inside: Link,
        hop_seconds: float = NCCL_HOP_SECONDS,
        inside_hop_seconds: float = NCCL_IN_NODE_HOP_SECONDS,
    ) -> Network:
        """Of a cluster in numbers, as `ciera plan` takes them."""
        return cls(
            between={"any": Wire.of_link(between, hop_seconds)},
            inside={"any": Wire.of_link(inside, inside_hop_seconds)},
            label=f"{between} between nodes, {inside} inside",
        )

    def seconds(self, kind: str, payload_bytes: float, num_calls: int, ring: Ring, idle_seconds: float = 0.0) -> float:
        """Of one event: `num_calls` collectives over `ring` that carry `payload_bytes` together, after the link was idle for
        `idle_seconds`. 0 for a ring of one rank."""
        if ring.ranks < 2 or (num_calls < 1 and payload_bytes <= 0):
            return 0.0
        inside = self.inside.get(kind) or self.inside["any"]
        between = inside if ring.is_inside else self.between.get(kind) or self.between["any"]
        num_inter, num_intra = hops(kind, ring)
        latency = between.call_seconds + num_inter * between.hop_seconds + num_intra * inside.hop_seconds
        sent = sent_bytes(kind, payload_bytes, ring)
        free = 0.0 if ring.is_inside else min(self.burst_bytes, idle_seconds * self.rate_bytes_per_second)
        by_link = max(0.0, sent - free) * between.seconds_per_byte
        return max(1, num_calls) * latency + max(by_link, sent * between.copy_seconds_per_byte)


def hops(kind: str, ring: Ring) -> tuple[int, int]:
    """Of a piece on its way round: between hosts, and inside them."""
    rounds = 2 if kind == "AllReduce" else 1
    return rounds * (ring.hosts - 1), rounds * (ring.ranks - ring.hosts)


def sent_bytes(kind: str, payload_bytes: float, ring: Ring) -> float:
    """What passes over the slowest link: out of a host, or, in a ring inside one, out of a rank."""
    if ring.ranks < 2:
        return 0.0
    pieces = 2 * (ring.ranks - 1) / ring.ranks if kind == "AllReduce" else ring.ranks - 1
    return pieces * payload_bytes * ring.side_by_side
