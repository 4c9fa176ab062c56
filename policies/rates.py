"""`Rates`: how much of a category's shards one optimizer step changes. Tables, profiles and plans all use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, log2
from typing import Any

BLOCK_SIZES = (64, 128, 256, 512, 1024)
"""The block sizes that profiles measure (paper Fig. 3b)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Change rates of one category. Shares are of values or blocks, from 0 to 1; bits are per value of the shard. `None` and
    missing keys mean that a rate is not known."""

    exponent_change: float | None = None
    """Share of values whose exponent changes (paper Fig. 2)."""
    block_change: Mapping[int, float] = field(default_factory=dict)
    """By block size: share of blocks in which at least one exponent changes (the paper's q, Figs. 3b and 4)."""
    value_change: float | None = None
    """Share of values in which any bit changes."""
    exponent_entropy_bits: float | None = None
    """Order-0 entropy of the exponents of a shard, in bits per value."""
    value_change_entropy_bits: float | None = None
    """Order-0 entropy of the changes of all values of a shard, unchanged values included, as `kernels.changes` counts them, in
    bits per value."""
    codec_bits: Mapping[str, float] = field(default_factory=dict)
    """By codec: bits per value that the codec really sent in a first gather (one after a change of the weights)."""
    rank_spread: float | None = None
    """Changed values of the rank with most of them, divided by the mean over the ranks that gather together; at least 1. It
    matters because gathers are padded to the largest payload."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_change", dict(sorted(self.block_change.items())))
        object.__setattr__(self, "codec_bits", dict(sorted(self.codec_bits.items())))

    def block_change_at(self, block_size: int) -> tuple[float | None, bool]:
        """The share of changed blocks of `block_size` values, and whether it is extrapolated.

        Between two measured sizes the logarithm of the share of unchanged blocks, 1 - q, is linear in the logarithm of the
        size. Outside the measured sizes, changes of exponents count as independent of one another, as in the paper's section
        2.3: a block stays unchanged with probability (1 - c)**B.
        """
        known = self.block_change
        if not known:
            return None, False
        if block_size in known:
            return known[block_size], False
        below = [size for size in known if size < block_size]
        above = [size for size in known if size > block_size]
        if below and above:
            low, high = below[-1], above[0]
            weight = log2(block_size / low) / log2(high / low)
            unchanged = _unchanged_share(known[low]) ** (1 - weight) * _unchanged_share(known[high]) ** weight
            return 1 - unchanged, False
        nearest = below[-1] if below else above[0]
        return float(1 - _unchanged_share(known[nearest]) ** (block_size / nearest)), True

    def filled_from(self, other: Rates) -> tuple[Rates, list[str]]:
        """These rates, with every rate that they lack taken from `other`; and the names of the rates that were taken."""
        taken: dict[str, Any] = {}
        for item in fields(self):
            own, spare = getattr(self, item.name), getattr(other, item.name)
            if (own is None and spare is not None) or (isinstance(own, Mapping) and not own and spare):
                taken[item.name] = spare
        return replace(self, **taken), list(taken)

    def to_json(self) -> dict[str, Any]:
        """The rates that are known, as plain JSON values."""
        known: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                value = {str(key): rate for key, rate in value.items()}
            if value is not None and value != {}:
                known[item.name] = value
        return known

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rates:
        """The inverse of `to_json`. A range `[low, high]` counts as its middle. Raises `ValueError` for a name that is no rate
        and for a value that is not allowed."""
        allowed = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - allowed)
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no rate; allowed: {', '.join(sorted(allowed))}")
        figures: dict[str, Any] = {}
        for name, value in values.items():
            if name == "block_change":
                figures[name] = {int(size): _figure(name, rate, 1.0) for size, rate in value.items()}
            elif name == "codec_bits":
                figures[name] = {codec: _figure(name, bits, 64.0) for codec, bits in value.items()}
            else:
                upper_limit = 1.0 if name.endswith("_change") else 64.0
                figures[name] = _figure(name, value, upper_limit)
        return cls(**figures)


def middle(figure: float | tuple[float, float] | list[float]) -> float:
    """`figure` itself if it is a number, or its middle if it is a range."""
    return (figure[0] + figure[1]) / 2 if isinstance(figure, (tuple, list)) else figure


def _unchanged_share(change_rate: float) -> float:
    return min(1.0, max(1 - change_rate, 1e-12))


def _figure(name: str, value: Any, upper_limit: float) -> float:
    parts = value if isinstance(value, list) else [value]
    is_number = all(isinstance(part, (int, float)) and not isinstance(part, bool) and isfinite(part) for part in parts)
    if (
        not is_number
        or len(parts) not in (1, 2)
        or not all(0 <= part <= upper_limit for part in parts)
        or parts != sorted(parts)
    ):
        raise ValueError(f"{name}={value!r} must be a number from 0 to {upper_limit:g}, or [low, high]")
    return float(middle(value))
