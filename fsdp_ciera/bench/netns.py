"""Several hosts on one machine: network namespaces, each with one Ethernet interface, joined by a bridge.

    with NetnsCluster(num_hosts=4, rate="200mbit") as cluster:
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
that owns them: `NetnsCluster` first removes those whose owner is gone (killed, say, with SIGKILL).

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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fsdp_ciera.bench.ranks import Hosts, RankProcesses, RankResult, start_time
from fsdp_ciera.errors import NetnsError
from fsdp_ciera.processes import meeting_point
from fsdp_ciera.units import parse_rate

__all__ = [
    "InterfaceBytes",
    "NetnsCluster",
    "RankProcesses",
    "RankResult",
    "burst_bytes",
    "check_available",
    "sweep",
]

PREFIX = "ciera"
INTERFACE = "eth0"
MAX_HOSTS = 254

_OWNED_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-\d+-(?:switch|host\d+)")
_FIRST_PORT = 29500
_cluster_numbers = itertools.count()
_run_numbers = itertools.count()


class InterfaceBytes(NamedTuple):
    """What one host's interface counted since its creation: bytes with Ethernet, IP and TCP headers, and packets.

    A packet is what the stack hands to the interface, which with segmentation offload may be 64 KiB long.
    """

    tx: int
    rx: int
    tx_packets: int
    rx_packets: int

    def since(self, earlier: InterfaceBytes) -> InterfaceBytes:
        """Returns what was counted between `earlier` and this."""
        return InterfaceBytes(*(now - then for now, then in zip(self, earlier, strict=True)))


def check_available() -> None:
    """Raises `NetnsError`, whose text names the remedy, unless this process can make network namespaces."""
    if os.geteuid() != 0:
        raise NetnsError(
            f"network namespaces need root, but this runs as user {os.geteuid()}: run it as root (sudo, or a container "
            "started with --privileged)"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NetnsError(f"the command {tool!r} is missing: apt-get install iproute2")


def sweep() -> list[str]:
    """Removes the namespaces of dead owners, with what still runs in them. Returns the removed names."""
    leftovers = []
    for name in _namespaces():
        match = _OWNED_NAME.fullmatch(name)
        if match and start_time(int(match["pid"])) != int(match["start"]):
            leftovers.append(name)
    _delete(leftovers)
    return leftovers


class NetnsCluster(Hosts):
    """`num_hosts` namespaces that reach each other and nothing else, from `__enter__` to `__exit__`.

    Args:
        num_hosts: hosts, at most 254; host `h` has the address `10.83.0.{h + 1}`.
        rate: what each host may send, in bits per second as `tc` writes it ("200mbit", "1.5gbit"), or `None`: no limit.

    Everything is removed again at the end of the `with` block, at an exception, at Ctrl-C and at SIGTERM; after a
    SIGKILL, the next `NetnsCluster` of any process removes it. Raises `NetnsError` if the machine cannot do it.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts={num_hosts} must be from 1 to {MAX_HOSTS}")
        super().__init__(num_hosts, rate)
        self._burst_bytes = 0 if rate is None else burst_bytes(parse_rate(rate))
        self._switch = ""
        self._hosts: list[str] = []

    def interface_bytes(self) -> list[InterfaceBytes]:
        """Returns the current counters of each host's interface, read through netlink, which sends nothing."""
        return [self._interface_bytes(name) for name in self._hosts]

    def _prepare(self) -> None:
        check_available()
        sweep()

    def _network(self) -> dict[str, str]:
        port = _FIRST_PORT + next(_run_numbers) % 1000
        return meeting_point(port, _address(0), INTERFACE)

    def _entry(self, host: int) -> Sequence[str]:
        return ("ip", "netns", "exec", self._hosts[host])

    def _build(self) -> None:
        prefix = f"{PREFIX}-{os.getpid()}-{start_time(os.getpid())}-{next(_cluster_numbers)}"
        self._switch = f"{prefix}-switch"
        self._hosts = [f"{prefix}-host{host}" for host in range(self.num_hosts)]
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

    def _remove(self) -> None:
        _delete([self._switch, *self._hosts])
        self._hosts.clear()

    def _interface_bytes(self, name: str) -> InterfaceBytes:
        (link,) = json.loads(_ip("-n", name, "-j", "-s", "link", "show", "dev", INTERFACE))
        tx, rx = link["stats64"]["tx"], link["stats64"]["rx"]
        return InterfaceBytes(tx["bytes"], rx["bytes"], tx["packets"], rx["packets"])


def _address(host: int) -> str:
    return f"10.83.0.{host + 1}"


def burst_bytes(rate_bits_per_second: float) -> int:
    """Returns the bytes that tbf lets a host send at once after a pause.

    These are two super-packets or, at fast rates, what the host sends in 4 ms (the slack of tbf's timer).
    """
    return max(2 * 2**16, int(rate_bits_per_second / 8 * 0.004))


def _congestion_control() -> str:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else "reno"


def _call(*argv: str) -> str:
    completed = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if completed.returncode:
        message = completed.stderr.strip() or "no message"
        hint = " (a container must be started with --privileged)" if "not permitted" in message else ""
        raise NetnsError(f"{' '.join(argv)!r} ended with {completed.returncode}: {message}{hint}")
    return completed.stdout


def _ip(*args: str) -> str:
    return _call("ip", *args)


def _exec(namespace: str, *argv: str) -> str:
    return _ip("netns", "exec", namespace, *argv)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


def _delete(names: Sequence[str]) -> None:
    """Deletes those of the namespaces that exist, with what runs in them: a living process would keep its namespace alive."""
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
