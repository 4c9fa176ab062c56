"""The stand's mode without root: ranks on the loopback, and none of them left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_ciera.bench import local
from fsdp_ciera.bench.local import LocalCluster
from fsdp_ciera.errors import RankError

OWNER = """
import time
from fsdp_ciera.bench.local import LocalCluster
with LocalCluster(2) as cluster:
    cluster.start(["sh", "-c", "setsid sleep 300 & sleep 300"])
    print("up", flush=True)
    time.sleep(300)
"""
"""Each rank starts one process in its own session and one in another."""


def ranks_of(pid: int) -> set[int]:
    """The pids of what runs under the `LocalCluster`s of this owner."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or of another user
            continue
        if any(entry.startswith(f"{local.OWNER_VARIABLE}={pid}-".encode()) for entry in entries):
            found.add(int(folder.name))
    return found


def await_ranks(pid: int, number: int) -> None:
    deadline = time.monotonic() + 20
    while len(ranks_of(pid)) != number:
        assert time.monotonic() < deadline, (ranks_of(pid), number)
        time.sleep(0.02)


def start_owners(number: int) -> list[subprocess.Popen[str]]:
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(number)]
    for owner in owners:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        await_ranks(owner.pid, 6)
    return owners


def test_ranks_get_their_environment() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE")
    command = f"echo {' '.join(f'${name}' for name in names)}; echo $MASTER_PORT"
    with LocalCluster(2) as cluster:
        results = cluster.run(["sh", "-c", command], ranks_per_host=2, env={"MINE": "yes"}, timeout_s=60)
    lines = [result.stdout.splitlines() for result in results]
    assert [line[0] for line in lines] == [f"{rank} {rank % 2} 4 2 127.0.0.1 1 yes" for rank in range(4)]
    assert len({line[1] for line in lines}) == 1
    assert [result.host for result in results] == [0, 0, 1, 1]


def test_an_exception_leaves_no_process_behind() -> None:
    with pytest.raises(ZeroDivisionError), LocalCluster(3) as cluster:
        run = cluster.start(["sh", "-c", "setsid sleep 300 & sleep 300"])
        await_ranks(os.getpid(), 9)
        raise ZeroDivisionError
    await_ranks(os.getpid(), 0)
    assert [result.returncode for result in run.wait(0, check=False)] == [-signal.SIGKILL] * 3


def test_what_a_rank_that_ended_well_started_is_ended_too() -> None:
    with LocalCluster(1) as cluster:
        cluster.run(["sh", "-c", "setsid sleep 300 & exit 0"], timeout_s=30)
        await_ranks(os.getpid(), 1)
    await_ranks(os.getpid(), 0)


def test_stopped_owners_leave_no_process_behind() -> None:
    owners = start_owners(2)
    for owner, stop in zip(owners, (signal.SIGINT, signal.SIGTERM), strict=True):
        owner.send_signal(stop)
        owner.communicate(timeout=30)
        await_ranks(owner.pid, 0)


def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_has_is_not() -> None:
    living, dead = start_owners(2)
    try:
        dead.kill()
        dead.communicate()
        assert len(ranks_of(dead.pid)) == 6
        with LocalCluster(1):
            await_ranks(dead.pid, 0)
            assert len(ranks_of(living.pid)) == 6
    finally:
        living.terminate()
        living.communicate(timeout=30)
    await_ranks(living.pid, 0)


def test_a_failed_rank_is_named_and_its_peers_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_ciera.bench.ranks._SECONDS_FOR_PEERS_OF_A_FAILED_RANK", 0.2)
    command = 'if [ "$RANK" = 1 ]; then echo out of luck >&2; exit 3; fi; sleep 300'
    with LocalCluster(2) as cluster:
        with pytest.raises(RankError, match=r"(?s)rank 1 ended with 3.*out of luck") as failure:
            cluster.run(["sh", "-c", command], timeout_s=30)
        assert [result.returncode for result in failure.value.results] == [-signal.SIGKILL, 3]


def test_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="rate='200mbit' must be None on the loopback"):
        LocalCluster(2, rate="200mbit")
    with pytest.raises(ValueError, match="num_hosts=0 must be at least 1"):
        LocalCluster(0)
