"""One run of the stand: all contenders in turn, round after round, on the same hosts and links -> `Results`.

    round 0: A B C ...   round 1: A B C ...

Contenders take turns so that other load on the machine affects all of them alike. A turn begins at the pretrained weights
with empty caches, and its first `warmup_steps` iterations are not timed.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fsdp_ciera.bench.contenders import Contender
from fsdp_ciera.bench.job import JobModel
from fsdp_ciera.bench.local import LocalCluster
from fsdp_ciera.bench.machine import machine_name, num_cores
from fsdp_ciera.bench.netns import NetnsCluster
from fsdp_ciera.bench.options import RunOptions
from fsdp_ciera.bench.rank import STOPPED
from fsdp_ciera.bench.ranks import RankProcesses
from fsdp_ciera.bench.results import Measured, Results, Setting, Step
from fsdp_ciera.processes import KEEP_MEMORY, free_port
from fsdp_ciera.units import parse_rate

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 20.0  # for the other ranks of a turn in which one has failed
_FIRST_PORT = 30000  # in namespaces, where nobody else listens


def cluster_of(options: RunOptions) -> NetnsCluster | LocalCluster:
    """Returns the hosts of a run. Raises `ValueError` for an invalid rate or number of hosts."""
    limit = options.limit
    return LocalCluster(options.hosts, limit) if options.loopback else NetnsCluster(options.hosts, limit)


@dataclass(frozen=True)
class Turn:
    """A contender's part of a round: the records of all ranks, in rank order."""

    contender: Contender
    round: int
    ranks: Sequence[dict[str, Any]]

    @property
    def failure(self) -> str | None:
        """Error of the first rank that failed by itself, else of the first that lost a peer; `None` if no rank failed."""
        failures = [str(rank["failure"]) for rank in self.ranks if "failure" in rank]
        signs_of_lost_peers = ("Connection closed by peer", "timed out", STOPPED)
        own_failures = [text for text in failures if not any(sign in text for sign in signs_of_lost_peers)]
        return next(iter(own_failures or failures), None)


def measure_contenders(
    options: RunOptions,
    model: JobModel,
    contenders: Sequence[Contender],
    tell: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> tuple[Results, dict[str, Any]]:
    """Runs all contenders in turn. Returns the results, and by key the last trace of each FSDP2 contender as plain JSON.

    Calls `tell(text, turns done, turns in all)` before each turn. Raises `NetnsError` if namespaces are not available (see
    `RunOptions.loopback`), and `RankError` when a rank's process dies. The record of a contender that fails says why.
    """
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="ciera-bench-") as name, cluster_of(options) as cluster:
        folder = Path(name)
        (folder / "setting.json").write_text(json.dumps(_setting_of_ranks(options, model)))
        environment = {**KEEP_MEMORY, "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        argv = [sys.executable, "-m", "fsdp_ciera.bench.rank", name]
        processes = cluster.start(argv, ranks_per_host=options.ranks_per_host, env=environment)
        plan = [(round_number, contender) for round_number in range(options.rounds) for contender in contenders]
        failed: set[str] = set()
        for num_done, (round_number, contender) in enumerate(plan):
            if contender.key in failed:  # it would fail again
                continue
            tell(f"round {round_number + 1} of {options.rounds}: {contender.label}", num_done, len(plan))
            turns.append(_take(folder, processes, len(turns), contender, round_number, options))
            if turns[-1].failure is not None:
                failed.add(contender.key)
        (folder / "end").touch()
        processes.wait(60)
    measured = tuple(
        _measured(contender, [turn for turn in turns if turn.contender is contender], options)
        for contender in contenders
    )
    traces = {turn.contender.key: turn.ranks[0]["trace"] for turn in turns if turn.ranks[0].get("trace")}
    return Results(setting=_setting(options, model), measured=measured), traces


def _take(
    folder: Path, processes: RankProcesses, number: int, contender: Contender, round_number: int, options: RunOptions
) -> Turn:
    """Lets the ranks take turn `number`.

    Stops the turn on ranks that wait for a failed peer or take too long, so that the next turn can begin.
    """
    paths = [folder / f"turn {number} rank {rank}.json" for rank in range(options.hosts * options.ranks_per_host)]
    port = free_port() if options.loopback else _FIRST_PORT + number % 1000
    unfinished = folder / "unfinished"
    unfinished.write_text(json.dumps({"contender": contender.key, "port": port}))
    unfinished.rename(folder / f"turn {number}.json")
    deadline = time.monotonic() + options.turn_seconds
    has_failed = False
    while not all(path.exists() for path in paths):
        processes.raise_if_failed()
        if not has_failed and any("failure" in json.loads(path.read_text()) for path in paths if path.exists()):
            has_failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            (folder / f"turn {number} stop").touch()
        time.sleep(_POLL_SECONDS)
    return Turn(contender, round_number, [json.loads(path.read_text()) for path in paths])


def _measured(contender: Contender, turns: Sequence[Turn], options: RunOptions) -> Measured:
    """Puts all rounds of a contender into one record."""
    failure = next((turn.failure for turn in turns if turn.failure is not None), None)
    finished = [turn for turn in turns if turn.failure is None]
    if not finished:
        return Measured(contender=contender.key, failure=failure or "it was not run")
    losses = [tuple(turn.ranks[0]["losses"]) for turn in finished]
    digests = [_digest(turn) for turn in finished]
    if failure is None and (len(set(losses)) > 1 or len(set(digests)) > 1):
        failure = "rounds that began with the same weights ended with different ones"
    return Measured(
        contender=contender.key,
        steps=tuple(step for turn in finished for step in _steps(turn, options)),
        losses=losses[0],
        parameters_digest=digests[0],
        peak_memory_bytes=max(rank["peak_memory_bytes"] for turn in finished for rank in turn.ranks),
        cache_bytes=max(rank.get("cache_bytes", 0) for turn in finished for rank in turn.ranks),
        notes=tuple(dict.fromkeys(note for turn in finished for rank in turn.ranks for note in rank.get("notes", ()))),
        failure=failure,
    )


def _digest(turn: Turn) -> str:
    digests = [str(rank.get("digest", "")) for rank in turn.ranks]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if all(digests) else ""


def _steps(turn: Turn, options: RunOptions) -> list[Step]:
    steps = []
    for ranks in zip(*(rank["steps"] for rank in turn.ranks), strict=True):

        def mean(name: str, ranks: tuple[dict[str, Any], ...] = ranks) -> float:
            return fmean(rank[name] for rank in ranks)

        def per_host(name: str, ranks: tuple[dict[str, Any], ...] = ranks) -> float:
            return float(sum(rank[name] for rank in ranks)) / options.hosts

        parts = {
            part: mean(part)
            for part in ("gather_seconds", "reduce_scatter_seconds", "other_collective_seconds", "codec_seconds")
        }
        steps.append(
            Step(
                round=turn.round,
                step=ranks[0]["step"],
                seconds=max(rank["seconds"] for rank in ranks),
                compute_seconds=mean("seconds") - sum(parts.values()),
                counted_bytes=per_host("counted_bytes"),
                gathered_bytes=per_host("gathered_bytes"),
                interface_bytes=None if options.loopback else per_host("interface_bytes"),
                loss=ranks[0]["loss"],
                **parts,
            )
        )
    return steps


def _setting_of_ranks(options: RunOptions, model: JobModel) -> dict[str, Any]:
    return {
        "job": str(model.folder.resolve()),
        "options": asdict(options.job),
        "warmup_steps": options.warmup_steps,
        "timed_steps": options.timed_steps,
        "reduce_scatter": options.reduce_scatter,
        "num_cores": num_cores(),
        "rate_bits_per_second": None if options.limit is None else parse_rate(options.limit),
    }


def _setting(options: RunOptions, model: JobModel) -> Setting:
    return Setting(
        hosts=options.hosts,
        ranks_per_host=options.ranks_per_host,
        rate=options.limit,
        mode="loopback" if options.loopback else "namespaces",
        rounds=options.rounds,
        warmup_steps=options.warmup_steps,
        timed_steps=options.timed_steps,
        model=model.name,
        num_parameters=model.num_parameters,
        tokens_per_rank=options.job.tokens_per_rank,
        learning_rate=options.job.learning_rate,
        reduce_dtype=options.job.reduce_dtype,
        reduce_scatter=options.reduce_scatter,
        machine=machine_name(),
        num_cores=num_cores(),
        torch_version=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["ciera", *sys.argv[1:]]),
    )
