"""One rank of the stand: waits for its turns, and trains the job in a process of its own for each.

    python -m fsdp_ciera.bench.rank FOLDER

`FOLDER` holds setting.json and, turn by turn, `turn N.json` with the contender. The rank forks for each turn: imports and the
model are there already, and peak memory, threads and process group are the turn's own. The turn's figures go to
`turn N rank R.json`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from fsdp_ciera import api
from fsdp_ciera.bench.contenders import CONTENDERS, Contender, reshard_size
from fsdp_ciera.bench.job import TrainingJob, load
from fsdp_ciera.bench.options import JobOptions
from fsdp_ciera.bench.peers import Int8AllGather, PeerAllGather, StatelessAllGather, use
from fsdp_ciera.bench.ring import ring_reduce_scatter
from fsdp_ciera.profiling.instruments import CODEC_STAGES, Instruments, leaves_host
from fsdp_ciera.profiling.tracing import RecordedStep, build_trace, param_groups_of
from fsdp_ciera.recipes.shard import decoder_layers
from fsdp_ciera.recipes.train import parameters_digest

TIMEOUT = timedelta(minutes=5)
_POLL_SECONDS = 0.02
STOPPED = "stopped: a peer had failed, or the turn took longer than --turn-seconds"


def main() -> None:
    """Takes turns until the file `end` is there."""
    folder = Path(sys.argv[1])
    setting = json.loads((folder / "setting.json").read_text())
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    model, tokens = load(Path(setting["job"]))
    turn = 0
    while True:
        path = folder / f"turn {turn}.json"
        while not path.exists():
            if (folder / "end").exists() or os.getppid() == 1:
                return
            time.sleep(_POLL_SECONDS)
        turn_setting = json.loads(path.read_text())
        os.environ["MASTER_PORT"] = str(turn_setting["port"])
        work = partial(take_turn, CONTENDERS[turn_setting["contender"]], model, tokens, setting)
        run_forked(work, folder / f"turn {turn} rank {rank}.json", folder / f"turn {turn} stop")
        turn += 1


def run_forked(work: Callable[[], dict[str, Any]], result: Path, stop: Path) -> None:
    """Runs `work` in a child process and kills it when the file `stop` appears.

    Afterwards the file `result` has the record that `work` returned, or {"failure": why}.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                record = work()
            except BaseException as error:
                traceback.print_exc()
                record = {
                    "failure": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                }
            _write(result, record)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)  # no exit handlers: those of threads that only the parent has
    was_stopped = False
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if stop.exists() and not was_stopped:
            os.kill(child, signal.SIGKILL)
            was_stopped = True
        time.sleep(_POLL_SECONDS)
    if not result.exists():
        _write(result, {"failure": STOPPED if was_stopped else f"the rank's process ended with status {ended[1]}"})


def take_turn(contender: Contender, model: nn.Module, tokens: Tensor, setting: dict[str, Any]) -> dict[str, Any]:
    """Trains and measures; returns what the driver needs of this rank, as plain JSON."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    options = JobOptions(**setting["options"])
    custom = ring_reduce_scatter if setting["reduce_scatter"] == "ring" else None
    with Instruments(custom) as watch:
        subject = Zero3Subject(model, tokens, options, watch) if contender.is_zero3 else \
            FSDP2Subject(contender, model, tokens, options, watch)  # fmt: skip
        record = measure_steps(subject, watch, setting["warmup_steps"], setting["timed_steps"])
        record |= subject.facts()
        if dist.get_rank() == 0 and isinstance(subject, FSDP2Subject):
            record["trace"] = subject.trace(setting)
    dist.barrier()
    dist.destroy_process_group()
    return record


def measure_steps(subject: Subject, watch: Instruments, warmup_steps: int, timed_steps: int) -> dict[str, Any]:
    """Takes warm-up and timed steps; returns the figures of the timed ones and the losses of all.

    Bytes of the interface are read at the same moments as the clock.
    """
    losses, steps = [], []
    dist.barrier()
    for step in range(warmup_steps + timed_steps):
        gathered_before, interface_before = subject.gathered_bytes(), interface_bytes()
        watch.begin()
        losses.append(subject.step(step))
        began, ended, recorded = watch.end()
        codec_seconds = subject.codec_seconds()
        if step < warmup_steps:
            continue
        seconds = {
            part: sum(event.seconds for event in recorded if event.node in nodes) for part, nodes in _PARTS.items()
        }
        interface_after = interface_bytes()
        gathered_after = subject.gathered_bytes()
        collective_bytes = {
            part: sum(event.sent_bytes for event in recorded if event.node in nodes) for part, nodes in _PARTS.items()
        }
        gathered_bytes = (
            collective_bytes["gather"]
            if gathered_before is None or gathered_after is None
            else gathered_after - gathered_before
        )
        steps.append({
            "step": step,
            "seconds": ended - began,
            "gather_seconds": seconds["gather"],
            "reduce_scatter_seconds": seconds["reduce_scatter"],
            "other_collective_seconds": seconds["other"],
            "codec_seconds": seconds["codec"] + codec_seconds,
            "gathered_bytes": gathered_bytes,
            "counted_bytes": gathered_bytes + collective_bytes["reduce_scatter"] + collective_bytes["other"],
            "interface_bytes": None if interface_after is None or interface_before is None
            else interface_after - interface_before,
            "loss": losses[-1],
        })  # fmt: skip
        subject.keep(RecordedStep(began, ended, recorded, tuple(watch.phases)))
    return {"steps": steps, "losses": losses}


_PARTS = {
    "gather": ("AllGather", "InNode"),
    "reduce_scatter": ("ReduceScatter",),
    "other": ("AllReduce",),
    "codec": CODEC_STAGES,
}


class Subject(ABC):
    """A contender at work."""

    @abstractmethod
    def step(self, step: int) -> float:
        """Does one optimizer step and returns its loss."""

    def gathered_bytes(self) -> float | None:
        """Returns the bytes that this rank has sent to other hosts in gathers, by the contender's count; `None` without one."""
        return None

    def codec_seconds(self) -> float:
        """Returns the seconds in codecs since the last call, as far as instruments cannot see them."""
        return 0.0

    def keep(self, step: RecordedStep) -> None:
        """Receives each timed step after it was recorded."""
        return None

    def facts(self) -> dict[str, Any]:
        """Returns the figures of the whole turn, as plain JSON."""
        return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


class FSDP2Subject(Subject):
    """Stock FSDP2, ours, and the rivals that sit in FSDP2's place."""

    def __init__(
        self, contender: Contender, model: nn.Module, tokens: Tensor, options: JobOptions, watch: Instruments
    ) -> None:
        self.contender = contender
        self.model = model
        self.options = options
        ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
        num_hosts = dist.get_world_size() // ranks_per_host
        policy = contender.make_policy(options.learning_rate, ranks_per_host)
        self.is_ours = policy is not None
        shard_model(model, contender, policy, options, reshard_size(num_hosts, ranks_per_host))
        self.peers: list[PeerAllGather] = []
        if contender.gather is not None:
            self.peers = list(use(model, _PEER_GATHERS[contender.gather]))
        self.job = TrainingJob(model, tokens, options, watch, settle=contender.settle)
        self._leaves = leaves_host(dist.group.WORLD)  # type: ignore[arg-type]
        self._peer_codec_seconds = 0.0
        self._steps: list[RecordedStep] = []

    def step(self, step: int) -> float:
        return self.job.step(step)

    def gathered_bytes(self) -> float | None:
        if self.peers:
            return float(self._leaves * sum(peer.sent_bytes for peer in self.peers))
        if not self.is_ours:
            return None
        links = api.stats(self.model).by_link
        outside = {"flat": self._leaves, "between_nodes": True}
        return float(sum(amount.wire_bytes for link, amount in links.items() if outside.get(link, False)))

    def codec_seconds(self) -> float:
        before, self._peer_codec_seconds = self._peer_codec_seconds, sum(peer.codec_seconds for peer in self.peers)
        return self._peer_codec_seconds - before

    def keep(self, step: RecordedStep) -> None:
        self._steps.append(step)

    def facts(self) -> dict[str, Any]:
        facts = {**super().facts(), "digest": parameters_digest(self.model), "cache_bytes": 0, "notes": []}
        if self.is_ours:
            counts = api.stats(self.model)
            facts |= {"cache_bytes": counts.cache_bytes, "notes": list(counts.notes)}
        return facts

    def trace(self, setting: dict[str, Any]) -> Any:
        """Returns the median timed step as a `Trace`, as plain JSON; `None` if the events of steps differ in kind."""
        with suppress(ValueError):
            return json.loads(
                build_trace(
                    self._steps,
                    param_groups_of(self.model),
                    contender=self.contender.key,
                    world_size=dist.get_world_size(),
                    ranks_per_host=int(os.environ["LOCAL_WORLD_SIZE"]),
                    num_cores=setting["num_cores"],
                    rate_bits_per_second=setting["rate_bits_per_second"],
                    is_serial=True,
                    item_bytes=2,
                    reduce_item_bytes=getattr(torch, self.options.reduce_dtype).itemsize,
                    num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
                ).to_json()
            )
        return None


def shard_model(
    model: nn.Module, contender: Contender, policy: Any, options: JobOptions, num_reshard_ranks: int | None
) -> None:
    """Shards each decoder layer and the root, all with the same `reshard_after_forward`.

    FSDP2's default for the root differs, and would by itself make contenders differ in what they free.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reshard = num_reshard_ranks if contender.reshard_after_forward == "int" else contender.reshard_after_forward
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, options.reduce_dtype))
    shard: Callable[..., Any] = stock_fully_shard
    if policy is not None:
        shard = partial(api.fully_shard, ciera_policy=policy)
    for module in (*decoder_layers(model), model):
        shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)


class Zero3Subject(Subject):
    """DeepSpeed ZeRO-3."""

    def __init__(self, model: nn.Module, tokens: Tensor, options: JobOptions, watch: Instruments) -> None:
        from fsdp_ciera.bench.zero3 import Zero3Job

        self.job = Zero3Job(model, tokens, options, watch)

    def step(self, step: int) -> float:
        return self.job.step(step)


_PEER_GATHERS: dict[str, Callable[[], PeerAllGather]] = {
    "int8": Int8AllGather,
    "zstd": partial(StatelessAllGather, "zstd"),
    "zipnn": partial(StatelessAllGather, "zipnn"),
}


def interface_bytes() -> int | None:
    """Returns the bytes that left this host by its interface, on its first rank, and 0 on others.

    Returns `None` if the host has no interface of its own.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if name.startswith("lo"):
        return None
    if int(os.environ["LOCAL_RANK"]):
        return 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        interface, _, counts = line.partition(":")
        if interface.strip() == name:
            return int(counts.split()[8])
    return None


def _write(path: Path, record: dict[str, Any]) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
