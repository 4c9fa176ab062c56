"""fsdp_ciera: bit-identical FSDP2 all-gathers in fewer bytes.

    from fsdp_ciera import CieraPolicy, fully_shard

    policy = CieraPolicy()
    for layer in model.model.layers:
        fully_shard(layer, ciera_policy=policy)
    fully_shard(model, ciera_policy=policy)

For a model that is already under FSDP2: `attach(model, policy)`.

The vocabulary of plans (`Link`, `CodecCost`, `Plan`) is in `fsdp_ciera.planning`; help for tests is in `fsdp_ciera.testing`.

Names are imported when they are first used, so that a call that needs no torch (`ciera --help`) does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp_ciera.version import __version__

if TYPE_CHECKING:
    from fsdp_ciera.api import AttachReport, attach, detach, fully_shard, invalidate, settle_sizes, stats
    from fsdp_ciera.errors import (
        CieraConflictError,
        CieraDecodeError,
        CieraDesyncError,
        CieraMismatchError,
        CieraPeerError,
        CieraPolicyError,
        CieraVerifyError,
        RecipeError,
        UnsupportedTorchError,
    )
    from fsdp_ciera.planning.estimate import MemoryEstimate, estimate_memory
    from fsdp_ciera.policy import CieraPolicy
    from fsdp_ciera.profiling.profile import Profile
    from fsdp_ciera.profiling.profiler import Profiler
    from fsdp_ciera.statistics import Bytes, CieraStats

__all__ = [
    "AttachReport",
    "Bytes",
    "CieraConflictError",
    "CieraDecodeError",
    "CieraDesyncError",
    "CieraMismatchError",
    "CieraPeerError",
    "CieraPolicy",
    "CieraPolicyError",
    "CieraStats",
    "CieraVerifyError",
    "MemoryEstimate",
    "Profile",
    "Profiler",
    "RecipeError",
    "UnsupportedTorchError",
    "__version__",
    "attach",
    "detach",
    "estimate_memory",
    "fully_shard",
    "invalidate",
    "settle_sizes",
    "stats",
]

_NAMES = {
    "api": ("AttachReport", "attach", "detach", "fully_shard", "invalidate", "settle_sizes", "stats"),
    "errors": (
        "CieraConflictError",
        "CieraDecodeError",
        "CieraDesyncError",
        "CieraMismatchError",
        "CieraPeerError",
        "CieraPolicyError",
        "CieraVerifyError",
        "RecipeError",
        "UnsupportedTorchError",
    ),
    "planning.estimate": ("MemoryEstimate", "estimate_memory"),
    "policy": ("CieraPolicy",),
    "profiling.profile": ("Profile",),
    "profiling.profiler": ("Profiler",),
    "statistics": ("Bytes", "CieraStats"),
}
"""The names that are imported from each module, the same as above."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
