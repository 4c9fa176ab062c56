"""A warning before the first gather, when some rank does not take part in it.

[Note: A rank without a policy] Its stock all-gather meets our first exchange, and gloo ends the process with a message about
lengths. Nothing in-band can prevent that, so the first gather under a root looks into the store of the process group, where
every rank leaves its name, and says which names are missing. It then goes on: a rank that is only late is no error.
Test: test_failures.py, a rank without a policy.

[Note: Stores are asked, not waited for] A store that waits holds the process's one connection, and another thread's trainer
waits with it. And not every store can count. So a rank asks for the names again and again, and where the store lacks what that
needs, it warns about nobody. Test: test_faults.py, two trainers in two threads; a store without counters.
"""

from __future__ import annotations

import time
import warnings

import torch.distributed as dist

from fsdp_ciera._compat import default_store

PATIENCE_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 0.05


def wait_for_peers(process_group: dist.ProcessGroup, module: str) -> None:
    """Waits up to `PATIENCE_SECONDS` for all ranks of the process group to get here, then warns about the missing ones.

    Cost: three small requests to the store, once per FSDP root and process group, and more while ranks are missing.
    """
    try:
        missing = _missing_ranks(process_group, module)
    except (RuntimeError, NotImplementedError, AttributeError):  # a store that cannot count, or none at all
        return
    if missing:
        warnings.warn(
            f"fsdp_ciera: module {module!r}: ranks {missing} of its group have not come to its first gather for "
            f"{PATIENCE_SECONDS:g} s. If they are not just late, they have no CieraPolicy: apply the same "
            "fully_shard(ciera_policy=...) or attach() on every rank",
            stacklevel=2,
        )


def _missing_ranks(process_group: dist.ProcessGroup, module: str) -> list[int]:
    store = default_store()
    prefix = f"fsdp_ciera/{process_group.group_name}/{module}"
    # Another model of the same class, or a new process group on an old store, must not find the names of the last one.
    prefix += f"/{store.add(f'{prefix}/{process_group.rank()}/generation', 1)}"
    store.set(f"{prefix}/{process_group.rank()}", "here")
    if store.add(f"{prefix}/count", 1) % process_group.size() == 0:
        store.set(f"{prefix}/all", "here")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not store.check([f"{prefix}/all"]):
        if time.monotonic() > deadline:
            return [rank for rank in range(process_group.size()) if not store.check([f"{prefix}/{rank}"])]
        time.sleep(_LOOK_EVERY_SECONDS)
    return []
