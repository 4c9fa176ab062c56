"""Several hosts on one machine: network namespaces, each with one Ethernet interface, joined by a bridge.

    with Cluster(num_hosts=4, rate="200mbit") as cluster:
        results = cluster.run([sys.executable, "worker.py"], ranks_per_host=2, timeout_s=600)
        for host, counted in enumerate(cluster.interface_bytes()):
            print(host, counted.tx, counted.rx)

```
  namespace host0            namespace host1
  eth0 10.83.0.1 [tbf]       eth0 10.83.0.2 [tbf]      a veth pair each; tbf holds back what a host sends
        |                          |
        +------ bridge0 -----------+                   namespace switch
```
The bridge has a namespace of its own too, so nothing is added to the machine's own network, no packet can leave the
cluster, and deleting the namespaces deletes everything. Their names carry the pid and the start time of the process
that owns them: `Cluster` first removes those whose owner is gone (killed, say, with SIGKILL).

What is and is not like a real network:
- Segmentation offload is on, as on a network card, but here a super-packet of up to 64 KiB crosses the link in one
  piece, and interface counters count its headers once. On a real link of MTU 1500 every 1448 bytes of payload cost 66
  more (4.6 %).
- `rate` limits what each host sends, with those per-packet headers counted; what it receives is not limited on its own.
- There is no added latency (the netem module is not there) and no loss. TCP uses CUBIC or else Reno, whichever the
  machine allows in a namespace, so that BBR's periodic probing does not show in measurements.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NamedTuple

PREFIX = "ciera"
INTERFACE = "eth0"
MAX_HOSTS = 254

_OWNED_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-\d+-(?:switch|host\d+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_FIRST_PORT = 29500
_SECONDS_FOR_PEERS_OF_A_FAILED_RANK = 5.0
_cluster_numbers = itertools.count()
_run_numbers = itertools.count()


class NetnsError(RuntimeError):
    """Network namespaces cannot be used here, or a command on them failed. Says why and, if known, how to mend it."""


class RankError(RuntimeError):
    """A rank ended with an error or the run took too long. `results` has what each rank wrote until then."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


class InterfaceBytes(NamedTuple):
    """What one host's interface counted since it was made: bytes with Ethernet, IP and TCP headers, and packets.

    A packet is what the stack hands to the interface, which with segmentation offload may be 64 KiB long.
    """

    tx: int
    rx: int
    tx_packets: int
    rx_packets: int

    def since(self, earlier: InterfaceBytes) -> InterfaceBytes:
        """What was counted between `earlier` and this."""
        return InterfaceBytes(*(now - then for now, then in zip(self, earlier, strict=True)))


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. A negative `returncode` is the signal that ended it, as in `subprocess`."""

    rank: int
    host: int
    returncode: int
    stdout: str
    stderr: str


def check_available() -> None:
    """Raises `NetnsError`, with how to mend it, unless this process can make network namespaces."""
    if os.geteuid() != 0:
        raise NetnsError(
            f"network namespaces need root, but this runs as user {os.geteuid()}: run it as root (sudo, or a container "
            "started with --privileged)"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NetnsError(f"the command {tool!r} is missing: apt-get install iproute2")


def sweep() -> list[str]:
    """Removes the namespaces, and what still runs in them, of owners that are dead. Returns the names removed."""
    leftovers = []
    for name in _namespaces():
        match = _OWNED_NAME.fullmatch(name)
        if match and _start_time(int(match["pid"])) != int(match["start"]):
            leftovers.append(name)
    _remove(leftovers)
    return leftovers


class Cluster:
    """`num_hosts` namespaces that reach each other and nothing else, from `__enter__` to `__exit__`.

    Args:
        num_hosts: hosts, at most 254; host `h` has the address `10.83.0.{h + 1}`.
        rate: what each host may send, in bits per second as `tc` writes it ("200mbit", "1.5gbit"), or `None`: no limit.

    Everything is removed again at the end of the `with` block, at an exception, at Ctrl-C and at SIGTERM; after a
    SIGKILL by the next `Cluster` of any process. Raises `NetnsError` if the machine cannot do it.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts={num_hosts} must be from 1 to {MAX_HOSTS}")
        self.num_hosts = num_hosts
        self.rate = rate
        self._burst_bytes = 0 if rate is None else _burst_bytes(rate)
        self._switch = ""
        self._hosts: list[str] = []
        self._runs: list[Run] = []
        self._undo_sigterm = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        check_available()
        sweep()
        prefix = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_cluster_numbers)}"
        self._switch = f"{prefix}-switch"
        self._hosts = [f"{prefix}-host{host}" for host in range(self.num_hosts)]
        self._undo_sigterm.enter_context(_sigterm_raises())
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
        """Runs `argv` once per rank and waits for all: `start(...)`, then `wait(...)`."""
        return self.start(argv, ranks_per_host=ranks_per_host, env=env).wait(timeout_s, check=check)

    def start(self, argv: Sequence[str], *, ranks_per_host: int = 1, env: Mapping[str, str] | None = None) -> Run:
        """Starts `argv` once per rank; rank `r` runs on host `r // ranks_per_host`.

        Each rank has this process's environment, `env` on top of it, and on top of both what torchrun sets (RANK,
        LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and GLOO_SOCKET_IFNAME. OMP_NUM_THREADS
        is 1 unless `env` says otherwise.
        """
        num_ranks = self.num_hosts * ranks_per_host
        port = _FIRST_PORT + next(_run_numbers) % 1000
        run = Run()
        self._runs.append(run)
        for rank in range(num_ranks):
            host = rank // ranks_per_host
            rank_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})} | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % ranks_per_host),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": _address(0),
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            run.add(rank, host, ["ip", "netns", "exec", self._hosts[host], *argv], rank_env)
        return run

    def interface_bytes(self) -> list[InterfaceBytes]:
        """The counters of each host's interface now, read through netlink: reading them sends nothing."""
        return [self._interface_bytes(name) for name in self._hosts]

    def _build(self) -> None:
        congestion_control = _congestion_control()
        for name in (self._switch, *self._hosts):
            _ip("netns", "add", name)
            # Neighbour discovery and router solicitations of IPv6 would show in the counters.
            _exec(name, "sh", "-c", "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $f; done")
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", self._switch, "link", "set", "bridge0", "up")
        for host, name in enumerate(self._hosts):
            port = f"port{host}"
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{_address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _exec(name, "sh", "-c", f"echo {congestion_control} > /proc/sys/net/ipv4/tcp_congestion_control")
            if self.rate is not None:
                _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", self.rate,
                      "burst", str(self._burst_bytes), "limit", str(self._burst_bytes + 4 * 2**20))  # fmt: skip

    def _tear_down(self) -> None:
        with self._undo_sigterm, _interrupts_held_back():
            for run in self._runs:
                run.kill()
            _remove([self._switch, *self._hosts])
            self._runs.clear()
            self._hosts.clear()

    def _interface_bytes(self, name: str) -> InterfaceBytes:
        (link,) = json.loads(_ip("-n", name, "-j", "-s", "link", "show", "dev", INTERFACE))
        tx, rx = link["stats64"]["tx"], link["stats64"]["rx"]
        return InterfaceBytes(tx["bytes"], rx["bytes"], tx["packets"], rx["packets"])


class Run:
    """The processes of one `Cluster.start`, one per rank."""

    def __init__(self) -> None:
        self._ranks: list[_RunningRank] = []

    def add(self, rank: int, host: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts one rank, in a session of its own so that Ctrl-C reaches the owner of the cluster alone."""
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
        """Waits until every rank has ended and returns how, in rank order.

        If one fails, the others have 5 seconds to end by themselves and are then killed, since ranks that wait for a
        dead peer wait long. Raises `RankError` after `timeout_s`, and with `check` if a rank failed; the message has
        the end of what the first failed rank wrote.
        """
        deadline = time.monotonic() + timeout_s
        while not self._num_failed() and self._num_running():
            if time.monotonic() > deadline:
                running = [running.rank for running in self._ranks if running.process.poll() is None]
                self.kill()
                raise RankError(f"after {timeout_s} s the ranks {running} had not ended", self._results())
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
        """Reads what the rank wrote; the rank has ended."""
        texts = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return RankResult(self.rank, self.host, self.process.wait(), *texts)


def _address(host: int) -> str:
    return f"10.83.0.{host + 1}"


def _burst_bytes(rate: str) -> int:
    """What tbf may send at once: two super-packets, or 4 ms at fast rates (its timer's slack)."""
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f'rate={rate!r} must be a number and one of {", ".join(_BITS)}, for example "200mbit"')
    bytes_per_second = float(match[1]) * _BITS[match[2]] / 8
    return max(2 * 2**16, int(bytes_per_second * 0.004))


def _congestion_control() -> str:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else "reno"


def _call(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        message = done.stderr.strip() or "no message"
        hint = " (a container must be started with --privileged)" if "not permitted" in message else ""
        raise NetnsError(f"{' '.join(argv)!r} ended with {done.returncode}: {message}{hint}")
    return done.stdout


def _ip(*args: str) -> str:
    return _call("ip", *args)


def _exec(namespace: str, *argv: str) -> str:
    return _ip("netns", "exec", namespace, *argv)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; `None` if there is none. With the pid it is unique."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _remove(names: Sequence[str]) -> None:
    """Deletes those of the namespaces that exist, with what runs in them: a living process would keep one alive."""
    existing = set(_namespaces())
    for name in names:
        if name not in existing:
            continue
        try:
            _kill_all_in(name)
            _ip("netns", "delete", name)
        except NetnsError:
            if name in _namespaces():  # otherwise another process swept it at the same time
                raise


def _kill_all_in(namespace: str) -> None:
    deadline = time.monotonic() + 10
    while pids := _ip("netns", "pids", namespace).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise NetnsError(f"the processes {pids} in namespace {namespace} cannot be killed; it is left as it is")
        time.sleep(0.02)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises `SystemExit`, so that `with` blocks are left in order; unless the program handles it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait: a second Ctrl-C must not leave half a cluster behind."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
