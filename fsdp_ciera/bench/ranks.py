"""Ranks as processes of this machine, on hosts: they start together, and end together whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fsdp_ciera.errors import RankError
from fsdp_ciera.processes import rank_environment, sigterm_raises

_SECONDS_FOR_PEERS_OF_A_FAILED_RANK = 5.0


@dataclass(frozen=True)
class RankResult:
    """Exit code and output of one rank. A negative `returncode` is the signal that ended it, as in `subprocess`."""

    rank: int
    host: int
    returncode: int
    stdout: str
    stderr: str


class Hosts(ABC):
    """`num_hosts` hosts that run ranks, from `__enter__` to `__exit__`.

    Everything is removed again at the end of the `with` block, at an exception, at Ctrl-C and at SIGTERM.
    """

    def __init__(self, num_hosts: int, rate: str | None) -> None:
        self.num_hosts = num_hosts
        self.rate = rate
        """What each host may send, in bits per second as `tc` writes it; `None`: no limit."""
        self._started: list[RankProcesses] = []
        self._undo_sigterm = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._prepare()
        self._undo_sigterm.enter_context(sigterm_raises())
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def run(
        self,
        argv: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600,
        check: bool = True,
    ) -> list[RankResult]:
        """Runs `argv` once per rank and waits for all ranks: `start(...)`, then `wait(...)`."""
        return self.start(argv, ranks_per_host=ranks_per_host, env=env).wait(timeout_s, check=check)

    def start(
        self, argv: Sequence[str], *, ranks_per_host: int = 1, env: Mapping[str, str] | None = None
    ) -> RankProcesses:
        """Starts `argv` once per rank; rank `r` runs on host `r // ranks_per_host`.

        Each rank has this process's environment, `env` on top of it, and on top of both what torchrun sets (RANK,
        LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and GLOO_SOCKET_IFNAME. OMP_NUM_THREADS
        is 1 unless `env` says otherwise.
        """
        num_ranks = self.num_hosts * ranks_per_host
        shared_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})} | self._network()
        processes = RankProcesses()
        self._started.append(processes)
        for rank in range(num_ranks):
            host = rank // ranks_per_host
            rank_env = shared_env | rank_environment(rank, num_ranks, ranks_per_host)
            processes.add(rank, host, [*self._entry(host), *argv], rank_env)
        return processes

    @abstractmethod
    def _prepare(self) -> None:
        """Checks that the machine can make the hosts, and removes what dead owners left. Makes nothing; raises if it cannot."""

    @abstractmethod
    def _build(self) -> None:
        """Makes the hosts. If it fails halfway, `_remove` is called all the same."""

    @abstractmethod
    def _network(self) -> dict[str, str]:
        """Returns MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME for the ranks of the next `start`."""

    @abstractmethod
    def _entry(self, host: int) -> Sequence[str]:
        """Returns the words that, put before a command, run it on the host."""

    @abstractmethod
    def _remove(self) -> None:
        """Removes the hosts, after their ranks have been killed."""

    def _tear_down(self) -> None:
        with self._undo_sigterm, _interrupts_held_back():
            for processes in self._started:
                processes.kill()
            self._remove()
            self._started.clear()


class RankProcesses:
    """The processes of one `Hosts.start`, one per rank."""

    def __init__(self) -> None:
        self._ranks: list[_RunningRank] = []

    def add(self, rank: int, host: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts one rank, in a session of its own so that Ctrl-C reaches the owner of the hosts alone."""
        # Files and not pipes: a rank never blocks on a full pipe, and nothing has to be read while it runs.
        stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - they outlive this call
        process = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        self._ranks.append(_RunningRank(rank, host, process, stdout, stderr))

    def raise_if_failed(self) -> None:
        """Raises `RankError` if a rank has ended with an error by now; its peers are killed first."""
        if self._num_failed():
            self._settle_after_failure()
            raise self._error()

    def wait(self, timeout_s: float = 600, *, check: bool = True) -> list[RankResult]:
        """Waits until every rank has ended and returns their results, in rank order.

        If a rank fails, the others have 5 seconds to end by themselves and are then killed, since ranks that wait for a
        dead peer wait long. Raises `RankError` after `timeout_s`, and with `check` if a rank failed; the message quotes
        the last output of the first failed rank.
        """
        deadline = time.monotonic() + timeout_s
        while not self._num_failed() and self._num_running():
            if time.monotonic() > deadline:
                still_running = [running.rank for running in self._ranks if running.process.poll() is None]
                self.kill()
                raise RankError(f"after {timeout_s} s the ranks {still_running} had not ended", self._results())
            time.sleep(0.02)
        self._settle_after_failure()
        if check and self._num_failed():
            raise self._error()
        return self._results()

    def kill(self) -> None:
        """Kills the ranks that still run, with the processes they started, and waits until they are gone."""
        for running in self._ranks:
            if running.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)
                running.process.wait()

    def _settle_after_failure(self) -> None:
        grace_ends = time.monotonic() + _SECONDS_FOR_PEERS_OF_A_FAILED_RANK
        for running in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(timeout=max(0.0, grace_ends - time.monotonic()))
            if running.process.returncode is None:
                running.killed_as_peer = True
        self.kill()

    def _num_running(self) -> int:
        return sum(running.process.poll() is None for running in self._ranks)

    def _num_failed(self) -> int:
        return sum(running.process.poll() not in (None, 0) for running in self._ranks)

    def _results(self) -> list[RankResult]:
        return [running.result() for running in self._ranks]

    def _error(self) -> RankError:
        results = self._results()
        failed = [
            result
            for result, running in zip(results, self._ranks, strict=True)
            if result.returncode != 0 and not running.killed_as_peer
        ]
        first = failed[0]
        return RankError(
            f"rank {first.rank} ended with {first.returncode} (failed: {[result.rank for result in failed]})\n"
            f"{(first.stderr or first.stdout)[-4000:]}",
            results,
        )


@dataclass
class _RunningRank:
    rank: int
    host: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    killed_as_peer: bool = False

    def result(self) -> RankResult:
        """Reads the output of the rank, which must have ended."""
        texts = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return RankResult(self.rank, self.host, self.process.wait(), *texts)


def start_time(pid: int) -> int | None:
    """Returns when the process started, in clock ticks since boot; `None` if there is none. Unique together with the pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Holds back SIGINT and SIGTERM while the block runs: a second Ctrl-C must not leave half a cluster behind."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
