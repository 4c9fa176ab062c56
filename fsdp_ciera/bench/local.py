"""The mode that needs no root: hosts in name only, and ranks on the machine's own loopback.

    with LocalCluster(num_hosts=4) as cluster:
        results = cluster.run([sys.executable, "worker.py"], timeout_s=600)

It has the methods of `netns.NetnsCluster` except those that need a network of their own: links have no limit, and there are
no interfaces that count. So it shows that everything runs and that all bits are equal; of speed it only shows what codecs
cost where a link costs next to nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp_ciera.bench.ranks import Hosts, start_time
from fsdp_ciera.processes import free_port, meeting_point

INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
OWNER_VARIABLE = "CIERA_LOCAL_CLUSTER"
"""Variable in the environment of every rank and of what it starts: the owner's pid and start time, and a number."""

_OWNER = re.compile(r"(?P<pid>\d+)-(?P<start>\d+)-\d+")
_cluster_numbers = itertools.count()


class LocalCluster(Hosts):
    """`num_hosts` hosts in name only: all ranks are plain processes of this machine, on 127.0.0.1.

    Args:
        num_hosts: hosts; rank `r` has the local rank `r % ranks_per_host` and `r // ranks_per_host` as its host.
        rate: must be `None`; only `netns.NetnsCluster` can limit what a host sends.

    All ranks and what they started are killed at the end of the `with` block, at an exception, at Ctrl-C and at SIGTERM.
    After a SIGKILL of their owner, the next `LocalCluster` of any process of the same user kills them.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        if num_hosts < 1:
            raise ValueError(f"num_hosts={num_hosts} must be at least 1")
        if rate is not None:
            raise ValueError(f"rate={rate!r} must be None on the loopback: only network namespaces can limit it")
        super().__init__(num_hosts, rate)
        self._owner = f"{os.getpid()}-{start_time(os.getpid()) or 0}-{next(_cluster_numbers)}"

    def _prepare(self) -> None:
        sweep()

    def _build(self) -> None:
        """Does nothing: the machine is there."""

    def _entry(self, host: int) -> Sequence[str]:
        return ()

    def _network(self) -> dict[str, str]:
        return meeting_point(free_port(), interface=INTERFACE) | {OWNER_VARIABLE: self._owner}

    def _remove(self) -> None:
        _kill_marked(lambda owner: owner == self._owner)


def sweep() -> list[int]:
    """Kills ranks that outlived their owner, and what they started. Returns the pids of all that it killed."""

    def is_dead(owner: str) -> bool:
        match = _OWNER.fullmatch(owner)
        return match is not None and start_time(int(match["pid"])) != int(match["start"])

    return _kill_marked(is_dead)


def _kill_marked(is_wanted: Callable[[str], bool]) -> list[int]:
    """Kills the processes whose `OWNER_VARIABLE` satisfies `is_wanted`, and returns their pids. Skips those of other users."""
    killed = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):  # gone meanwhile, or of another user
            owner = _owner_of(folder)
            if owner is None or not is_wanted(owner):
                continue
            handle = os.pidfd_open(pid)
            try:
                if _owner_of(folder) == owner:  # still the same process, whose pid the handle now keeps
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed.append(pid)
            finally:
                os.close(handle)
    return killed


def _owner_of(process_folder: Path) -> str | None:
    prefix = f"{OWNER_VARIABLE}=".encode()
    for entry in (process_folder / "environ").read_bytes().split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None
