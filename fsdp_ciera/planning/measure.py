"""What a plan needs to know of this job and machine: how fast links and codecs are, and how much memory is free."""

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
"""Of all ranks together: a sweep to 4 MiB a rank would take 4 GiB at 1,024 ranks."""
_MOST_SECONDS = 0.2
"""A payload that takes so long ends the sweep: the next one would take four to sixteen times as long."""
_REPEATS = 3
COST_VALUES = 1 << 20
_FEW_VALUES = 1 << 10
_SEVERAL_RUNS = 8
"""What they take longer than one is theirs; the rest is the gather's."""
_CHANGED_SHARE = 0.05
"""Of the values, in the gather that the cost of changes is measured with."""

MEASURED_COSTS: dict[tuple[str, str, torch.dtype, int], CodecCost] = {}
"""The registry of codec costs: measured once in a process, by backend, codec, dtype and block size."""


def measure_link(process_group: dist.ProcessGroup, backend: Backend) -> Link:
    """Comm(.) of a process group: all-gathers of 256 B to 4 MiB a rank, fitted to latency and bandwidth. Collective.

    Of each size the median of three counts, on the rank where it is longest. Cost: below two seconds, also on slow links,
    since a size that takes 0.2 s is the last one. Memory: at most 64 MiB.
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
    """The largest of each of these numbers over all ranks, which must give equally many. Collective."""
    mine = torch.from_numpy(np.array(values, "<f8").view(np.uint8))
    gathered = all_gather_bytes(mine, process_group).numpy().view("<f8")
    return [float(value) for value in gathered.max(axis=0)]


def _gather_seconds(process_group: dist.ProcessGroup, num_bytes: int, backend: Backend) -> float:
    local = backend.empty(num_bytes).zero_()
    output = backend.empty(num_bytes * process_group.size())
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        all_gather_flat(output, local, process_group, async_op=False)
        backend.read(output[:1])  # the device has done it
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])  # the first one waits for the slowest rank to arrive


def measure_costs(codecs: Sequence[str], dtype: torch.dtype, block_size: int, backend: Backend) -> dict[str, CodecCost]:
    """The stages of each codec on this machine, for values of `dtype`. A codec that cannot run here costs nothing.

    Cost: about 50 ms a codec, once in a process.
    """
    keys = {codec: (backend.name, codec, dtype, block_size) for codec in codecs}
    runs = {codec for codec in codecs if codec != "raw" and backend.supports(codec, dtype)}
    missing = [codec for codec in codecs if codec in runs and keys[codec] not in MEASURED_COSTS]
    if missing:
        few, many = _sample(dtype, _FEW_VALUES), _sample(dtype, COST_VALUES)
        rates = _rates_of_sample(*many, block_size)
        for codec in missing:
            MEASURED_COSTS[keys[codec]] = _measure_codec(codec, few, many, rates, block_size, backend)
    return {codec: MEASURED_COSTS[keys[codec]] if codec in runs else CodecCost() for codec in codecs}


def _measure_codec(
    codec: str,
    few_values: tuple[torch.Tensor, ...],
    many_values: tuple[torch.Tensor, ...],
    rates: Rates,
    block_size: int,
    backend: Backend,
) -> CodecCost:
    """`rates` are those between the two states of `many_values`."""
    change = change_of(codec, rates, block_size)
    one, _ = _stage_seconds(codec, few_values, 1, block_size, backend)
    several, _ = _stage_seconds(codec, few_values, _SEVERAL_RUNS, block_size, backend)
    unchanged, changed = _stage_seconds(codec, many_values, 1, block_size, backend)
    num_values = len(many_values[0])

    def cost(stage: str) -> StageCost:
        fixed = max(0.0, several[stage] - one[stage]) / (_SEVERAL_RUNS - 1)
        per_value = max(0.0, unchanged[stage] - one[stage]) / num_values
        more = max(0.0, changed[stage] - unchanged[stage]) / num_values
        return StageCost(
            fixed=fixed,
            per_value=per_value,
            per_changed=more / change if change else 0.0,
            per_gather=max(0.0, one[stage] - fixed),
        )

    return CodecCost(hash=cost("Hash"), cmp=cost("Cmp"), decmp=cost("Decmp"))


def _stage_seconds(
    codec: str, states: tuple[torch.Tensor, ...], num_runs: int, block_size: int, backend: Backend
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the stages for `num_runs` runs, when nothing changed and when some values did (from one state [n] to the
    other and back): the medians of a few gathers of two ranks, of which one sends."""
    first, second = (values.to(backend.device).repeat(num_runs) for values in states)
    num_values, dtype = len(first), first.dtype
    of_run = num_values // num_runs
    runs = tuple(Run("other", codec, number * of_run, of_run, ("sample",)) for number in range(num_runs))
    layout = Layout(runs, num_values, dtype)
    pair = Loopback(layout, backend, block_size)
    output = backend.empty(2 * num_values * dtype.itemsize).view(dtype).view(2, num_values)
    taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    last = None
    for values in (first, second, second, first, first, second, second, first, first):
        before = dict(pair.stage_seconds)
        num_bytes = pair.announce(0, values)
        settled = pair.settle(num_bytes)
        for channel in pair.channels:
            for its_codec in channel.codecs:
                its_codec.prepare()
        if pair.is_silent(num_bytes):
            pair.decode_nothing(1, output)
        elif num_bytes < pair.channels[0].raw_payload_bytes:
            payload = pair.take_payload(0, values)
            pair.decode(1, payload.expand(2, -1), output)
        else:
            for channel in pair.channels:
                channel.seed(values, values.expand(2, -1))
        backend.read(output.view(torch.uint8)[0, :1])  # the device has done it
        for channel, its in zip(pair.channels, settled, strict=True):
            channel.complete(its, None, output)
        spent = {stage: pair.stage_seconds[stage] - before[stage] for stage in before}
        if last is not None:
            taken[values is not last].append({stage: spent[stage] for stage in ("Hash", "Cmp", "Decmp")})
        last = values
    medians = [
        {stage: statistics.median(spent[stage] for spent in taken[changed]) for stage in ("Hash", "Cmp", "Decmp")}
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
    """Memory that is free for one rank: of its GPU, or its share of what the machine (or its container) has left.

    The ranks of a machine share its memory equally; `LOCAL_WORLD_SIZE`, which torchrun sets, says how many there are.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(said) if said.isdecimal() and int(said) else 1
    return min([_free_of_machine(), *_free_of_containers()]) // ranks


def _free_of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux: all of its memory, for want of better
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_containers() -> list[int]:
    """What the limits of control groups (version 2, then 1) leave."""
    found = []
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            texts = [Path(folder, name).read_text(encoding="ascii").strip() for name in (limit, used)]
        except OSError:
            continue
        if all(text.isdecimal() for text in texts):
            found.append(max(0, int(texts[0]) - int(texts[1])))
    return found
