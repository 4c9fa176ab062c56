"""Who trains the job: every contender of the stand, by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from fsdp_ciera.policy import CieraPolicy


class Kind(StrEnum):
    """Origin of a contender."""

    STOCK = "stock"
    PEER = "peer"
    OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train the job."""

    key: str
    label: str
    """For tables and pictures; ASCII, at most 32 characters."""
    kind: Kind
    reshard_after_forward: bool | str = True
    """FSDP2's option, for all modules, the root included; "int" stands for `reshard_size`."""
    is_lossless: bool = True
    """Whether gathers give the exact parameters."""
    is_bitwise: bool = True
    """Whether losses and parameters must have the bits of stock FSDP2: lossless, with FSDP2's own order of additions."""
    policy: Mapping[str, Any] | None = None
    """For ours: fields of `CieraPolicy`, or of `CieraPolicy.paper` with `is_paper`; `None` for all others."""
    is_paper: bool = False
    settle: bool = False
    """For ours: whether ranks agree on sizes after each optimizer step instead of in each gather (the paper's CCP, on CPU)."""
    is_hierarchical: bool = False
    gather: str | None = None
    """For peers under FSDP2: which all-gather of `bench.peers` they use."""
    is_zero3: bool = False

    def make_policy(self, learning_rate: float, ranks_per_host: int) -> CieraPolicy | None:
        """Makes the policy if the contender is ours; returns `None` for all others."""
        if self.policy is None:
            return None
        fields = dict(self.policy) | {"learning_rate": learning_rate}
        if self.is_hierarchical:
            fields |= {"topology": "hierarchical", "ranks_per_node": ranks_per_host}
        return CieraPolicy.paper(**fields) if self.is_paper else CieraPolicy(**fields)

    @property
    def may_choose_nothing(self) -> bool:
        """Whether its policy may choose plain gathers where no codec pays, and so should never be slower than stock FSDP2."""
        policy = self.make_policy(1e-5, 2)
        return policy is not None and policy.may_go_plain

    def lacks(self, hosts: int, ranks_per_host: int) -> str | None:
        """Returns why the contender cannot run on such a cluster; `None` if it can."""
        if self.is_hierarchical and (ranks_per_host < 2 or hosts < 2):
            return "hierarchical gathers need several hosts with several ranks each (--ranks-per-host 2)"
        if self.reshard_after_forward == "int" and reshard_size(hosts, ranks_per_host) is None:
            return "no number of ranks between 1 and all divides them"
        return None


def reshard_size(hosts: int, ranks_per_host: int) -> int | None:
    """Returns the integer for `reshard_after_forward`: the ranks of a host, or half of all ranks if there is one host or one
    rank on each; `None` if no such integer exists."""
    world_size = hosts * ranks_per_host
    if ranks_per_host > 1 and hosts > 1:
        return ranks_per_host
    return world_size // 2 if world_size % 2 == 0 and world_size > 2 else None


FSDP2, KEEP = "fsdp2", "fsdp2-keep"
"""References of all ratios: stock FSDP2, and stock FSDP2 that keeps parameters gathered from forward to backward."""


def _ours(key: str, label: str, **fields: Any) -> Contender:
    return Contender(key=key, label=label, kind=Kind.OURS, **fields)


def _codec(codec: str) -> Contender:
    return _ours(codec, codec, policy={"codecs": (codec,)})


_ALL: tuple[Contender, ...] = (
    Contender(key=FSDP2, label="FSDP2", kind=Kind.STOCK),
    Contender(key=KEEP, label="FSDP2, kept after forward", kind=Kind.STOCK, reshard_after_forward=False),
    Contender(key="fsdp2-int", label="FSDP2, reshard to half", kind=Kind.STOCK, reshard_after_forward="int"),
    Contender(key="zero3", label="DeepSpeed ZeRO-3", kind=Kind.PEER, is_bitwise=False, is_zero3=True),
    Contender(key="int8", label="int8 gather as ZeRO++ (LOSSY)", kind=Kind.PEER, gather="int8", is_lossless=False,
              is_bitwise=False),
    Contender(key="zstd", label="zstd per gather", kind=Kind.PEER, gather="zstd"),
    Contender(key="zipnn", label="ZipNN per gather", kind=Kind.PEER, gather="zipnn"),
    _codec("entropy"),
    _codec("exponent_block"),
    _codec("exponent_delta"),
    _codec("value_delta"),
    _ours("paper", "CieraPolicy.paper()", policy={}, is_paper=True),
    _ours("paper-settled", "paper(), sizes settled", policy={}, is_paper=True, settle=True),
    _ours("delta-settled", "+ exponent_delta, settled",
          policy={"codecs": ("exponent_delta", "exponent_block", "entropy")}, settle=True),
    _ours("default-settled", "default policy, sizes settled", policy={}, settle=True),
    _ours("default", "default policy", policy={}),
    _ours("hierarchical", "default, hierarchical", policy={}, is_hierarchical=True),
)  # fmt: skip

CONTENDERS: Mapping[str, Contender] = MappingProxyType({contender.key: contender for contender in _ALL})
"""All contenders by key, in the order in which they run."""

ABLATION: tuple[tuple[str, str], ...] = (
    ("+ER", "exponent_block"),
    ("+BSC", "paper"),
    ("+CCP", "paper-settled"),
    ("+exponent_delta", "delta-settled"),
    ("+value_delta", "default-settled"),
    ("+hierarchical", "hierarchical"),
)
"""Rows of the paper's Table 3, and what goes past it: (added part, contender key). ER: every gather by `exponent_block`; BSC:
only where it pays; CCP: Hash and Cmp ahead of the gather. Each row has the parts of all rows above it, except that hierarchical
gathers go without sizes settled ahead."""


def chosen(keys: Sequence[str] | None) -> list[Contender]:
    """Returns the contenders with these keys, or all for `None`, in the order in which they run.

    Raises `ValueError` for an unknown key.
    """
    unknown = [key for key in keys or () if key not in CONTENDERS]
    if unknown:
        raise ValueError(f"contender {unknown[0]!r} is none of {', '.join(CONTENDERS)}")
    return [contender for contender in _ALL if keys is None or contender.key in keys]
