"""Change-rate tables: which are there, and what they say about a category at a learning rate.

A table is JSON, as `ciera profile` writes it: one entry a learning rate, and in it the `Rates` of each category. The category
"all" speaks for those that are not listed. Shipped tables lie in policies/tables/; any other is named by its path.
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
"""Measured by us, and the only shipped one with everything that every codec needs. Fills what other tables do not know."""

NEAREST: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mixtral-8x7b": ("minicpm-moe-8x2b", "8 experts, 2 of them a token, no shared expert"),
        "qwen1.5-moe-a2.7b": ("deepseek-moe-16b", "60 fine-grained experts beside a shared one"),
        "qwen2-57b-a14b": ("deepseek-moe-16b", "64 fine-grained experts beside a shared one"),
        "llama-4-scout": ("deepseek-moe-16b", "routed experts beside a shared one"),
    }
)
"""Models without a table: the one that stands in, and what they have in common with it."""


class Lookup(NamedTuple):
    """Rates, and in words where they were stretched or guessed; `{category}` in them stands for its name."""

    rates: Rates
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The rates of one model, by learning rate in ascending order and category."""

    name: str
    model: str
    provenance: Mapping[str, Any]
    entries: tuple[tuple[float, Mapping[str, Rates]], ...]

    @property
    def lrs(self) -> list[float]:
        """The learning rates that were measured."""
        return [lr for lr, _ in self.entries]

    def lookup(self, category: str, lr: float) -> Lookup:
        """The rates of a category at `lr`; a figure that was measured on both sides is interpolated.

        Logarithms of shares and bits are linear in that of the learning rate. Below and above what was measured the nearest
        figure counts, and a note says so.
        """
        rows = [(at, _for_category(categories, category)) for at, categories in self.entries]
        found: dict[str, Any] = {}
        stretched: dict[str, float] = {}
        for item in fields(Rates):
            known = [(at, value) for at, row in rows if _is_known(value := getattr(row, item.name))]
            if known:
                found[item.name], nearest = _interpolated(known, lr)
                if nearest is not None:
                    stretched[item.name] = nearest
        notes = tuple(
            f"{self.name}: {name} of {{category}} at a learning rate of {lr:g} is that of {at:g} (nothing nearer was measured)"
            for name, at in stretched.items()
        )
        return Lookup(Rates(**found), notes)


def load_table(name: str) -> Table:
    """The shipped table of that name, or the one in the JSON file of that path.

    Raises `CieraPolicyError` for what is neither, and `CieraFileError` for a file that is not there or holds no table.
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
    """The table of a model of the paper, or the nearest one with a note that says so."""
    if model in shipped_tables():
        return shipped_tables()[model], ()
    name, likeness = NEAREST.get(model, (DEFAULT_TABLE, "nothing in particular: it is the one with all figures"))
    return shipped_tables()[name], (f"no table for {model}: that of {name} stands in ({likeness})",)


def rates_for(table: Table, category: str, lr: float, block_size: int) -> Lookup:
    """The rates of a category, with what `table` lacks taken from the default table, or else from the worst category there.

    A block size that was not measured is noted when it lies outside the measured ones.
    """
    rates, notes = table.lookup(category, lr)
    if table.name != DEFAULT_TABLE:
        spare, _ = shipped_tables()[DEFAULT_TABLE].lookup(category, lr)
        codec_bits = {codec: bits for codec, bits in spare.codec_bits.items() if not _knows(rates, codec)}
        rates, taken = rates.filled_from(replace(spare, codec_bits=codec_bits))
        if taken:
            notes += (f"{table.name} does not know {', '.join(taken)} of {{category}}: taken from {DEFAULT_TABLE}",)
    _, stretched = rates.block_change_at(block_size)
    if stretched:
        notes += (
            f"{table.name}: blocks of {block_size} values were not measured; changes of exponents count as independent of "
            f"one another, from blocks of {_nearest(list(rates.block_change), block_size)}",
        )
    return Lookup(rates, notes)


@cache
def shipped_tables() -> Mapping[str, Table]:
    """All tables in policies/tables/, by name."""
    found: dict[str, Table] = {}
    for path in sorted(files("fsdp_ciera.policies").joinpath("tables").iterdir(), key=lambda one: one.name):
        if path.name.endswith(".json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            for one in content if isinstance(content, list) else [content]:
                table = parse_table(one)
                found[table.name] = table
    return MappingProxyType(found)


def parse_table(content: Mapping[str, Any]) -> Table:
    """JSON -> table. Raises `ValueError` or `KeyError` for what does not belong there."""
    if content["format"] != 1:
        raise ValueError(f"format {content['format']!r} is not 1")
    if not content["entries"]:
        raise ValueError("it has no entries")
    entries = []
    for entry in sorted(content["entries"], key=lambda one: float(one["lr"])):
        lr = float(entry["lr"])
        unknown = sorted(set(entry["categories"]) - {*CATEGORIES, "all"})
        if lr <= 0 or unknown:
            raise ValueError(f"category {unknown[0]!r} is not known" if unknown else f"lr {lr:g} is not above 0")
        rates = {category: Rates.from_json(values) for category, values in entry["categories"].items()}
        entries.append((lr, MappingProxyType(rates)))
    return Table(content["name"], content["model"], MappingProxyType(dict(content["provenance"])), tuple(entries))


def _for_category(categories: Mapping[str, Rates], category: str) -> Rates:
    """Its own figures, and those of "all" where it has none."""
    rates, _ = categories.get(category, Rates()).filled_from(categories.get("all", Rates()))
    return rates


def _knows(rates: Rates, codec: str) -> bool:
    """Whether the rates say themselves what `codec` sends: then nobody else's bits may."""
    return {
        "entropy": rates.exponent_entropy_bits is not None,
        "exponent_block": bool(rates.block_change),
        "exponent_delta": rates.exponent_change is not None,
        "value_delta": rates.value_change is not None or rates.value_change_entropy_bits is not None,
    }.get(codec, False)


def _is_known(value: Any) -> bool:
    return value is not None and (not isinstance(value, Mapping) or bool(value))


def _interpolated(known: Sequence[tuple[float, Any]], lr: float) -> tuple[Any, float | None]:
    """The figure at `lr`, and the learning rate whose figure it is when there is none on both sides."""
    below = [pair for pair in known if pair[0] <= lr]
    above = [pair for pair in known if pair[0] >= lr]
    if not below or not above:
        at, value = below[-1] if below else above[0]
        return value, at
    (low, low_value), (high, high_value) = below[-1], above[0]
    part = log(lr / low) / log(high / low) if high > low else 0.0
    if isinstance(low_value, Mapping):
        keys = [key for key in low_value if key in high_value]
        return {key: _between(low_value[key], high_value[key], part) for key in keys}, None
    return _between(low_value, high_value, part), None


def _between(low: float, high: float, part: float) -> float:
    if low <= 0 or high <= 0:
        return low + (high - low) * part
    return float(low ** (1 - part) * high**part)


def _nearest(sizes: Sequence[int], block_size: int) -> int:
    return min(sizes, key=lambda size: abs(log(size / block_size)))
