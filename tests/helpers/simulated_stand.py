"""Output folders of a stand with known constants, written without the simulator's own code: calibration must find them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_ciera.bench.results import Measured, Results, Setting, Step
from fsdp_ciera.profiling.trace import Event, Trace, TracedGroup

LAYERS = 4
CORES = 2
VALUES = 40_000_000
"""Of the model; FSDP2 gathers 2 bytes of each, twice a step."""


@dataclass(frozen=True)
class Planted:
    """The constants of the stand."""

    call_seconds: float = 0.004
    hop_seconds: float = 0.001
    efficiency: float = 0.95
    contention: float = 0.8
    noise: float = 0.0
    """Relative, of every event's seconds."""
    bias: float = 1.0
    """Of measured medians over what the steps really take: what no simulator can know."""
    payload_share: float = 1.0
    """Of what a gather carries, over stock's."""
    decode_seconds: float = 0.0
    """On a rank with a core of its own, if it decoded the whole model."""
    rest_seconds: float = 0.0


STOCK = Planted()
OURS = Planted(payload_share=0.1, decode_seconds=0.2, rest_seconds=0.03)


def record(planted: Planted, contender: str, hosts: int, rate_bits: float | None, seed: int = 0) -> Trace:
    """A step, event by event."""
    dice = random.Random(f"{contender} {hosts} {rate_bits} {seed}")
    slowdown = 1 + planted.contention * max(0.0, hosts / CORES - 1)
    shard_values = VALUES // LAYERS // hosts
    burst = 0.0 if rate_bits is None else max(131072.0, rate_bits / 8 * 0.004)
    events: list[Event] = []
    idle = 1e9

    def add(node: str, phase: str, group: int | None, seconds: float, payload: int = 0, pieces: float = 0.0) -> None:
        nonlocal idle
        if node in ("AllGather", "ReduceScatter", "AllReduce"):
            rounds = 2 if node == "AllReduce" else 1
            seconds = planted.call_seconds + rounds * (hosts - 1) * planted.hop_seconds
            if rate_bits is not None:
                free = min(burst, idle * rate_bits / 8)
                seconds += max(0.0, pieces * payload - free) / (planted.efficiency * rate_bits / 8)
            idle = 0.0
        else:
            idle += seconds
        seconds *= 1 + planted.noise * dice.uniform(-1, 1)
        calls = int(pieces > 0)
        events.append(
            Event(node=node, phase=phase, group=group, seconds=seconds, payload_bytes=payload, num_collectives=calls)
        )

    def gather(phase: str, group: int) -> None:
        add("AllGather", phase, group, 0.0, round(2 * shard_values * planted.payload_share), hosts - 1)
        if planted.decode_seconds:
            add("Decmp", phase, group, planted.decode_seconds / LAYERS * (hosts - 1) / hosts * slowdown)

    for group in range(LAYERS):
        gather("forward", group)
        add("Compute", "forward", group, 0.05 * slowdown)
    for group in reversed(range(LAYERS)):
        gather("backward", group)
        add("Compute", "backward", group, 0.1 * slowdown)
        add("ReduceScatter", "backward", group, 0.0, 2 * shard_values, hosts - 1)
    add("AllReduce", "optimizer", None, 0.0, 4, 2 * (hosts - 1) / hosts)
    add("Compute", "optimizer", None, 0.4 / hosts * slowdown)
    total = sum(event.seconds for event in events) + planted.rest_seconds
    return Trace(
        contender=contender,
        world_size=hosts,
        ranks_per_host=1,
        num_cores=CORES,
        rate_bits_per_second=rate_bits,
        is_serial=True,
        item_bytes=2,
        reduce_item_bytes=2,
        num_parameters=VALUES,
        iteration_seconds=(total,),
        groups=tuple(TracedGroup(name=f"layers.{number}", values_per_rank=shard_values) for number in range(LAYERS)),
        events=tuple(events),
    )


def write_run(
    folder: Path,
    hosts: int,
    rate: str | None,
    contenders: Sequence[tuple[str, Planted]] = (("fsdp2", STOCK), ("value_delta", OURS)),
) -> Path:
    """A folder as `ciera bench e2e` leaves it; returns it."""
    (folder / "traces").mkdir(parents=True)
    measured = []
    for key, planted in contenders:
        rate_bits = None if rate is None else float(rate.removesuffix("mbit")) * 1e6
        trace = record(planted, key, hosts, rate_bits)
        (folder / "traces" / f"{key}.json").write_text(trace.to_json())
        seconds = planted.bias * sum(trace.iteration_seconds)
        steps = tuple(
            replace(_STEP, step=number, seconds=seconds * spread) for number, spread in enumerate((0.9, 1, 1.2))
        )
        measured.append(Measured(contender=key, steps=steps))
    setting = Setting(
        hosts=hosts, ranks_per_host=1, rate=rate, mode="namespaces", rounds=1, warmup_steps=0, timed_steps=3, model="planted",
        num_parameters=VALUES, tokens_per_rank=1, learning_rate=1e-5, reduce_dtype="bfloat16", reduce_scatter="ring",
        machine="none", num_cores=CORES, torch_version="0", date="", command="",
    )  # fmt: skip
    (folder / "results.json").write_text(Results(setting=setting, measured=tuple(measured)).to_json())
    return folder


_STEP = Step(
    round=0, step=0, seconds=0.0, compute_seconds=0.0, gather_seconds=0.0, reduce_scatter_seconds=0.0,
    other_collective_seconds=0.0, codec_seconds=0.0, counted_bytes=0.0, gathered_bytes=0.0, interface_bytes=None, loss=0.0,
)  # fmt: skip
