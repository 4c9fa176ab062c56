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
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.gather.layout import Layout, Run
from fsdp_ciera.gather.lockstep import LockstepState
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.memory import empty_bytes
from fsdp_ciera.policies.costs import CodecCost, StageCost, change_of
from fsdp_ciera.policies.links import Link, fit_link
from fsdp_ciera.policies.rates import Rates

_SWEEP_BYTES = (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
_MOST_SECONDS = 0.2
"""A payload that takes so long ends the sweep: the next one would take four to sixteen times as long."""
_REPEATS = 3
_COST_VALUES = 1 << 20
_FEW_VALUES = 1 << 10
_CHANGED_SHARE = 0.05
"""Of the values, in the gather that the cost of changes is measured with."""

MEASURED_COSTS: dict[tuple[str, torch.dtype, int], CodecCost] = {}
"""The registry of codec costs: measured once in a process, by codec, dtype and block size."""


def measure_link(group: dist.ProcessGroup) -> Link:
    """Comm(.) of `group`: all-gathers of 256 B to 4 MiB a rank, fitted to latency and bandwidth. Collective.

    Of each size the median of three counts, on the rank where it is longest. Cost: below two seconds, also on slow links,
    since a size that takes 0.2 s is the last one.
    """
    samples = []
    for num_bytes in _SWEEP_BYTES:
        seconds = agree_on_largest([_gather_seconds(group, num_bytes)], group)[0]
        samples.append((num_bytes, seconds))
        if seconds > _MOST_SECONDS:
            break
    return fit_link(samples, group.size())


def agree_on_largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """The largest of each of these numbers over all ranks of `group`, which must give equally many. Collective."""
    mine = torch.from_numpy(np.array(values, "<f8").view(np.uint8))
    gathered = all_gather_bytes(mine, group).numpy().view("<f8")
    return [float(value) for value in gathered.max(axis=0)]


def _gather_seconds(group: dist.ProcessGroup, num_bytes: int) -> float:
    local = torch.from_numpy(empty_bytes(num_bytes)).zero_()
    output = torch.from_numpy(empty_bytes(num_bytes * group.size()))
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        all_gather_flat(output, local, group, async_op=False)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])  # the first one waits for the slowest rank to arrive


def measure_costs(codecs: Sequence[str], dtype: torch.dtype, block_size: int) -> dict[str, CodecCost]:
    """The stages of each codec on this machine, for values of `dtype`. Cost: about 50 ms a codec, once in a process."""
    missing = [codec for codec in codecs if (codec, dtype, block_size) not in MEASURED_COSTS]
    if missing:
        few, many = _sample(dtype, _FEW_VALUES), _sample(dtype, _COST_VALUES)
        rates = _rates_of_sample(*many, block_size)
        for codec in missing:
            is_free = codec == "raw" or not CODECS[codec].supports(dtype)
            cost = CodecCost() if is_free else _measure_codec(codec, few, many, rates, block_size)
            MEASURED_COSTS[codec, dtype, block_size] = cost
    return {codec: MEASURED_COSTS[codec, dtype, block_size] for codec in codecs}


def _measure_codec(
    codec: str,
    few_values: tuple[torch.Tensor, torch.Tensor],
    many_values: tuple[torch.Tensor, torch.Tensor],
    rates: Rates,
    block_size: int,
) -> CodecCost:
    """`rates` are those between the two states of `many_values`."""
    change = change_of(codec, rates, block_size)
    few, _ = _stage_seconds(codec, *few_values, block_size)
    unchanged, changed = _stage_seconds(codec, *many_values, block_size)

    def cost(stage: str) -> StageCost:
        per_value = max(0.0, unchanged[stage] - few[stage]) / _COST_VALUES
        more = max(0.0, changed[stage] - unchanged[stage]) / _COST_VALUES
        return StageCost(fixed=few[stage], per_value=per_value, per_changed=more / change if change else 0.0)

    return CodecCost(hash=cost("Hash"), cmp=cost("Cmp"), decmp=cost("Decmp"))


def _stage_seconds(
    codec: str, first: torch.Tensor, second: torch.Tensor, block_size: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the stages when nothing changed, and when some values did (`first` [n] <-> `second` [n]): the medians of a
    few gathers of two ranks.

    Stages that happen between two of the paper's count with the one before; the checksum of a shard with Hash.
    """
    num_values, dtype = len(first), first.dtype
    layout = Layout((Run("other", codec, 0, num_values, ("sample",)),), num_values, dtype)
    sender, receiver = (LockstepState(layout, block_size, 2, rank) for rank in (0, 1))
    output = torch.from_numpy(empty_bytes(2 * num_values * dtype.itemsize)).view(dtype).view(2, num_values)
    taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    last = None
    for values in (first, second, second, first, first, second, second, first, first):
        before = dict(sender.stage_seconds)
        start = time.perf_counter()
        kernels_of(values).checksum(values.view(1, -1))
        encoded = sender.encode(values)
        payload = encoded.payload(encoded.num_bytes)
        between = time.perf_counter()
        receiver.prepare()
        receiver.decode(payload.expand(2, -1), [encoded.num_bytes] * 2, output)
        end = time.perf_counter()
        cmp_seconds = sender.stage_seconds["Cmp"] - before["Cmp"]
        if last is not None:
            found = {"Hash": between - start - cmp_seconds, "Cmp": cmp_seconds, "Decmp": end - between}
            taken[values is not last].append(found)
        last = values
    medians = [
        {stage: statistics.median(one[stage] for one in taken[changed]) for stage in ("Hash", "Cmp", "Decmp")}
        for changed in (False, True)
    ]
    return medians[0], medians[1]


def _sample(dtype: torch.dtype, num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states of a shard [num_values], as an optimizer step might leave them."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(num_values, generator=generator).mul_(0.02).to(dtype)
    words = FORMATS[dtype].words(first.clone())
    words[torch.rand(num_values, generator=generator).numpy() < _CHANGED_SHARE] += 1
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
