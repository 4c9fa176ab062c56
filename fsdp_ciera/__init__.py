"""fsdp_ciera: bit-identical FSDP2 all-gathers in fewer bytes.

    from fsdp_ciera import CieraPolicy, fully_shard

    policy = CieraPolicy()
    for layer in model.model.layers:
        fully_shard(layer, ciera_policy=policy)
    fully_shard(model, ciera_policy=policy)

For a model that is already under FSDP2: `attach(model, policy)`.
"""

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
from fsdp_ciera.planning.plan import Plan, PlanRow
from fsdp_ciera.policies.costs import CodecCost, StageCost
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.profiling.profile import Profile
from fsdp_ciera.profiling.profiler import Profiler
from fsdp_ciera.statistics import Bytes, CieraStats
from fsdp_ciera.version import __version__

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
    "CodecCost",
    "Link",
    "MemoryEstimate",
    "Plan",
    "PlanRow",
    "Profile",
    "Profiler",
    "RecipeError",
    "StageCost",
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
