"""`CieraPolicy`: what may be compressed, how, and at which cost in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import CieraPolicyError, UnitError
from fsdp_ciera.policies.categories import CATEGORIES
from fsdp_ciera.policies.costs import CodecCost
from fsdp_ciera.policies.links import Link, parse_link
from fsdp_ciera.policies.tables import shipped_tables
from fsdp_ciera.units import parse_bytes

_TOPOLOGIES = ("flat", "hierarchical", "auto")
_SELECTIONS = ("knapsack", "greedy")
AUTO_SHARE = 0.25
"""The share of the free memory that `cache_budget="auto"` takes."""


@dataclass(frozen=True, kw_only=True)
class CieraPolicy:
    """How the all-gathers of an FSDP2 module travel. Immutable; every rank must hold the same one.

    The default policy measures the links and this machine's codecs at the first gather. It then gives each shard the codec
    that saves most seconds in an optimizer step, within a quarter of the memory that is free at that time. If no codec saves
    any, gathers run as in stock FSDP2. No policy changes a bit of what the module computes with.

    Raises `CieraPolicyError` (a `ValueError`) for a field value that is not allowed; its text says what is allowed.
    """

    codecs: tuple[str, ...] = ("value_delta", "exponent_delta", "exponent_block", "entropy")
    """Codecs that the policy may choose from. With several, each shard gets the codec that gains most, and goes raw if none
    gains. A single codec is used for every opted-in shard that fits the budget, even without a gain, and nothing is measured.
    Allowed: `"value_delta"` (0.1 to 2 bits a value of bf16 after an optimizer step, nothing in repeat gathers; caches the own
    shard and all others at 2 bytes a value), `"exponent_delta"` (about 8 bits in every gather; half of that cache),
    `"exponent_block"` (the paper's Algorithm 1; 8 bits, and the exponents of changed blocks; half of that cache, without the
    own shard), `"entropy"` (10.6 bits, no cache) and `"raw"`, which is always available: name it beside a single codec to
    have that codec weighed against raw."""

    categories: tuple[str, ...] | None = None
    """Shard categories to compress: any of `expert_ffn`, `attention`, `routing_gate`, `layer_norm`, `embedding` (with
    the LM head) and `other`. Shards of other categories go raw in the same gather. `None`: all of them."""

    cache_budget: str | int | float | None = "auto"
    """Most bytes of caches on each rank, for all modules under one FSDP root that carry an equal policy: a number of bytes, a
    string such as `"8GiB"`, a share of the memory that is free at the first gather on the rank with the least free memory (a
    float above 0 and up to 1), or `"auto"`, a quarter of it. `None`: no limit. `fsdp_ciera.estimate_memory` says beforehand
    what a policy costs a model."""

    block_size: int = 512
    """Values per block (the paper's B): a multiple of 8 from 64 to 4096."""

    tables: str | None = None
    """Change rates to plan with: the name of a shipped table (`fsdp_ciera.policies.tables.shipped_tables()`) or the path of
    one that `ciera profile` wrote, which only rank 0 reads. `None`: the shipped one that was measured with every codec."""

    learning_rate: float | None = None
    """Learning rate at which change rates are looked up. `None`: 1e-4 is assumed."""

    micro_batches: int = 1
    """Number of forward and backward passes in an optimizer step. All gathers but the first after a change of the weights are
    repeats."""

    link: Link | str | None = None
    """The link that payloads take: a `Link`, or a text such as `"8GB/s"` or `"25MB/s 2ms"`. `None`: measured."""

    codec_costs: Mapping[str, CodecCost] | None = field(default=None, hash=False)
    """Seconds that codecs take, by codec name. `None`: measured on every rank. The costs of the slowest rank count, doubled
    (a codec costs more in a step than by itself); with `selection="greedy"` measured costs are not doubled."""

    selection: Literal["knapsack", "greedy"] = "knapsack"
    """`"knapsack"`: the largest total gain within the budget. `"greedy"`: the paper's selection, by gain per byte of cache."""

    topology: Literal["flat", "hierarchical", "auto"] = "flat"
    """`"flat"`: every rank exchanges payloads with every other rank of the process group. `"hierarchical"`: ranks with the same
    number in their nodes exchange payloads between nodes, then each node gathers plainly inside; caches shrink by the number
    of ranks of a node. A process group that nodes do not cut evenly, or that lies in one node (HSDP), stays flat. `"auto"`:
    hierarchical where the node size is known and cuts the process group, otherwise flat."""

    ranks_per_node: int | None = None
    """Global rank r is on node r // ranks_per_node. `None`: the environment's `LOCAL_WORLD_SIZE`, which torchrun sets."""

    verify: Literal["every"] | int | None = None
    """`"every"`: after each gather every rank checks a 64-bit checksum of what it decoded (one pass over the output
    and one small exchange). An int N: every Nth gather is repeated raw and compared bit for bit. `None`: neither."""

    adapt_every: int | None = None
    """Number of optimizer steps between renewals of the plan, from rates that this run measures with every codec on every
    shard. A renewal costs one copy of the own shards for a step and the time to encode them, and raw parameter groups take
    part in agreements too. `None`: the first plan stays."""

    warmup_steps: int = 30
    """Optimizer steps before the first measurement for `adapt_every` (the paper's 30 iterations)."""

    def __post_init__(self) -> None:
        if not isinstance(self.codecs, (tuple, list)) or not self.codecs:
            raise CieraPolicyError(f"codecs={self.codecs!r} must be a tuple of names out of {tuple(CODECS)}")
        object.__setattr__(self, "codecs", tuple(self.codecs))
        for name in self.codecs:
            _check_choice("codecs", name, tuple(CODECS))
            if self.codecs.count(name) > 1:
                raise CieraPolicyError(f"codecs={self.codecs!r} has {name!r} more than once")
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
        _check_choice("topology", self.topology, _TOPOLOGIES)
        if self.ranks_per_node is not None:
            if not _is_int(self.ranks_per_node) or self.ranks_per_node < 1:
                raise CieraPolicyError(f"ranks_per_node={self.ranks_per_node!r} must be None or an int of at least 1")
            if self.topology == "flat":
                raise CieraPolicyError(
                    f"ranks_per_node={self.ranks_per_node} means nothing to a flat gather: add "
                    'topology="hierarchical" or "auto"'
                )
        _check_choice("selection", self.selection, _SELECTIONS)
        for name, least in (("micro_batches", 1), ("adapt_every", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if not (name == "adapt_every" and value is None) and (not _is_int(value) or value < least):
                raise CieraPolicyError(f"{name}={value!r} must be an int of at least {least}")
        if self.adapt_every is not None and len(self.codecs) == 1:
            raise CieraPolicyError(
                f"adapt_every={self.adapt_every} with codecs={self.codecs!r} leaves nothing to choose: name several codecs"
            )
        if self.learning_rate is not None and not (_is_number(self.learning_rate) and self.learning_rate > 0):
            raise CieraPolicyError(f"learning_rate={self.learning_rate!r} must be None or a number above 0")
        self._check_tables()
        self._check_figures()
        self._check_budget()

    def _check_tables(self) -> None:
        if self.tables is None or self.tables in shipped_tables():
            return
        if not isinstance(self.tables, str) or Path(self.tables).suffix != ".json":
            raise CieraPolicyError(
                f"tables={self.tables!r} must be one of {', '.join(shipped_tables())}, or the path of a .json file that "
                "`ciera profile` wrote"
            )

    def _check_figures(self) -> None:
        """Checks `link` and `codec_costs`; a link that is given as text becomes a `Link`."""
        if isinstance(self.link, str):
            try:
                object.__setattr__(self, "link", parse_link(self.link))
            except ValueError as error:
                raise CieraPolicyError(f"link={error}") from None
        if self.link is not None and not isinstance(self.link, Link):
            raise CieraPolicyError(f'link={self.link!r} must be a Link, a text such as "8GB/s" or None')
        if self.codec_costs is None:
            return
        costs = self.codec_costs
        if not isinstance(costs, Mapping) or not all(isinstance(cost, CodecCost) for cost in costs.values()):
            raise CieraPolicyError(f"codec_costs={costs!r} must map names of codecs to CodecCost")
        missing = [name for name in self.codecs if name != "raw" and name not in costs]
        if missing:
            raise CieraPolicyError(
                f"codec_costs says nothing of {missing[0]!r}, which is one of codecs={self.codecs!r}"
            )
        object.__setattr__(self, "codec_costs", dict(costs))

    def _check_budget(self) -> None:
        budget = self.cache_budget
        if isinstance(budget, float):
            if not 0 < budget <= 1:
                raise CieraPolicyError(
                    f"cache_budget={budget!r} as a float is a share of free memory, above 0 and up to 1: write bytes as an int"
                )
        elif budget is not None and not isinstance(budget, str) and not _is_int(budget):
            raise CieraPolicyError(f'cache_budget={budget!r} must be None, a number of bytes, a string such as "8GiB", a '
                                   'share of free memory or "auto"')  # fmt: skip
        elif (self.cache_budget_bytes(0) or 0) < 0:
            raise CieraPolicyError(f"cache_budget={budget!r} must not be negative")

    @classmethod
    def paper(cls, **changes: Any) -> CieraPolicy:
        """The published system: `exponent_block` with 512-value blocks, where the paper's gain is positive, chosen greedily by
        gain per byte of cache. `changes` as in `CieraPolicy`."""
        return cls(**{"codecs": ("exponent_block", "raw"), "block_size": 512, "selection": "greedy", **changes})

    @classmethod
    def from_table(cls, table: str, **changes: Any) -> CieraPolicy:
        """A policy that plans with the rates of `table`: the name of a shipped table, or the path of a table. `changes` as
        in `CieraPolicy`."""
        return cls(**{"tables": table, **changes})

    @property
    def is_share_of_memory(self) -> bool:
        """Whether `cache_budget` depends on how much memory is free."""
        return self.cache_budget == "auto" or isinstance(self.cache_budget, float)

    @property
    def may_go_plain(self) -> bool:
        """Whether parameter groups without a codec are gathered as in stock FSDP2, without agreements. Not with `adapt_every`,
        which counts steps at agreements, not with `verify`, which checks these gathers too, and not with a single codec, which
        is studied with its whole overhead."""
        return len(self.codecs) > 1 and self.adapt_every is None and self.verify is None

    @property
    def measures(self) -> bool:
        """Whether links or codecs must be measured for a plan."""
        return len(self.codecs) > 1 and (self.link is None or self.codec_costs is None)

    def cache_budget_bytes(self, free_bytes: int) -> int | None:
        """`cache_budget` in bytes if `free_bytes` of memory are free; `None` if there is no limit."""
        budget = self.cache_budget
        if budget == "auto":
            budget = AUTO_SHARE
        if isinstance(budget, float):
            return int(Fraction(budget) * free_bytes)
        if not isinstance(budget, str):
            return budget
        try:
            return parse_bytes(budget)
        except UnitError as error:
            raise CieraPolicyError(f"cache_budget={error}") from None

    def codecs_for(self, category: str) -> tuple[str, ...]:
        """The codecs that shards of `category` may get; none if the category is not opted in."""
        return self.codecs if self.categories is None or category in self.categories else ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, in declaration order."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if isinstance(self.link, Link):
            values["link"] = asdict(self.link)
        if self.codec_costs is not None:
            values["codec_costs"] = {name: cost.to_json() for name, cost in self.codec_costs.items()}
        return values


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CieraPolicyError(f"{field} has {value!r}, which is not one of {', '.join(map(repr, allowed))}")
