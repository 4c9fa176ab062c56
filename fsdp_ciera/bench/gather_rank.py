"""One rank of `ciera bench gather`: gathers of one parameter group, plain and by each codec in turn, timed and compared.

    python -m fsdp_ciera.bench.gather_rank JOB_AS_JSON OUTCOMES_PATH

The parameter group is that of a module with one bf16 parameter under FSDP2, and a gather is the module's `unshard()`: the time
includes FSDP2's allocation and copies around the collective, for plain gathers too. Contenders differ in nothing but the
all-gather object that is set on the parameter group, so all of them gather the same shards in the same processes.

Values: normal with a deviation of 0.02, whose exponents hold 2.6 bits like those of trained weights. Between two gathers a
random share of them moves, four of five by one unit in the last place and the others by more (geometric): the entropy of
such a change is 0.53 bit a value where 7.6 % move, 0.12 bit for 1.2 % and 0.46 bit for 6.3 %. Training with AdamW was measured
at 0.55 and 0.12 bit (MLP weights of SmolLM2-135M at learning rates of 1e-4 and 1e-5) and at 0.47 bit (experts of a small MoE).
Shares far above 30 % were not seen in training. Steps go back and forth between two states of the shard.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_ciera._compat import (
    FSDPModule,
    all_gather_flat,
    get_comm,
    param_groups,
    set_comm,
    torch_fully_shard,
)
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.session import Session

BF16_BYTES = 2
ROW_VALUES = 64
"""Values in a row of the parameter; FSDP2 shards by rows."""
DEVIATION = 0.02
ONE_UNIT_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class GatherJob:
    """What all ranks measure: each size in order, and within a size each share of changed values in order."""

    sizes_bytes: tuple[int, ...]
    repeats: tuple[int, ...]
    """For each size, the number of timed gathers of each contender in a cell."""
    changed_percents: tuple[float, ...]
    codecs: tuple[str, ...]
    drain_bytes: int
    """Bytes that a host may send at once after a pause, used up before each gather; 0: links have no limit."""

    def to_json(self) -> str:
        """Returns text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GatherJob:
        """Returns the job that `to_json` wrote."""
        read = json.loads(text)
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in read.items()
        }
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One codec in one cell, all ranks together, with the fields of `gather_cells.Cell`."""

    codec: str
    size_bytes: int
    changed_percent: float
    measured_changed_percent: float
    plain_samples: tuple[float, ...]
    samples: tuple[float, ...]
    raw_bytes: float
    wire_bytes: float
    is_equal: bool


def main() -> None:
    """Measures everything; rank 0 appends each outcome to OUTCOMES_PATH, one JSON object a line."""
    job, path = GatherJob.from_json(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for outcome in measure_gathers(job):
        if dist.get_rank() == 0:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    dist.barrier()  # a rank that leaves early aborts the collectives of its peers
    dist.destroy_process_group()


@torch.no_grad()
def measure_gathers(job: GatherJob) -> Iterator[Outcome]:
    """Yields all outcomes, the same on every rank. Collective over the default process group, which must be gloo."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for size_bytes, repeats in zip(job.sizes_bytes, job.repeats, strict=True):
        weights = _ShardedWeights(size_bytes, job, mesh)
        weights.warm_up()
        for changed_percent in job.changed_percents:
            yield from weights.measure_codecs(changed_percent, repeats)
        weights.release()


class _Weights(nn.Module):
    """One parameter, and a forward whose call makes FSDP2 gather it."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        values = torch.randn(num_rows, ROW_VALUES, generator=torch.Generator().manual_seed(0)).mul_(DEVIATION)
        self.weight = nn.Parameter(values.bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`."""
        return x


class _ShardedWeights:
    """`_Weights` of `size_bytes` over all ranks under FSDP2, with one all-gather object for each contender."""

    def __init__(self, size_bytes: int, job: GatherJob, mesh: DeviceMesh) -> None:
        self._size_bytes, self._job = size_bytes, job
        world_size = dist.get_world_size()
        rows_per_rank = max(1, size_bytes // (world_size * ROW_VALUES * BF16_BYTES))
        self._module = _Weights(rows_per_rank * world_size)
        torch_fully_shard(self._module, mesh=mesh)
        (self._param_group,) = param_groups(self._module)
        parameter = self._module.weight
        assert isinstance(parameter, DTensor)
        self._shard = parameter.to_local()
        self._raw_bytes = (world_size - 1) * self._shard.numel() * BF16_BYTES
        self._plain = get_comm(self._param_group)
        # No limit for caches: what a codec brings is to be seen, and each codec is alone here.
        self._comms = {
            codec: CieraAllGather(self._param_group, CieraPolicy(codecs=(codec,), cache_budget=None), Session.of)
            for codec in job.codecs
        }
        self._process_group = mesh.get_group()
        self._random = torch.Generator().manual_seed(1 + dist.get_rank())

    def warm_up(self) -> None:
        """Runs a first forward, after which FSDP2 knows the names, and a full gather of each codec, which fills its caches."""
        self._module(torch.zeros(1))
        cast(FSDPModule, self._module).reshard()
        for comm in (self._plain, *self._comms.values()):
            self._gather(comm)
            cast(FSDPModule, self._module).reshard()

    def measure_codecs(self, changed_percent: float, repeats: int) -> Iterator[Outcome]:
        """Yields one outcome for each codec; see the top of this file."""
        before = self._shard.clone()
        after = moved(before, changed_percent / 100, self._random)
        wire_bytes_before = {codec: comm.stats().wire_bytes for codec, comm in self._comms.items()}
        seconds = torch.zeros(repeats, 1 + len(self._comms), dtype=torch.float64)
        is_equal = torch.ones(len(self._comms), dtype=torch.int64)
        for repeat in range(repeats):
            self._shard.copy_(after if repeat % 2 == 0 else before)
            seconds[repeat, 0] = self._gather(self._plain)
            expected = _bits(self._module.weight).clone()
            cast(FSDPModule, self._module).reshard()
            # There and back, so that no codec always follows the same one.
            for index, codec in list(enumerate(self._comms))[:: -1 if repeat % 2 else 1]:
                seconds[repeat, 1 + index] = self._gather(self._comms[codec])
                is_equal[index] &= torch.equal(_bits(self._module.weight), expected)
                cast(FSDPModule, self._module).reshard()
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(is_equal, dist.ReduceOp.MIN)
        mean_wire_bytes = [
            (comm.stats().wire_bytes - wire_bytes_before[codec]) / repeats for codec, comm in self._comms.items()
        ]
        changed_share = float((_bits(after) != _bits(before)).double().mean())
        means = torch.tensor([*mean_wire_bytes, changed_share], dtype=torch.float64)
        dist.all_reduce(means)
        *wire_bytes, changed_share = (means / dist.get_world_size()).tolist()
        columns = seconds.T.tolist()
        for index, codec in enumerate(self._comms):
            yield Outcome(
                codec=codec,
                size_bytes=self._size_bytes,
                changed_percent=changed_percent,
                measured_changed_percent=100 * changed_share,
                plain_samples=tuple(columns[0]),
                samples=tuple(columns[1 + index]),
                raw_bytes=float(self._raw_bytes),
                wire_bytes=wire_bytes[index],
                is_equal=bool(is_equal[index]),
            )

    def release(self) -> None:
        """Frees the caches of all codecs."""
        for comm in self._comms.values():
            comm.release()

    def _gather(self, comm: Any) -> float:
        """Gathers the parameter and returns this rank's seconds; the parameter stays gathered."""
        set_comm(self._param_group, comm)
        self._meet()
        start = time.perf_counter()
        cast(FSDPModule, self._module).unshard()
        return time.perf_counter() - start

    def _meet(self) -> None:
        """Lets all ranks start together, on links without a saved-up burst.

        After a pause a limited link takes a burst at once, which could be all of a small gather; in training another
        collective comes just before. A plain gather of twice the burst uses the burst up, and is the barrier too: one more
        round of messages would give the links time to save up again.
        """
        if not self._job.drain_bytes:
            dist.barrier()
            return
        world_size = dist.get_world_size()
        shard = torch.zeros(2 * self._job.drain_bytes // (world_size - 1), dtype=torch.uint8)
        output = torch.empty(world_size * len(shard), dtype=torch.uint8)
        all_gather_flat(output, shard, self._process_group, async_op=False)


def moved(values: torch.Tensor, share: float, random: torch.Generator) -> torch.Tensor:
    """Returns the bf16 `values` with a random `share` (0 to 1) moved by units in the last place; see the top of this file.

    With a share above 0 at least one value moves. Exponents change where a mantissa overflows, as in training.
    """
    if share == 0:
        return values.clone()
    flat = values.reshape(-1)
    moves = torch.rand(flat.numel(), generator=random) < share
    if not moves.any():
        moves[0] = True
    pattern = flat[moves].view(torch.int16).int()
    units = torch.empty(pattern.numel()).geometric_(ONE_UNIT_SHARE, generator=random).int().clamp_(max=100)
    # Up where down would leave the positive (or the negative) numbers.
    is_down = (torch.rand(pattern.numel(), generator=random) < 0.5) & (pattern & 0x7FFF > units)
    result = flat.clone()
    result[moves] = (pattern + torch.where(is_down, -units, units)).to(torch.int16).view(torch.bfloat16)
    return result.view_as(values)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.detach().view(torch.int16)


if __name__ == "__main__":
    main()
