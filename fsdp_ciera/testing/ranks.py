"""`run_ranks`: a function on several gloo ranks of this machine.

parent    takes idle processes, forks more where too few are idle  ->  sends each its job  ->  collects what they return
process   job after job: process group  ->  fn(rank, world_size, *args)  ->  process group away, patches undone

The first FSDP2 step of a process costs seconds (imports, DTensor's caches), so processes are kept. One that failed, hung or
ran out of time is not used again.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from fsdp_ciera.errors import RankFailure
from fsdp_ciera.processes import free_port, meeting_point, rank_environment

PRELOADED = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.optim", "fsdp_ciera.api",
             "fsdp_ciera.testing.frozen"]  # fmt: skip
"""Modules that all ranks need; imported once, in the server that ranks are forked from. The last one freezes the others."""

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    rank: int
    world_size: int
    port: int
    timeout_s: float
    expect_failure: bool
    args: tuple[Any, ...]
    path: list[str] = field(default_factory=lambda: list(sys.path))
    """`sys.path`, by which the rank imports the module of `fn`."""


class _Process:
    """One process that takes job after job."""

    def __init__(self) -> None:
        self.pipe, child_pipe = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(child_pipe,), daemon=False)
        self._process.start()
        child_pipe.close()

    def end(self, patience_s: float = 0.1) -> None:
        """Lets the process end, and kills it after `patience_s` seconds."""
        self.pipe.close()
        self._process.join(timeout=patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


_IDLE: list[_Process] = []
"""The processes that have no job."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    expect_failure: bool = False,
    is_fresh: bool = False,
) -> list[Any]:
    """`[fn(rank, world_size, *args) for rank in range(world_size)]`, on `world_size` gloo ranks on 127.0.0.1.

    `fn` is a function of a module, not of an interactive session; `args` and what it returns are pickled. Ranks are processes
    with one torch thread each, with the environment that torchrun would set. They serve several calls: what `fn` replaces in
    fsdp_ciera, in torch.distributed or in its own module is undone after it; `is_fresh` asks for new processes. All ranks
    meet in a barrier before they end, since a process that leaves early aborts the collectives of its peers.

    Raises `RankFailure` with the tracebacks of the ranks that failed; with `expect_failure` it returns the exceptions of the
    ranks instead (`None` for a rank that succeeded).
    """
    port = free_port()
    processes = [_Process() if is_fresh or not _IDLE else _IDLE.pop() for _ in range(world_size)]
    outcomes: list[tuple[bool, Any] | None] = [None] * world_size
    waiting: dict[Connection, int] = {}
    try:
        for rank, process in enumerate(processes):
            process.pipe.send(_Job(fn, rank, world_size, port, timeout_s, expect_failure, args))
            waiting[process.pipe] = rank
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            for ready in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    outcomes[rank] = ready.recv()
                except EOFError:
                    outcomes[rank] = (False, RuntimeError(f"rank {rank} died without a word"))
    finally:
        if all(outcome is not None and outcome[0] for outcome in outcomes) and not is_fresh:
            _IDLE.extend(processes)
        else:
            for process in processes:
                process.end()
    settled = [
        outcome or (False, TimeoutError(f"rank {rank} had not ended after {timeout_s} s"))
        for rank, outcome in enumerate(outcomes)
    ]
    if expect_failure:
        return [None if ok else value for ok, value in settled]
    failed = [f"--- rank {rank}\n{value}" for rank, (ok, value) in enumerate(settled) if not ok]
    if failed:
        raise RankFailure("\n".join(failed))
    return [value for _, value in settled]


@atexit.register
def end_idle_processes() -> None:
    """Ends the processes that wait for a job; they would end with this process anyhow."""
    while _IDLE:
        _IDLE.pop().end(patience_s=2.0)


# In the processes


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # nobody is left to send one
            os._exit(0)
        except Exception:  # a job that cannot be unpickled
            pipe.send((False, traceback.format_exc()))
            continue
        ok, value = _run(job)
        try:
            pipe.send((ok, value))
        except Exception:  # a value that cannot be pickled
            ok = False
            pipe.send((ok, traceback.format_exc()))
        if not ok:
            if job.expect_failure:
                time.sleep(1)  # let the peers meet the error on their own before this rank's sockets close
            os._exit(1)


def _run(job: _Job) -> tuple[bool, Any]:
    import torch.distributed as dist

    sys.path[:] = job.path
    with _undone(job.fn.__module__):
        os.environ.update(rank_environment(job.rank, job.world_size) | meeting_point(job.port))
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
            value = job.fn(job.rank, job.world_size, *job.args)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
        except BaseException as error:
            return False, error if job.expect_failure else traceback.format_exc()
    return True, value


@contextmanager
def _undone(module: str) -> Iterator[None]:
    """Puts back, on leaving, what was replaced in modules and classes, the environment and torch's defaults."""
    import torch

    before = [(owner, dict(vars(owner))) for owner in _owners(module)]
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    try:
        yield
    finally:
        for owner, attributes in before:
            now = dict(vars(owner))
            for name, value in attributes.items():
                if now.get(name, before) is not value:
                    setattr(owner, name, value)
            if isinstance(owner, type):  # a module may have been imported since
                for name in now.keys() - attributes.keys():
                    delattr(owner, name)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)  # type: ignore[no-untyped-call]
        torch.use_deterministic_algorithms(False)
        gc.collect()  # models hold process groups


def _owners(module: str) -> Iterator[ModuleType | type]:
    """The modules of fsdp_ciera and torch.distributed, the module called `module`, and the classes of fsdp_ciera."""
    for name, loaded in list(sys.modules.items()):
        if not isinstance(loaded, ModuleType):
            continue
        is_ours = name.partition(".")[0] == "fsdp_ciera"
        if is_ours or name == module or name.startswith("torch.distributed"):
            yield loaded
        if is_ours:
            yield from (
                value for value in vars(loaded).values() if isinstance(value, type) and value.__module__ == name
            )
