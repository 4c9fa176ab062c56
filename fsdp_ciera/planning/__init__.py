"""Which codec each shard gets: shapes, rates, links, costs and budgets make a plan.

Public names: what a policy is told of the world (`Link`, `CodecCost`, `StageCost`), what a plan says (`Plan`, `PlanRow`), what
it takes (`estimate_memory`), and what `planning.forecast.forecast` says of a model on a `Cluster` that need not be there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_ciera.planning.estimate import MemoryEstimate, estimate_memory
    from fsdp_ciera.planning.forecast import Cluster, Forecast
    from fsdp_ciera.planning.plan import Plan, PlanRow
    from fsdp_ciera.policies.costs import CodecCost, StageCost
    from fsdp_ciera.policies.links import Link

__all__ = [
    "Cluster",
    "CodecCost",
    "Forecast",
    "Link",
    "MemoryEstimate",
    "Plan",
    "PlanRow",
    "StageCost",
    "estimate_memory",
]

_HOMES = {
    "Cluster": "planning.forecast",
    "CodecCost": "policies.costs",
    "Forecast": "planning.forecast",
    "Link": "policies.links",
    "MemoryEstimate": "planning.estimate",
    "Plan": "planning.plan",
    "PlanRow": "planning.plan",
    "StageCost": "policies.costs",
    "estimate_memory": "planning.estimate",
}
"""Imported when they are first used, since the modules of this package import one another."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"fsdp_ciera.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
