"""`Profile`: what a `Profiler` measured, and the table that policies load.

Profiler -> Profile -> profile.json
                    -> table.json, one entry; `merge_tables` puts the entries of several learning rates into one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fsdp_ciera.errors import CieraFileError, CieraPolicyError
from fsdp_ciera.policies.rates import Rates

ALL = "all"
"""The key of figures over all categories."""
DERIVED_INTERVALS = (1, 2, 5, 10, 20)
"""The check intervals of the paper's Fig. 5."""
_FORMAT = 1


@dataclass(frozen=True)
class ProfiledStep:
    """One look. With an interval of k, changes are those of the k steps up to `step`."""

    step: int
    """Optimizer steps since the profiler was made."""
    rates: Mapping[str, Rates]
    """Rates by category, and of all values under `"all"`."""
    check_seconds: float
    """Wall time of the look, mean over ranks."""
    step_seconds: float | None
    """Wall time of a step without looks, mean over ranks and over the steps since the last look."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Rates of change of a run. All figures are sums or means over all ranks, the same on each."""

    model: str
    date: str
    """YYYY-MM-DD."""
    world_size: int
    """Ranks that share a parameter: with HSDP or several meshes, those of the most divided parameter."""
    dtype: str
    """The dtype in which shards are gathered; where they differ, that of the most values (`notes` names the others)."""
    interval: int
    """Steps between two looks. Changes are over so many steps."""
    warmup_steps: int
    num_steps: int
    """Optimizer steps of the run."""
    steps: tuple[int, int] | None
    """The first and the last step whose changes are in the averages; `None` when the run ended before."""
    kept_block_size: int
    """The block size of `distribution`."""
    num_values: Mapping[str, int]
    """Values of the whole model, by category."""
    rates: Mapping[str, Rates] = field(default_factory=dict)
    """Averages, by category and under `"all"` (paper Figs. 2 and 3b)."""
    shard_change: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """The share of shards in which an exponent changes, by category and number of ranks (paper Fig. 3a). Measured for
    `world_size`; for 2, 4 and 8 times as many ranks the local shards [n] are cut into pieces of ceil(n / 2), ... values."""
    distribution: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """For each parameter and rank, the mean share of blocks in which an exponent changes, by category (paper Fig. 4)."""
    series: tuple[ProfiledStep, ...] = ()
    """Every look, warm-up included."""
    check_seconds: float | None = None
    """Wall time of a look, mean over the looks that are averaged."""
    step_seconds: float | None = None
    """Wall time of a step without looks, mean over the same steps: all that the loop does between calls of `step()`."""
    notes: tuple[str, ...] = ()

    @property
    def check_share(self) -> float | None:
        """Measured share of the iteration that looks took at the interval in use (paper Fig. 5a)."""
        return self.derived_check_share(self.interval)

    def derived_check_share(self, interval: int) -> float | None:
        """The share of the iteration that looks would take at another interval k: (c / k) / (s + c / k), with c the measured
        seconds of a look and s those of a step."""
        if self.check_seconds is None or self.step_seconds is None:
            return None
        per_step = self.check_seconds / interval
        return per_step / (self.step_seconds + per_step) if per_step else 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values. Check shares are added for readers."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        values["steps"] = None if self.steps is None else list(self.steps)
        values["num_values"] = dict(self.num_values)
        values["rates"] = _rates_to_json(self.rates)
        values["shard_change"] = {
            name: {str(num_ranks): share for num_ranks, share in shares.items()}
            for name, shares in self.shard_change.items()
        }
        values["distribution"] = {name: list(rates) for name, rates in self.distribution.items()}
        values["series"] = [
            {
                "step": look.step,
                "check_seconds": look.check_seconds,
                "step_seconds": look.step_seconds,
                "rates": _rates_to_json(look.rates),
            }
            for look in self.series
        ]
        values["notes"] = list(self.notes)
        values["check_share"] = {
            "measured": self.check_share,
            "derived": {str(interval): self.derived_check_share(interval) for interval in DERIVED_INTERVALS},
        }
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Profile:
        """The profile that `to_json` wrote. Raises `CieraFileError` for anything else."""
        try:
            arguments = {item.name: values[item.name] for item in fields(cls)}
            arguments["steps"] = None if values["steps"] is None else tuple(values["steps"])
            arguments["rates"] = _rates_from_json(values["rates"])
            arguments["shard_change"] = {
                name: {int(num_ranks): share for num_ranks, share in shares.items()}
                for name, shares in values["shard_change"].items()
            }
            arguments["distribution"] = {name: tuple(rates) for name, rates in values["distribution"].items()}
            arguments["series"] = tuple(
                ProfiledStep(look["step"], _rates_from_json(look["rates"]), look["check_seconds"], look["step_seconds"])
                for look in values["series"]
            )
            arguments["notes"] = tuple(values["notes"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CieraFileError(
                f"this is no profile ({type(error).__name__}: {error}): give what Profile.to_json() or `ciera profile` wrote"
            ) from error
        return cls(**arguments)

    def to_table(
        self, name: str, *, lr: float, data: str = "unknown", optimizer: str = "unknown", notes: str = ""
    ) -> dict[str, Any]:
        """A table of change rates with one entry, the averages at learning rate `lr`, as policies load it from JSON.
        `"all"` stands in for categories that the model lacks.

        `data`, `optimizer` and `notes` say where the figures come from. Raises `CieraPolicyError` when no step after the
        warm-up was measured, or `lr` is not positive.
        """
        if self.steps is None:
            raise CieraPolicyError(
                f"{self.num_steps} steps with warmup_steps={self.warmup_steps} and interval={self.interval} have no two looks "
                "after the warm-up, so there are no averages for a table: train for longer, or lower warmup_steps"
            )
        if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < float("inf"):
            raise CieraPolicyError(f"lr={lr!r} must be a positive number: the learning rate of the measured steps")
        return {
            "format": _FORMAT,
            "name": name,
            "model": self.model,
            "provenance": {
                "source": "measured by ciera profile",
                "data": data,
                "date": self.date,
                "dtype": self.dtype,
                "world_size": self.world_size,
                "optimizer": optimizer,
                "notes": "; ".join(note for note in (notes, *self.notes) if note),
            },
            "entries": [
                {
                    "lr": float(lr),
                    "steps": list(self.steps),
                    "interval": self.interval,
                    "categories": _rates_to_json(self.rates),
                }
            ],
        }


def merge_tables(older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """One table with the entries of both, by rising learning rate. Where both have the same rate, the newer's stays.

    Name and provenance are the newer's; its notes say what differed in the older's. Raises `CieraFileError` when they
    are not tables of the same model.
    """
    for table in (older, newer):
        if table.get("format") != _FORMAT or not isinstance(table.get("entries"), list):
            raise CieraFileError(
                f"format={table.get('format')!r} is no table that this version can merge; allowed: {_FORMAT}, with a list of "
                "entries, as Profile.to_table() makes it"
            )
    if older.get("model") != newer.get("model"):
        raise CieraFileError(
            f"tables of {older.get('model')!r} and {newer.get('model')!r} cannot be merged: change rates belong to one model"
        )
    entries = {entry["lr"]: entry for table in (older, newer) for entry in table["entries"]}
    provenance = dict(newer.get("provenance", {}))
    kept = sorted(entry["lr"] for entry in older["entries"] if entries[entry["lr"]] is entry)
    before = older.get("provenance", {})
    differing = [f"{key} {before[key]}" for key in before if key != "notes" and before[key] != provenance.get(key)]
    notes = [note for note in (provenance.get("notes", ""), before.get("notes", "")) if note]
    if kept and differing:
        notes.append(f"LR {', '.join(f'{lr:g}' for lr in kept)}: {', '.join(differing)}")
    if notes:
        provenance["notes"] = "; ".join(dict.fromkeys(notes))
    return {**newer, "provenance": provenance, "entries": [entries[lr] for lr in sorted(entries)]}


def _rates_to_json(by_category: Mapping[str, Rates]) -> dict[str, Any]:
    return {name: rates.to_json() for name, rates in by_category.items()}


def _rates_from_json(values: Mapping[str, Any]) -> dict[str, Rates]:
    return {name: Rates.from_json(rates) for name, rates in values.items()}
