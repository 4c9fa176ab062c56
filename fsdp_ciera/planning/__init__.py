"""Plans which codec each shard gets, from shapes, rates, links, codec costs and budgets.

Public names: what a policy can say of links and codecs (`Link`, `CodecCost`, `StageCost`), the plan (`Plan`, `PlanRow`), the
memory that a policy costs (`estimate_memory`), and what `planning.forecast.forecast` takes and returns (`Cluster`, `Forecast`),
for a cluster that need not exist.
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
"""By public name: its module, imported at the first use, since the modules of this package import one another."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"fsdp_ciera.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
