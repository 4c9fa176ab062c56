"""The gain: seconds that compressing a shard saves. The paper's formula under its own names, and its sum over a step.

g_i = Comm(S) - (Comm(S_sm + S_bm + q S_e) + T_hash + T_cmp + T_decmp)        paper 3.2
M_i = (W - 1) S_e
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_ciera.policies.costs import CodecCost
from fsdp_ciera.policies.links import Link


@dataclass(frozen=True)
class ShardBytes:
    """The sizes of a shard in the paper's names: N values of b bits, b_e of them exponent, in blocks of B values."""

    N: int
    b: int
    b_e: int
    B: int

    @property
    def S(self) -> float:
        """Bytes of the shard."""
        return self.N * self.b / 8

    @property
    def S_e(self) -> float:
        """Bytes of the exponents."""
        return self.N * self.b_e / 8

    @property
    def S_sm(self) -> float:
        """Bytes of the signs and mantissas."""
        return self.S - self.S_e

    @property
    def S_b(self) -> int:
        """Number of blocks."""
        return -(-self.N // self.B)

    @property
    def S_bm(self) -> int:
        """Bytes of the bitmap, which has one bit for each block."""
        return -(-self.S_b // 8)

    def payload(self, q: float) -> float:
        """Expected bytes of the payload of an iteration; q is the share of changed blocks."""
        return self.S_sm + self.S_bm + q * self.S_e


def paper_gain(
    comm: Callable[[float], float],
    shard: ShardBytes,
    q: float,
    *,
    T_hash: float = 0.0,
    T_cmp: float = 0.0,
    T_decmp: float = 0.0,
) -> float:
    """g_i in seconds an iteration. `comm` maps bytes to seconds; T_hash and T_cmp are 0 when they overlap (paper 3.3)."""
    return comm(shard.S) - (comm(shard.payload(q)) + T_hash + T_cmp + T_decmp)


def paper_memory(shard: ShardBytes, W: int) -> float:
    """M_i: bytes of ExpCache on each GPU at world size W."""
    return (W - 1) * shard.S_e


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """The gathers of one shard over one process group in one optimizer step: one after the weights changed, then repeats."""

    num_values: int
    raw_bytes: float
    world_size: int
    """Ranks that exchange payloads; nodes in a hierarchical gather."""
    num_gathers: int
    link: Link
    overlap: bool

    def gain(self, cost: CodecCost, first_bytes: float, repeat_bytes: float, change: float) -> float:
        """Seconds that a codec saves in a step over raw gathers: the paper's g_i with the codec's payload, summed over the
        gathers.

        `change` is the share that `policies.costs.change_of` returns for the first gather; in repeats nothing changed.
        Latencies are left out: a shard travels together with its parameter group, whatever its codec.
        """
        peers = self.world_size - 1
        if peers < 1 or self.num_gathers < 1:
            return 0.0
        gathers = [(first_bytes, change)] + [(repeat_bytes, 0.0)] * (self.num_gathers - 1)
        return sum(
            peers * (self.raw_bytes - sent_bytes) / self.link.bytes_per_second
            - cost.gather_seconds(self.num_values, peers, share, self.overlap)
            for sent_bytes, share in gathers
        )
