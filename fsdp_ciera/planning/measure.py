"""Measures what a plan depends on in this job and on this machine: links, codecs, and free memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_bytes, all_gather_flat
from fsdp_ciera.backends.base import Backend
from fsdp_ciera.gather.layout import Layout, Run
from fsdp_ciera.gather.loopback import Loopback
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.policies.costs import CodecCost, StageCost, change_of
from fsdp_ciera.policies.links import Link, fit_link
from fsdp_ciera.policies.rates import Rates

_SWEEP_BYTES = (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
_MOST_GATHERED_BYTES = 1 << 26
"""Most bytes that a gather of the sweep collects from all ranks: a sweep to 4 MiB a rank would take 4 GiB at 1,024 ranks."""
_MOST_SECONDS = 0.2
"""A payload that takes this long ends the sweep: the next one would take four to sixteen times as long."""
_REPEATS = 3
COST_VALUES = 1 << 20
"""Number of values that the costs per value are measured with."""
_FEW_VALUES = 1 << 10
"""Number of values that the fixed costs are measured with."""
_SEVERAL_RUNS = 8
"""Number of runs that a single run is compared with: the difference belongs to the runs, the rest to the gather."""
_CHANGED_SHARE = 0.05
"""Share of the values that change in the gather with which the cost of changes is measured."""

MEASURED_COSTS: dict[tuple[str, str, torch.dtype, int], CodecCost] = {}
"""The codec costs that this process has measured, by backend, codec, dtype and block size."""


def measure_link(process_group: dist.ProcessGroup, backend: Backend) -> Link:
    """Measures Comm(.) of a process group: fits latency and bandwidth to all-gathers of 256 B to 4 MiB a rank. Collective.

    For each size the median of three gathers counts, on the rank where it is longest. Cost: below two seconds, also on slow
    links, since a size that takes 0.2 s is the last one. Memory: at most 64 MiB.
    """
    samples: list[tuple[int, float]] = []
    for num_bytes in _SWEEP_BYTES:
        if samples[1:] and num_bytes * process_group.size() > _MOST_GATHERED_BYTES:
            break
        seconds = agree_on_largest([_gather_seconds(process_group, num_bytes, backend)], process_group)[0]
        samples.append((num_bytes, seconds))
        if seconds > _MOST_SECONDS:
            break
    return fit_link(samples, process_group.size())


def agree_on_largest(values: Sequence[float], process_group: dist.ProcessGroup) -> list[float]:
    """The largest value over all ranks at each position of `values`, which must be equally long on all ranks. Collective."""
    own_bytes = torch.from_numpy(np.array(values, "<f8").view(np.uint8))
    gathered = all_gather_bytes(own_bytes, process_group).numpy().view("<f8")
    return [float(value) for value in gathered.max(axis=0)]


def _gather_seconds(process_group: dist.ProcessGroup, num_bytes: int, backend: Backend) -> float:
    local = backend.empty(num_bytes).zero_()
    output = backend.empty(num_bytes * process_group.size())
    seconds = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        all_gather_flat(output, local, process_group, async_op=False)
        backend.read(output[:1])  # the device has done it
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first one waits for the slowest rank to arrive


def measure_costs(codecs: Sequence[str], dtype: torch.dtype, block_size: int, backend: Backend) -> dict[str, CodecCost]:
    """The cost of each codec on this machine, for values of `dtype`. A codec that cannot run here costs nothing.

    Cost: about 50 ms a codec, once in a process.
    """
    keys = {codec: (backend.name, codec, dtype, block_size) for codec in codecs}
    runnable = {codec for codec in codecs if codec != "raw" and backend.supports(codec, dtype)}
    missing = [codec for codec in codecs if codec in runnable and keys[codec] not in MEASURED_COSTS]
    if missing:
        few, many = _sample(dtype, _FEW_VALUES), _sample(dtype, COST_VALUES)
        rates = _rates_of_sample(*many, block_size)
        for codec in missing:
            MEASURED_COSTS[keys[codec]] = _measure_codec(codec, few, many, rates, block_size, backend)
    return {codec: MEASURED_COSTS[keys[codec]] if codec in runnable else CodecCost() for codec in codecs}


def _measure_codec(
    codec: str,
    few_values: tuple[torch.Tensor, ...],
    many_values: tuple[torch.Tensor, ...],
    rates: Rates,
    block_size: int,
    backend: Backend,
) -> CodecCost:
    """The cost of one codec, from few and from many values, in two states each. `rates` are those of the change from the first
    to the second state of `many_values`."""
    change = change_of(codec, rates, block_size)
    single, _ = _stage_seconds(codec, few_values, 1, block_size, backend)
    several, _ = _stage_seconds(codec, few_values, _SEVERAL_RUNS, block_size, backend)
    unchanged, changed = _stage_seconds(codec, many_values, 1, block_size, backend)
    num_values = len(many_values[0])

    def cost(stage: str) -> StageCost:
        fixed = max(0.0, several[stage] - single[stage]) / (_SEVERAL_RUNS - 1)
        per_value = max(0.0, unchanged[stage] - single[stage]) / num_values
        change_seconds = max(0.0, changed[stage] - unchanged[stage]) / num_values
        return StageCost(
            fixed=fixed,
            per_value=per_value,
            per_changed=change_seconds / change if change else 0.0,
            per_gather=max(0.0, single[stage] - fixed),
        )

    return CodecCost(hash=cost("Hash"), cmp=cost("Cmp"), decmp=cost("Decmp"))


def _stage_seconds(
    codec: str, states: tuple[torch.Tensor, ...], num_runs: int, block_size: int, backend: Backend
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each stage for `num_runs` runs when nothing changed, and when some values changed (from one state [n] to the
    other and back): medians of a few gathers of two ranks, of which one sends."""
    first, second = (values.to(backend.device).repeat(num_runs) for values in states)
    num_values, dtype = len(first), first.dtype
    run_values = num_values // num_runs
    runs = tuple(Run("other", codec, index * run_values, run_values, ("sample",)) for index in range(num_runs))
    layout = Layout(runs, num_values, dtype)
    pair = Loopback(layout, backend, block_size)
    output = backend.empty(2 * num_values * dtype.itemsize).view(dtype).view(2, num_values)
    samples: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    last = None
    for values in (first, second, second, first, first, second, second, first, first):
        before = dict(pair.stage_seconds)
        num_bytes = pair.announce(0, values)
        settled = pair.settle_all(num_bytes)
        for channel in pair.channels:
            for run_codec in channel.codecs:
                run_codec.prepare()
        if pair.is_silent(num_bytes):
            pair.decode_nothing(1, output)
        elif num_bytes < pair.channels[0].raw_payload_bytes:
            payload = pair.take_payload(0, values)
            pair.decode(1, payload.expand(2, -1), output)
        else:
            for channel in pair.channels:
                channel.seed(values, values.expand(2, -1))
        backend.read(output.view(torch.uint8)[0, :1])  # the device has done it
        for channel, settled_sizes in zip(pair.channels, settled, strict=True):
            channel.complete(settled_sizes, None, output)
        spent = {stage: pair.stage_seconds[stage] - before[stage] for stage in before}
        if last is not None:
            samples[values is not last].append({stage: spent[stage] for stage in ("Hash", "Cmp", "Decmp")})
        last = values
    medians = [
        {stage: statistics.median(spent[stage] for spent in samples[changed]) for stage in ("Hash", "Cmp", "Decmp")}
        for changed in (False, True)
    ]
    return medians[0], medians[1]


def _sample(dtype: torch.dtype, num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states of a shard [num_values], as an optimizer step might leave them."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    first = torch.randn(num_values, generator=generator, dtype=torch.float32, device="cpu").mul_(0.02).to(dtype)
    words = FORMATS[dtype].words(first.clone())
    dice = torch.rand(num_values, generator=generator, dtype=torch.float32, device="cpu")
    words[dice.numpy() < _CHANGED_SHARE] += 1
    return first, torch.from_numpy(words.view(np.uint8)).view(dtype)


def _rates_of_sample(before: torch.Tensor, after: torch.Tensor, block_size: int) -> Rates:
    fmt = FORMATS[before.dtype]
    first, second = fmt.words(before), fmt.words(after)
    exponents = ((first ^ second) >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1) != 0
    blocks = exponents[: len(exponents) // block_size * block_size].reshape(-1, block_size).any(axis=1)
    return Rates(
        value_change=float((first != second).mean()),
        exponent_change=float(exponents.mean()),
        block_change={block_size: float(blocks.mean())},
    )


def free_memory_bytes(device: torch.device) -> int:
    """Bytes of memory that are free for one rank: those of its GPU, or its share of what the machine (or its container) has.

    The ranks of a machine share its memory equally; `LOCAL_WORLD_SIZE`, which torchrun sets, is their number.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    num_ranks = int(local_world_size) if local_world_size.isdecimal() and int(local_world_size) else 1
    return min([_free_of_machine(), *_free_of_containers()]) // num_ranks


def _free_of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all of its memory counts as free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_containers() -> list[int]:
    """Bytes that the limits of control groups (version 2, then 1) leave."""
    free_bytes = []
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            texts = [Path(folder, name).read_text(encoding="ascii").strip() for name in (limit_name, used_name)]
        except OSError:
            continue
        if all(text.isdecimal() for text in texts):
            free_bytes.append(max(0, int(texts[0]) - int(texts[1])))
    return free_bytes
