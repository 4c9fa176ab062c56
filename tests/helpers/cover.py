"""Combinations of policies and backends: all of them, or a cover that a seed draws."""

from __future__ import annotations

from collections.abc import Mapping

from backends_under_test import BACKENDS
from fsdp_ciera import CieraPolicy

Setups = dict[str, tuple[str, CieraPolicy]]
"""By label, "codec, topology, backend": the backend and the policy."""


def on_all_backends(policies: Mapping[str, CieraPolicy]) -> Setups:
    """Every policy on every backend."""
    return {f"{label}, {backend}": (backend, policy) for label, policy in policies.items() for backend in BACKENDS}


def cover_of(setups: Setups, number: int, seed: int | None) -> Setups:
    """One way to run each codec (the labels up to the first comma), another one for each `number` and `seed`; all of them
    without a seed."""
    if seed is None:
        return setups
    ways: dict[str, list[str]] = {}
    for label in setups:
        ways.setdefault(label.partition(",")[0], []).append(label)
    return {
        (label := of_codec[(number + seed + 3 * index) % len(of_codec)]): setups[label]
        for index, of_codec in enumerate(ways.values())
    }
