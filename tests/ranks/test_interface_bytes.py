"""Bytes counted by the library beside those of the network interface, and the namespaces that this stands on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_ciera.bench import netns, ranks
from fsdp_ciera.errors import NetnsError, RankError
from places import BENCHMARKS

SLEEPER = """
import time
from fsdp_ciera.bench.netns import NetnsCluster
with NetnsCluster(2) as cluster:
    cluster.start(["sleep", "300"])
    print("up", flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips, with the reason, where network namespaces cannot be made."""
    try:
        with netns.NetnsCluster(1):
            pass
    except NetnsError as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def owned_by(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{netns.PREFIX}-{pid}-")]


def links_of_the_machine() -> set[str]:
    listed = subprocess.run(["ip", "-j", "link", "show"], capture_output=True, text=True, check=True).stdout
    return {link["ifname"] for link in json.loads(listed)}


def start_sleeper() -> subprocess.Popen[str]:
    """A process that owns a cluster whose two ranks sleep."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.rotating
def test_counted_bytes_equal_those_of_the_interface(namespaces: None, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    argv = [sys.executable, str(BENCHMARKS / "interface_bytes.py"), "--hosts", "4", "--json", str(figures_file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(figures_file.read_text())
    stock, ciera = figures["ranks"]["stock FSDP2"], figures["ranks"]["fsdp_ciera"]
    assert len(stock) == len(ciera) == 4
    for rank in (*stock, *ciera):
        counted, on_interface = rank["counted_bytes"], rank["interface_bytes"]
        assert counted > 20e6
        assert counted <= on_interface <= 1.01 * counted
        assert on_interface - rank["header_bytes"] == pytest.approx(counted, rel=5e-3)
    for rank_of_stock, rank_of_ciera in zip(stock, ciera, strict=True):
        assert rank_of_ciera["raw_bytes"] == rank_of_stock["counted_bytes"]
        assert rank_of_ciera["num_gathers"] == rank_of_stock["num_gathers"]
        assert rank_of_ciera["interface_bytes"] < 0.8 * rank_of_stock["interface_bytes"]


def test_ranks_get_their_environment_and_reach_each_other(namespaces: None) -> None:
    script = """
import os, socket
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(("", address[1])) as server:
        peers = [server.accept()[0] for _ in range(3)]
        print(*sorted(peer.recv(1).decode() for peer in peers))
        [peer.close() for peer in peers]
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(str(rank).encode())
    peer.recv(1)
print(*(os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MINE")))
"""
    with netns.NetnsCluster(2) as cluster:
        results = cluster.run([sys.executable, "-c", script], ranks_per_host=2, env={"MINE": "yes"}, timeout_s=30)
        counted = cluster.interface_bytes()
    assert [(result.rank, result.host) for result in results] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [result.stdout.splitlines()[-1] for result in results] == ["0 4 eth0 1 yes", "1 4 eth0 1 yes"] * 2
    assert results[0].stdout.splitlines()[0] == "1 2 3"
    assert counted[0].tx == counted[1].rx > 0
    assert counted[0].rx == counted[1].tx > 0


def test_rate_limits_what_a_host_sends(namespaces: None) -> None:
    num_bytes, megabits_per_second = 4_000_000, 40
    script = f"""
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(("", address[1])) as server:
        peer = server.accept()[0]
        start, received = time.monotonic(), 0
        while block := peer.recv(1 << 20):
            received += len(block)
        print(received, time.monotonic() - start)
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(bytes({num_bytes}))
"""
    with netns.NetnsCluster(2, rate=f"{megabits_per_second}mbit") as cluster:
        results = cluster.run([sys.executable, "-c", script], timeout_s=30)
        counted = cluster.interface_bytes()
    received, seconds = results[0].stdout.split()
    assert int(received) == num_bytes
    assert num_bytes * 8 / 1e6 / float(seconds) / megabits_per_second < 1.05  # no lower bound: machines are shared
    assert num_bytes < counted[1].tx < 1.05 * num_bytes  # what the full queue drops is sent again


def test_an_exception_leaves_nothing_behind(namespaces: None) -> None:
    before = links_of_the_machine()
    with pytest.raises(ZeroDivisionError), netns.NetnsCluster(3, rate="100mbit") as cluster:
        run = cluster.start(["sleep", "300"])
        assert len(owned_by(os.getpid())) == 4
        assert links_of_the_machine() == before
        raise ZeroDivisionError
    assert owned_by(os.getpid()) == []
    assert links_of_the_machine() == before
    assert [result.returncode for result in run.wait(0, check=False)] == [-signal.SIGKILL] * 3


def test_a_failure_while_building_leaves_nothing_behind(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "_congestion_control", lambda: "none-such")
    with pytest.raises(NetnsError, match="none-such"), netns.NetnsCluster(2):
        pass
    assert owned_by(os.getpid()) == []


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_owner_leaves_nothing_behind(namespaces: None, stop: signal.Signals) -> None:
    owner = start_sleeper()
    assert len(owned_by(owner.pid)) == 3
    owner.send_signal(stop)
    owner.communicate(timeout=20)
    assert owned_by(owner.pid) == []


def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_has_is_not(namespaces: None) -> None:
    living, dead = start_sleeper(), start_sleeper()
    try:
        orphans = [
            int(pid)
            for name in owned_by(dead.pid)
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        ]
        dead.kill()
        dead.communicate()
        assert len(owned_by(dead.pid)) == 3
        with netns.NetnsCluster(1):
            assert owned_by(dead.pid) == []
            assert len(owned_by(living.pid)) == 3
        assert len(orphans) == 2
        for pid in orphans:
            assert has_ended(pid)
    finally:
        living.terminate()
        living.communicate(timeout=20)


def has_ended(pid: int) -> bool:
    """Gone, or dead and not yet reaped by whoever adopted it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_failed_rank_is_named_and_its_peers_are_ended(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_SECONDS_FOR_PEERS_OF_A_FAILED_RANK", 0.2)
    command = 'if [ "$RANK" = 1 ]; then echo out of luck >&2; exit 3; fi; sleep 300'
    with netns.NetnsCluster(2) as cluster:
        with pytest.raises(RankError, match=r"(?s)rank 1 ended with 3.*out of luck") as failure:
            cluster.run(["sh", "-c", command], timeout_s=30)
        assert [result.returncode for result in failure.value.results] == [-signal.SIGKILL, 3]


def test_a_run_that_takes_too_long_is_ended(namespaces: None) -> None:
    start = time.monotonic()
    with (
        netns.NetnsCluster(1) as cluster,
        pytest.raises(RankError, match=r"after 0.2 s the ranks \[0\] had not ended"),
    ):
        cluster.run(["sleep", "300"], timeout_s=0.2)
    assert time.monotonic() - start < 20


def test_a_user_other_than_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(NetnsError, match="need root, but this runs as user 1000: run it as root"),
        netns.NetnsCluster(2),
    ):
        pass


def test_a_missing_ip_command_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetnsError, match=r"'ip' is missing: apt-get install iproute2"), netns.NetnsCluster(2):
        pass


@pytest.mark.parametrize("rate", ["200", "200mb", "-1mbit", "fast", "0mbit"])
def test_a_rate_that_tc_would_misread_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match='for example "200mbit"'):
        netns.NetnsCluster(2, rate=rate)
