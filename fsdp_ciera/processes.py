"""Shared by all code that starts ranks as processes of this machine: environment, ports, and how signals end ranks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType

LOOPBACK = "127.0.0.1"
KEEP_MEMORY: Mapping[str, str] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": str(2**31), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
)
"""For ranks that gather a lot: glibc then reuses the megabytes that every gather frees, instead of returning them and paying
page faults again."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_rank() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_environment(rank: int, world_size: int, ranks_per_host: int | None = None) -> dict[str, str]:
    """The variables that torchrun sets for a rank, but for rank 0's address: see `meeting_point`.

    Without `ranks_per_host`, all ranks are on one host.
    """
    local_size = world_size if ranks_per_host is None else ranks_per_host
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_size,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_size,
    }
    return {name: str(value) for name, value in values.items()}


def meeting_point(port: int, address: str = LOOPBACK, interface: str = "lo") -> dict[str, str]:
    """Where ranks meet: rank 0's address and port, and the interface that gloo sends through."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}


@contextmanager
def sigterm_raises(error: type[BaseException] = SystemExit) -> Iterator[None]:
    """Inside, SIGTERM raises, so that `with` blocks are left in order: `SystemExit(143)`, or a `KeyboardInterrupt` as Ctrl-C.

    Does nothing outside the main thread, or where the program handles SIGTERM itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise error(128 + signum)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
