"""Runs a function on several gloo ranks, each a process of its own, and returns what each rank returned.

The processes are forked from one server that has torch imported already, so that a test with 8 ranks costs about a
second and not eight imports.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.fsdp", "fsdp_ciera"])


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time. Carries the text of each failed rank's traceback."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, expect_failure: bool = False
) -> list[Any]:
    """`[fn(rank, world_size, *args) for rank in range(world_size)]`, on `world_size` gloo ranks on 127.0.0.1.

    `fn` must be a module-level function. All ranks meet in a barrier before they end, since a process that leaves early
    aborts the collectives of its peers. Raises `RankFailure` with the tracebacks of the ranks that failed; with
    `expect_failure` it returns the exceptions of the ranks instead of raising (`None` for a rank that succeeded).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank_main, args=(sender, fn, rank, world_size, port, timeout_s, expect_failure, args), daemon=False
        )
        process.start()
        sender.close()
        pipes[receiver] = rank
        processes.append(process)
    outcomes: list[tuple[bool, Any] | None] = [None] * world_size
    deadline = time.monotonic() + timeout_s
    while pipes and time.monotonic() < deadline:
        for ready in wait(list(pipes), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(ready, Connection)
            rank = pipes.pop(ready)
            try:
                outcomes[rank] = ready.recv()
            except EOFError:
                outcomes[rank] = (False, RuntimeError(f"rank {rank} died without a word"))
    for process in processes:
        process.join(timeout=max(0.1, min(10.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            outcomes[rank] = (False, TimeoutError(f"rank {rank} had not ended after {timeout_s} s"))
    settled = [outcome for outcome in outcomes if outcome is not None]
    if expect_failure:
        return [None if ok else value for ok, value in settled]
    failed = [f"--- rank {rank}\n{value}" for rank, (ok, value) in enumerate(settled) if not ok]
    if failed:
        raise RankFailure("\n".join(failed))
    return [value for _, value in settled]


def _rank_main(
    sender: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    expect_failure: bool,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    outcome: tuple[bool, Any]
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        value = fn(rank, world_size, *args)
        if dist.is_initialized():
            dist.barrier()
        outcome = (True, value)
    except BaseException as error:
        outcome = (False, error if expect_failure else traceback.format_exc())
    sender.send(outcome)
    if outcome[0] and dist.is_initialized():
        dist.destroy_process_group()
    elif expect_failure:
        time.sleep(1)  # let the peers meet the error on their own before this rank's sockets close
    sender.close()
    os._exit(0)
