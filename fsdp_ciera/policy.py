"""`CieraPolicy`: what may be compressed, how, and at which cost in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.policies.categories import CATEGORIES

_BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TOPOLOGIES = ("flat", "hierarchical", "auto")


def parse_byte_size(text: str) -> int:
    """`"8GiB"` -> 8589934592. Raises `CieraPolicyError` with what is allowed."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match.group(2) not in _BYTE_UNITS:
        raise CieraPolicyError(
            f"cache_budget={text!r} is not a byte size: write a number and one of {', '.join(_BYTE_UNITS)}, "
            'for example "8GiB"'
        )
    return int(Fraction(match.group(1)) * _BYTE_UNITS[match.group(2)])


@dataclass(frozen=True, kw_only=True)
class CieraPolicy:
    """How the all-gathers of an FSDP2 module travel. Immutable; every rank must hold the same one.

    The default sends every category with the paper's codec. It costs each GPU `(world_size - 1) / world_size` bytes of
    cache for each parameter of the opted-in categories (`cache_budget` caps it), 16 bytes per 512 values of the own
    shard, and never changes a bit of what the module computes with. On bf16 it sends about half the bytes.

    Raises `CieraPolicyError` (a `ValueError`) for a field that is not allowed, naming what is.
    """

    codecs: tuple[str, ...] = ("exponent_block",)
    """Codecs in order of preference: each parameter gets the first one that knows its gathered dtype and whose cache still
    fits `cache_budget`; parameters that get none, or are not opted in, go raw in the same gather. Allowed:
    `"value_delta"` (0.1 to 2 bits a value of bf16 after an optimizer step, nothing in repeat gathers; caches the own
    shard and all others at 2 bytes a value), `"exponent_delta"` (about 8 bits in every gather; half that cache),
    `"exponent_block"` (the paper, Algorithm 1; 8 bits and the exponents of changed blocks; that half without the own
    shard), `"entropy"` (10.6 bits, no cache) and `"raw"`. The last two cost no cache and so always fit: nothing after them
    is ever chosen, and with `"entropy"` at the end no floating-point parameter goes raw."""

    categories: tuple[str, ...] | None = None
    """Shard categories to compress: any of `expert_ffn`, `attention`, `routing_gate`, `layer_norm`, `embedding` (with
    the LM head) and `other`. The rest of a group goes raw in the same gather. `None`: all of them."""

    cache_budget: str | int | None = None
    """Most bytes of caches on each rank, for all modules under one FSDP root that carry an equal policy: a number of bytes
    or a string such as `"8GiB"`. `codecs[0]` goes to the largest parameters first, until nothing more fits, then
    `codecs[1]` to those left over, with what is left of the budget, and so on. `None`: no limit. What a policy costs a model
    is known beforehand: `fsdp_ciera.estimate_memory`."""

    block_size: int = 512
    """Values per block (the paper's B): a multiple of 8 from 64 to 4096."""

    tables: str | None = None
    """Reserved for change-rate tables; only `None` so far."""

    topology: Literal["flat", "hierarchical", "auto"] = "flat"
    """`"flat"`: every rank exchanges with every other one of the shard group. `"hierarchical"`: compressed between nodes,
    among the ranks of equal number in their nodes, then plain inside each node; caches shrink by the ranks of a node. A
    group that nodes do not cut evenly, or that lies in one node (HSDP), stays flat. `"auto"`: hierarchical where the node
    size is known and cuts the group, otherwise flat."""

    ranks_per_node: int | None = None
    """Global rank r is on node r // ranks_per_node. `None`: the environment's `LOCAL_WORLD_SIZE`, which torchrun sets."""

    verify: Literal["every"] | int | None = None
    """`"every"`: after each gather every rank checks a 64-bit checksum of what it decoded (one pass over the output
    and one small exchange). An int N: every Nth gather is repeated raw and compared bit for bit. `None`: neither."""

    overlap: bool = True
    """Whether stages may run beside the gather on CUDA. Without effect on CPU."""

    adapt_every: int | None = None
    """Reserved for re-planning while training runs; only `None` so far."""

    def __post_init__(self) -> None:
        if not isinstance(self.codecs, (tuple, list)) or not self.codecs:
            raise CieraPolicyError(f"codecs={self.codecs!r} must be a tuple of names out of {tuple(CODECS)}")
        object.__setattr__(self, "codecs", tuple(self.codecs))
        for name in self.codecs:
            _check_choice("codecs", name, tuple(CODECS))
        if self.categories is not None:
            if not isinstance(self.categories, (tuple, list)):
                raise CieraPolicyError(f"categories={self.categories!r} must be a tuple of names out of {CATEGORIES}")
            object.__setattr__(self, "categories", tuple(self.categories))
            for name in self.categories:
                _check_choice("categories", name, CATEGORIES)
        if not _is_int(self.block_size) or not 64 <= self.block_size <= 4096 or self.block_size % 8:
            raise CieraPolicyError(f"block_size={self.block_size!r} must be a multiple of 8 from 64 to 4096")
        if self.verify is not None and self.verify != "every" and not (_is_int(self.verify) and self.verify >= 1):
            raise CieraPolicyError(f'verify={self.verify!r} must be None, "every" or an int of at least 1')
        if not isinstance(self.overlap, bool):
            raise CieraPolicyError(f"overlap={self.overlap!r} must be True or False")
        _check_choice("topology", self.topology, _TOPOLOGIES)
        if self.ranks_per_node is not None:
            if not _is_int(self.ranks_per_node) or self.ranks_per_node < 1:
                raise CieraPolicyError(f"ranks_per_node={self.ranks_per_node!r} must be None or an int of at least 1")
            if self.topology == "flat":
                raise CieraPolicyError(
                    f"ranks_per_node={self.ranks_per_node} means nothing to a flat gather: add "
                    'topology="hierarchical" or "auto"'
                )
        for reserved in ("tables", "adapt_every"):
            if getattr(self, reserved) is not None:
                raise CieraPolicyError(f"{reserved}={getattr(self, reserved)!r} is not supported yet: leave it None")
        if self.cache_budget is not None and not isinstance(self.cache_budget, str) and not _is_int(self.cache_budget):
            raise CieraPolicyError(f'cache_budget={self.cache_budget!r} must be None, a number of bytes or a string '
                                   'such as "8GiB"')  # fmt: skip
        if (self.cache_budget_bytes or 0) < 0:
            raise CieraPolicyError(f"cache_budget={self.cache_budget!r} must not be negative")

    @classmethod
    def paper(cls, **changes: Any) -> CieraPolicy:
        """The published system: `exponent_block` with 512-value blocks and 128-bit hashes. `changes` as in `CieraPolicy`."""
        return cls(**{"codecs": ("exponent_block",), "block_size": 512, **changes})

    @property
    def cache_budget_bytes(self) -> int | None:
        """`cache_budget` in bytes."""
        return parse_byte_size(self.cache_budget) if isinstance(self.cache_budget, str) else self.cache_budget

    def codecs_for(self, category: str) -> tuple[str, ...]:
        """The codecs that shards of `category` may be given, in order of preference; none when it is not opted in."""
        return self.codecs if self.categories is None or category in self.categories else ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, in declaration order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CieraPolicyError(f"{field} has {value!r}, which is not one of {', '.join(map(repr, allowed))}")
