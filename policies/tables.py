"""Change-rate tables: reads them, and looks up the rates of a category at a learning rate.

A table is JSON, as `ciera profile` writes it: one entry for each learning rate, with the `Rates` of each category. The category
"all" stands for categories that are not listed. Shipped tables lie in policies/tables/; any other table is named by its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fsdp_ciera.errors import CieraFileError, CieraPolicyError
from fsdp_ciera.policies.categories import CATEGORIES
from fsdp_ciera.policies.rates import Rates

DEFAULT_TABLE = "smollm2-moe"
"""Measured by us, and the only shipped table with all rates that every codec needs. Supplies what other tables do not know."""

NEAREST: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mixtral-8x7b": ("minicpm-moe-8x2b", "8 experts, 2 of them a token, no shared expert"),
        "qwen1.5-moe-a2.7b": ("deepseek-moe-16b", "60 fine-grained experts beside a shared one"),
        "qwen2-57b-a14b": ("deepseek-moe-16b", "64 fine-grained experts beside a shared one"),
        "llama-4-scout": ("deepseek-moe-16b", "routed experts beside a shared one"),
    }
)
"""By model without a table: the table that stands in for it, and what the two models have in common."""


class Lookup(NamedTuple):
    """Rates, and notes that say which of them were extrapolated or guessed. `{category}` in a note stands for the name of the
    category."""

    rates: Rates
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The rates of one model: `entries` has those of each category by learning rate, in ascending order."""

    name: str
    model: str
    provenance: Mapping[str, Any]
    entries: tuple[tuple[float, Mapping[str, Rates]], ...]

    @property
    def lrs(self) -> list[float]:
        """The learning rates that were measured, in ascending order."""
        return [lr for lr, _ in self.entries]

    def lookup(self, category: str, lr: float) -> Lookup:
        """The rates of a category at `lr`, interpolated where a rate was measured below and above it.

        The logarithm of a rate is linear in the logarithm of the learning rate. Where a rate was measured on one side only, the
        nearest measured rate counts, and a note says so.
        """
        rows = [(measured_lr, _for_category(categories, category)) for measured_lr, categories in self.entries]
        figures: dict[str, Any] = {}
        nearest_lrs: dict[str, float] = {}
        for item in fields(Rates):
            known = [(measured_lr, value) for measured_lr, row in rows if _is_known(value := getattr(row, item.name))]
            if known:
                figures[item.name], nearest_lr = _interpolated(known, lr)
                if nearest_lr is not None:
                    nearest_lrs[item.name] = nearest_lr
        notes = tuple(
            f"{self.name}: {name} of {{category}} at a learning rate of {lr:g} is that of {nearest_lr:g} "
            "(nothing nearer was measured)"
            for name, nearest_lr in nearest_lrs.items()
        )
        return Lookup(Rates(**figures), notes)


def load_table(name: str) -> Table:
    """The shipped table of this name, or the table in the JSON file at this path.

    Raises `CieraPolicyError` if `name` is neither, and `CieraFileError` if the file is missing or holds no table.
    """
    if name in shipped_tables():
        return shipped_tables()[name]
    path = Path(name)
    if path.suffix != ".json":
        raise CieraPolicyError(
            f"tables={name!r} is not a shipped table ({', '.join(shipped_tables())}) nor the path of a .json file: run "
            "`ciera profile RECIPE.toml` to measure one"
        )
    try:
        return parse_table(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CieraFileError(f"tables={name!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CieraFileError(f"tables={name!r} is not a table as `ciera profile` writes it: {error!r}") from None


def table_for_model(model: str) -> tuple[Table, tuple[str, ...]]:
    """The table of a model and no notes, or the table that stands in for it and a note that says so."""
    if model in shipped_tables():
        return shipped_tables()[model], ()
    name, likeness = NEAREST.get(model, (DEFAULT_TABLE, "nothing in particular: it is the one with all figures"))
    return shipped_tables()[name], (f"no table for {model}: that of {name} stands in ({likeness})",)


def rates_for(table: Table, category: str, lr: float, block_size: int) -> Lookup:
    """The rates of a category in `table`. Rates that `table` lacks are taken from the default table, for the same category or
    for its category "all".

    A note says when `block_size` lies outside the block sizes that were measured.
    """
    rates, notes = table.lookup(category, lr)
    if table.name != DEFAULT_TABLE:
        spare, _ = shipped_tables()[DEFAULT_TABLE].lookup(category, lr)
        codec_bits = {codec: bits for codec, bits in spare.codec_bits.items() if not _knows(rates, codec)}
        rates, taken = rates.filled_from(replace(spare, codec_bits=codec_bits))
        if taken:
            notes += (f"{table.name} does not know {', '.join(taken)} of {{category}}: taken from {DEFAULT_TABLE}",)
    _, is_extrapolated = rates.block_change_at(block_size)
    if is_extrapolated:
        notes += (
            f"{table.name}: blocks of {block_size} values were not measured; changes of exponents count as independent of "
            f"one another, from blocks of {_nearest(list(rates.block_change), block_size)}",
        )
    return Lookup(rates, notes)


@cache
def shipped_tables() -> Mapping[str, Table]:
    """All tables in policies/tables/, by name."""
    tables: dict[str, Table] = {}
    for path in sorted(files("fsdp_ciera.policies").joinpath("tables").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".json"):
            file_content = json.loads(path.read_text(encoding="utf-8"))
            for content in file_content if isinstance(file_content, list) else [file_content]:
                table = parse_table(content)
                tables[table.name] = table
    return MappingProxyType(tables)


def parse_table(content: Mapping[str, Any]) -> Table:
    """Makes a table from its JSON content. Raises `ValueError` or `KeyError` if that is no table."""
    if content["format"] != 1:
        raise ValueError(f"format {content['format']!r} is not 1")
    if not content["entries"]:
        raise ValueError("it has no entries")
    entries = []
    for entry in sorted(content["entries"], key=lambda entry: float(entry["lr"])):
        lr = float(entry["lr"])
        unknown = sorted(set(entry["categories"]) - {*CATEGORIES, "all"})
        if lr <= 0 or unknown:
            raise ValueError(f"category {unknown[0]!r} is not known" if unknown else f"lr {lr:g} is not above 0")
        rates = {category: Rates.from_json(values) for category, values in entry["categories"].items()}
        entries.append((lr, MappingProxyType(rates)))
    return Table(content["name"], content["model"], MappingProxyType(dict(content["provenance"])), tuple(entries))


def _for_category(categories: Mapping[str, Rates], category: str) -> Rates:
    """The rates of `category`; those that it lacks are taken from the category "all"."""
    rates, _ = categories.get(category, Rates()).filled_from(categories.get("all", Rates()))
    return rates


def _knows(rates: Rates, codec: str) -> bool:
    """Whether these rates determine what `codec` sends, so that measured bits of another table must not be used."""
    return {
        "entropy": rates.exponent_entropy_bits is not None,
        "exponent_block": bool(rates.block_change),
        "exponent_delta": rates.exponent_change is not None,
        "value_delta": rates.value_change is not None or rates.value_change_entropy_bits is not None,
    }.get(codec, False)


def _is_known(value: Any) -> bool:
    return value is not None and (not isinstance(value, Mapping) or bool(value))


def _interpolated(known: Sequence[tuple[float, Any]], lr: float) -> tuple[Any, float | None]:
    """The figure at `lr` from pairs of a learning rate and a figure. With figures on one side of `lr` only, the nearest figure
    and its learning rate; otherwise the second result is `None`."""
    below = [pair for pair in known if pair[0] <= lr]
    above = [pair for pair in known if pair[0] >= lr]
    if not below or not above:
        nearest_lr, value = below[-1] if below else above[0]
        return value, nearest_lr
    (low_lr, low_value), (high_lr, high_value) = below[-1], above[0]
    weight = log(lr / low_lr) / log(high_lr / low_lr) if high_lr > low_lr else 0.0
    if isinstance(low_value, Mapping):
        keys = [key for key in low_value if key in high_value]
        return {key: _between(low_value[key], high_value[key], weight) for key in keys}, None
    return _between(low_value, high_value, weight), None


def _between(low: float, high: float, weight: float) -> float:
    if low <= 0 or high <= 0:
        return low + (high - low) * weight
    return float(low ** (1 - weight) * high**weight)


def _nearest(sizes: Sequence[int], block_size: int) -> int:
    return min(sizes, key=lambda size: abs(log(size / block_size)))
