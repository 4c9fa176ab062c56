"""A word of warning before the first gather, when some rank does not take part in it.

[Note: A rank without a policy] Its stock all-gather meets our header exchange, and gloo ends the process with a message about
lengths. Nothing in-band can prevent that, so the first gather under a root looks into the store of the process group, where
every rank leaves its name, and says which names are missing. It then goes on: a rank that is only late is no error.
Test: test_failures.py, a rank without a policy.
"""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch.distributed as dist

from fsdp_ciera._compat import default_store

PATIENCE_SECONDS = 10.0


def wait_for_peers(group: dist.ProcessGroup, module: str) -> None:
    """Waits up to `PATIENCE_SECONDS` for all ranks of `group` to get here, then warns about the missing ones.

    Cost: three small requests to the store, once per FSDP root.
    """
    store = default_store()
    prefix = f"fsdp_ciera/{group.group_name}/{module}"
    # Another model of the same class, or a new process group on an old store, must not find the names of the last one.
    prefix += f"/{store.add(f'{prefix}/{group.rank()}/generation', 1)}"
    store.set(f"{prefix}/{group.rank()}", "here")
    if store.add(f"{prefix}/count", 1) % group.size() == 0:
        store.set(f"{prefix}/all", "here")
    try:
        store.wait([f"{prefix}/all"], timedelta(seconds=PATIENCE_SECONDS))
    except RuntimeError:
        missing = [rank for rank in range(group.size()) if not store.check([f"{prefix}/{rank}"])]
        if missing:
            warnings.warn(
                f"fsdp_ciera: module {module!r}: ranks {missing} of its group have not come to its first gather for "
                f"{PATIENCE_SECONDS:g} s. If they are not just late, they have no CieraPolicy: apply the same "
                "fully_shard(ciera_policy=...) or attach() on every rank",
                stacklevel=2,
            )
