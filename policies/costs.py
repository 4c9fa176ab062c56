"""`CodecCost`: the seconds that the stages of a codec take, by the number of values and the share of them that changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any

from fsdp_ciera.policies.rates import Rates


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """`fixed + num_values * (per_value + per_changed * change)` seconds of a run; `change` is a share, see `change_of`."""

    fixed: float = 0.0
    per_value: float = 0.0
    per_changed: float = 0.0
    per_gather: float = 0.0
    """Seconds that a gather takes once, however many runs it has. They belong to a parameter group, not to a shard, so
    `seconds` leaves them out."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
                raise ValueError(f"{item.name}={value!r} must be a number of seconds of at least 0")

    def seconds(self, num_values: float, change: float, num_runs: int = 1) -> float:
        """The seconds that `num_values` values in `num_runs` runs add to a gather."""
        return num_runs * self.fixed + num_values * (self.per_value + self.per_changed * change)


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """The paper's T_hash, T_cmp and T_decmp, of one codec on one kind of machine."""

    hash: StageCost = field(default_factory=StageCost)
    """Cost of finding what changed in the own shard."""
    cmp: StageCost = field(default_factory=StageCost)
    """Cost of compressing the own shard."""
    decmp: StageCost = field(default_factory=StageCost)
    """Cost of decompressing the shard of one other rank."""

    def gather_seconds(self, num_values: int, num_peers: int, change: float, overlap: bool) -> float:
        """The seconds that a run of `num_values` values adds to T_hash + T_cmp + T_decmp of a gather. With `overlap` T_hash and
        T_cmp are 0."""
        encode = 0.0 if overlap else self.hash.seconds(num_values, change) + self.cmp.seconds(num_values, change)
        return encode + self.decmp.seconds(num_peers * num_values, change, num_peers)

    def per_gather_seconds(self, overlap: bool) -> float:
        """The seconds that a gather takes once, however many runs it has. With `overlap` T_hash and T_cmp are 0."""
        return self.decmp.per_gather + (0.0 if overlap else self.hash.per_gather + self.cmp.per_gather)

    def scaled(self, factor: float) -> CodecCost:
        """This cost with all seconds multiplied by `factor`."""
        return CodecCost(
            **{
                stage: StageCost(**{part: factor * seconds for part, seconds in cost.items()})
                for stage, cost in asdict(self).items()
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Mapping[str, float]]) -> CodecCost:
        """The inverse of `to_json`. Raises `ValueError` or `TypeError` for values that `to_json` does not write."""
        return cls(**{stage: StageCost(**cost) for stage, cost in values.items()})


def change_of(codec: str, rates: Rates, block_size: int) -> float:
    """The share of changed values, exponents or blocks that the costs of `codec` depend on; 1 if the rates do not know it."""
    if codec == "value_delta":
        return 1.0 if rates.value_change is None else rates.value_change
    if codec == "exponent_delta":
        return 1.0 if rates.exponent_change is None else rates.exponent_change
    if codec == "exponent_block":
        share, _ = rates.block_change_at(block_size)
        return 1.0 if share is None else share
    return 0.0


FREE = CodecCost()
"""The cost of a codec that takes no time, for plans by bytes alone."""
