"""Options of a run of the stand. Needs no torch: the command line is made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes

from fsdp_ciera.arguments import Count, CountOrZero, NotNegative, Positive, named


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How the job is trained."""

    learning_rate: Annotated[NotNegative, named("lr")] = 1e-5
    """learning rate"""
    tokens_per_rank: Annotated[Count, named("tokens")] = 8
    """tokens a rank and step: few, so that links bound it; compute hardly depends on it, since it reads all weights anyway"""
    reduce_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of gradients on the links"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Hosts, links and turns."""

    hosts: Count = 4
    """hosts"""
    ranks_per_host: Count = 1
    """gloo ranks of each host"""
    rate: str | None = None
    """what each host may send, as tc writes it, or none; 200mbit when left out, and none on the loopback"""
    loopback: bool = False
    """plain processes instead of hosts, no root and no --rate"""
    rounds: Count = 2
    """turns of each contender"""
    warmup_steps: CountOrZero = 2
    """iterations of a turn before the timed ones"""
    timed_steps: Annotated[Count, named("steps")] = 3
    """timed iterations of a turn"""
    turn_seconds: Positive = 900.0
    """longest that a turn may take"""
    reduce_scatter: Literal["ring", "gloo"] = "ring"
    """gloo's own is an all-reduce and sends twice the bytes"""
    job: Annotated[JobOptions, OmitArgPrefixes] = field(default_factory=JobOptions)
    """how the job is trained"""

    @property
    def limit(self) -> str | None:
        """Link rate: what each host may send, as `tc` writes it; `None`: no limit."""
        rate = self.rate or ("none" if self.loopback else "200mbit")
        return None if rate == "none" else rate
