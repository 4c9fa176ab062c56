"""`Rates`: what one optimizer step changes in the shards of a category. The words of tables, profiles and plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, log2
from typing import Any

BLOCK_SIZES = (64, 128, 256, 512, 1024)
"""The block sizes that profiles measure (paper Fig. 3b)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares are of values or blocks, from 0 to 1; bits are per value of the shard. `None`, or a key left out: not known."""

    exponent_change: float | None = None
    """Share of values whose exponent changes (paper Fig. 2)."""
    block_change: Mapping[int, float] = field(default_factory=dict)
    """By block size: the share of blocks in which at least one exponent changes (paper Figs. 3b and 4; its q)."""
    value_change: float | None = None
    """Share of values of which any bit changes."""
    exponent_entropy_bits: float | None = None
    """Order-0 entropy of the exponents of a shard."""
    value_change_entropy_bits: float | None = None
    """Order-0 entropy of the changes of all values of a shard, unchanged ones among them, as `kernels.changes` counts them."""
    codec_bits: Mapping[str, float] = field(default_factory=dict)
    """By codec: bits per value that it really sent in a first gather (one after a change of the weights)."""
    rank_spread: float | None = None
    """What the largest rank's changed values are of the mean rank's, in the groups that are gathered together, at least 1:
    gathers are padded to the largest payload."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_change", dict(sorted(self.block_change.items())))
        object.__setattr__(self, "codec_bits", dict(sorted(self.codec_bits.items())))

    def block_change_at(self, block_size: int) -> tuple[float | None, bool]:
        """The share of changed blocks of `block_size` values, and whether that is more than was measured.

        Between two measured sizes -log(1 - q) is linear in the logarithm of the size. Outside, changes of exponents count as
        independent of one another, as in the paper's section 2.3: a block stays with probability (1 - c)**B.
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
            part = log2(block_size / low) / log2(high / low)
            stays = _stays(known[low]) ** (1 - part) * _stays(known[high]) ** part
            return 1 - stays, False
        nearest = below[-1] if below else above[0]
        return float(1 - _stays(known[nearest]) ** (block_size / nearest)), True

    def filled_from(self, other: Rates) -> tuple[Rates, list[str]]:
        """These rates with what they lack taken from `other`, and the names of the figures that were taken."""
        taken: dict[str, Any] = {}
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if (mine is None and theirs is not None) or (isinstance(mine, Mapping) and not mine and theirs):
                taken[item.name] = theirs
        return replace(self, **taken), list(taken)

    def to_json(self) -> dict[str, Any]:
        """The figures that are known, as plain JSON values."""
        found: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                value = {str(key): number for key, number in value.items()}
            if value is not None and value != {}:
                found[item.name] = value
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rates:
        """The inverse. A range `[low, high]` counts as its middle. Raises `ValueError` for what is no figure of this kind."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no rate; allowed: {', '.join(sorted(known))}")
        made: dict[str, Any] = {}
        for name, value in values.items():
            if name == "block_change":
                made[name] = {int(size): _figure(name, rate, 1.0) for size, rate in value.items()}
            elif name == "codec_bits":
                made[name] = {codec: _figure(name, bits, 64.0) for codec, bits in value.items()}
            else:
                most = 1.0 if name.endswith("_change") else 64.0
                made[name] = _figure(name, value, most)
        return cls(**made)


def middle(figure: float | tuple[float, float] | list[float]) -> float:
    """The number itself, or the middle of a range."""
    return (figure[0] + figure[1]) / 2 if isinstance(figure, (tuple, list)) else figure


def _stays(change_rate: float) -> float:
    return min(1.0, max(1 - change_rate, 1e-12))


def _figure(name: str, value: Any, most: float) -> float:
    parts = value if isinstance(value, list) else [value]
    is_number = all(isinstance(part, (int, float)) and not isinstance(part, bool) and isfinite(part) for part in parts)
    if (
        not is_number
        or len(parts) not in (1, 2)
        or not all(0 <= part <= most for part in parts)
        or parts != sorted(parts)
    ):
        raise ValueError(f"{name}={value!r} must be a number from 0 to {most:g}, or [low, high]")
    return float(middle(value))
