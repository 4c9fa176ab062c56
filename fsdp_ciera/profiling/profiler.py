"""`Profiler`: what optimizer steps change in the shards of a model, measured while any loop trains it (paper Figs. 2 to 5).

    profiler = Profiler(model)
    for batch in batches:
        ...
        optimizer.step()
        profiler.step()
    profile = profiler.result()

A look at the shards is a pass over the local values (fsdp_ciera.profiling.counts), some codecs tried on a part of them, and
one all-reduce, which runs beside the next training step and is read at the next look.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_ciera._compat import FSDPModule, param_groups, sharded_parameters
from fsdp_ciera.errors import CieraMismatchError, CieraPolicyError
from fsdp_ciera.kernels.formats import FORMATS, Words
from fsdp_ciera.kernels.memory import zeros_tensor
from fsdp_ciera.policies.categories import CATEGORIES, Category, categorize
from fsdp_ciera.policies.rates import BLOCK_SIZES, Rates
from fsdp_ciera.profiling.counts import CountLayout, Row, ShardCounter
from fsdp_ciera.profiling.profile import ALL, Profile, ProfiledStep
from fsdp_ciera.profiling.trials import TRIED_CODECS, CodecTrials, Part, TriedShard


class _Shard(NamedTuple):
    """A local shard [n], as it is stored, with the dtype that it is gathered in."""

    name: str
    values: torch.Tensor
    dtype: torch.dtype
    num_global_values: int
    num_parts: int
    """Ranks that the parameter is cut over."""
    param_group: int
    """Number of its parameter group; the shards of one are gathered together."""


class Profiler:
    """Measures the rates of change of a model under FSDP2, or of a plain one, at every `interval`-th optimizer step.

    Call `step()` once after each `optimizer.step()`, on all ranks together when the model has DTensor parameters (else
    nothing is communicated), and `result()` at the end. Shards are compared in the dtype in which they are gathered: `dtype`,
    otherwise FSDP2's `mp_policy.param_dtype`, otherwise the parameter's own; what is not bf16, fp16 or fp32 then is skipped
    and noted. Changes by the first `warmup_steps` steps are in the series only (the paper leaves 30 out). The model and what
    it computes are not touched.

    Memory: one copy of the local shards in the gathered dtype, on the host, and some megabytes of scratch. Communication:
    an all-reduce of about 26 KB and 8 bytes a parameter and rank each look, which nobody waits for.
    Raises `CieraPolicyError` for arguments that are not allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        interval: int = 1,
        warmup_steps: int = 30,
        block_sizes: Sequence[int] = BLOCK_SIZES,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_count("interval", interval, least=1)
        _check_count("warmup_steps", warmup_steps, least=0)
        if not block_sizes:
            raise CieraPolicyError("block_sizes=() must hold at least one size, for example (512,)")
        for size in block_sizes:
            _check_count("block_sizes", size, least=1)
        if dtype is not None and dtype not in FORMATS:
            allowed = ", ".join(map(str, FORMATS))
            raise CieraPolicyError(f"dtype={dtype} is no dtype whose changes can be counted; allowed: {allowed}")
        self._model = model
        self._interval = interval
        self._warmup_steps = warmup_steps
        self._dtype = dtype
        sizes = sorted(set(block_sizes))
        self._kept_block_size = 512 if 512 in sizes else sizes[-1]
        self._layout = CountLayout(sizes, TRIED_CODECS)
        self._num_ranks, self._rank = 1, 0
        self._counters: dict[torch.dtype, ShardCounter] = {}
        self._kept: list[Words] = []
        self._described: list[tuple[str, torch.dtype, int, int]] = []
        self._param_groups: list[int] = []
        self._notes: list[str] = []
        self._trials = CodecTrials()
        self._num_steps = self._num_looks = self._last_look = 0
        self._clock = _Clock()
        self._pending: _Pending | None = None
        self._series: list[ProfiledStep] = []
        self._averages = _Averages(self._layout)

    def step(self) -> None:
        """Counts an optimizer step and looks at the shards if a look is due. Collective; see the class for its cost.

        Raises `CieraMismatchError` on all ranks when they hold different parameters, and `CieraPolicyError` when
        parameters are not sharded now or have changed their shapes.
        """
        self._clock.enter()
        self._num_steps += 1
        if self._num_steps % self._interval == 0:
            with torch.no_grad():
                self._look()
        self._clock.leave()

    def result(self) -> Profile:
        """The profile so far. Collective, one all-reduce of 16 bytes a parameter and rank; may be called again."""
        self._collect()
        blocks = np.zeros((2, len(self._described), self._num_ranks))
        blocks[:, :, self._rank] = self._averages.blocks(len(self._described))
        self._sum(blocks.reshape(-1))
        distribution: dict[str, tuple[float, ...]] = {}
        num_values: dict[str, int] = {}
        by_dtype: dict[str, int] = {}
        for index, (name, dtype, size, _) in enumerate(self._described):
            category = categorize(name)
            num_values[category] = num_values.get(category, 0) + size
            by_dtype[str(dtype)] = by_dtype.get(str(dtype), 0) + size
            changed, total = blocks[:, index]
            shard_rates = tuple(float(rate) for rate in changed[total > 0] / total[total > 0])
            distribution[category] = distribution.get(category, ()) + shard_rates
        notes = list(self._notes)
        if len(by_dtype) > 1:
            shares = ", ".join(f"{size:,} in {name.removeprefix('torch.')}" for name, size in by_dtype.items())
            notes.append(f"gathered in several dtypes: values {shares}")
        return Profile(
            model=_name_of(self._model),
            date=date.today().isoformat(),
            world_size=max((parts for *_, parts in self._described), default=1),
            dtype=max(by_dtype, key=lambda name: by_dtype[name], default="none").removeprefix("torch."),
            interval=self._interval,
            warmup_steps=self._warmup_steps,
            num_steps=self._num_steps,
            steps=self._averages.steps,
            kept_block_size=self._kept_block_size,
            num_values={name: num_values[name] for name in CATEGORIES if name in num_values},
            rates=self._averages.rates(),
            shard_change=self._averages.shard_change(max((parts for *_, parts in self._described), default=1)),
            distribution={name: distribution[name] for name in CATEGORIES if distribution.get(name)},
            series=tuple(self._series),
            check_seconds=self._averages.check_seconds,
            step_seconds=self._averages.step_seconds,
            notes=tuple(notes),
        )

    def _look(self) -> None:
        started = time.perf_counter()
        self._collect()
        shards = list(self._shards())
        turn, self._num_looks = self._num_looks, self._num_looks + 1
        if not turn:
            self._begin(shards)
        else:
            self._compare(shards, turn, started)
        self._last_look = self._num_steps
        self._clock.restart()

    def _begin(self, shards: Sequence[_Shard]) -> None:
        """The first look: there is nothing to compare with."""
        self._described = [(shard.name, shard.dtype, shard.num_global_values, shard.num_parts) for shard in shards]
        self._param_groups = [shard.param_group for shard in shards]
        if dist.is_initialized() and any(isinstance(p, DTensor) for p in self._model.parameters()):
            self._num_ranks, self._rank = dist.get_world_size(), dist.get_rank()
            described: list[Any] = [None] * self._num_ranks
            dist.all_gather_object(described, [(name, str(dtype), size) for name, dtype, size, _ in self._described])
            other = next((rank for rank, parameters in enumerate(described) if parameters != described[0]), None)
            if other is not None:
                raise CieraMismatchError(
                    f"ranks 0 and {other} hold different parameters ({len(described[0])} and {len(described[other])}), but "
                    "a Profiler adds up what all ranks of the default process group find in the same ones: profile a model "
                    "that every rank has a shard of"
                )
        for shard in shards:
            if shard.dtype not in self._counters:
                self._counters[shard.dtype] = ShardCounter(FORMATS[shard.dtype], self._layout, self._kept_block_size)
            kept = FORMATS[shard.dtype].words(zeros_tensor((shard.values.numel(),), shard.dtype))
            self._counters[shard.dtype].keep(shard.values, kept)
            self._kept.append(kept)
        self._trials.plan(
            [
                TriedShard(categorize(shard.name), shard.param_group, shard.dtype, shard.values.numel())
                for shard in shards
            ]
        )

    def _compare(self, shards: Sequence[_Shard], turn: int, started: float) -> None:
        """Counts the changes since the last look, and starts to add the counts up over all ranks."""
        if [(shard.dtype, shard.values.numel()) for shard in shards] != [
            (dtype, len(kept)) for (_, dtype, *_), kept in zip(self._described, self._kept, strict=True)
        ]:
            raise CieraPolicyError(
                "the parameters have changed their number, dtypes or shapes since the last look: make a new Profiler"
            )
        is_averaged = self._last_look >= self._warmup_steps
        rows = np.zeros((len(CATEGORIES), self._layout.num_columns))
        changes = np.zeros((len(shards), self._num_ranks))
        for part in self._trials.next_parts() if is_averaged else ():
            self._try(part, shards, rows[CATEGORIES.index(cast(Category, part.category))])
        for index, (shard, kept) in enumerate(zip(shards, self._kept, strict=True)):
            row = rows[CATEGORIES.index(categorize(shard.name))]
            shard_changes = self._counters[shard.dtype].count(shard.values, kept, row, turn)
            changes[index, self._rank] = shard_changes.num_values
            if is_averaged:
                self._averages.add_blocks(index, len(shards), shard_changes.blocks)
        seconds = np.array([self._clock.train_seconds, self._clock.num_intervals, time.perf_counter() - started])
        counts = np.concatenate([rows.reshape(-1), changes.reshape(-1), seconds])
        self._pending = _Pending(self._num_steps, self._last_look, is_averaged, *self._start_sum(counts))

    def _try(self, part: Part, shards: Sequence[_Shard], row: Row) -> None:
        """Tries the codecs on a part. Call it before the part's new bits are kept."""
        dtype = shards[part.pieces[0][0]].dtype
        last = np.concatenate([self._kept[index][piece] for index, piece in part.pieces])
        fresh = torch.cat([shards[index].values[piece].to("cpu", dtype) for index, piece in part.pieces])
        self._trials.run(torch.from_numpy(last.view(f"i{dtype.itemsize}")).view(dtype), fresh, row, self._layout)

    def _collect(self) -> None:
        """Takes in the counts of the last look, summed over all ranks."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        counts = pending.wait()
        num_rows, num_shards = len(CATEGORIES), len(self._described)
        rows, changes, seconds = np.split(counts, [num_rows * self._layout.num_columns, len(counts) - 3])
        rows, changes = rows.reshape(num_rows, -1), changes.reshape(num_shards, self._num_ranks)
        spreads = self._rank_spreads(changes)
        named = dict(zip((*CATEGORIES, ALL), (*rows, self._layout.total(rows)), strict=True))
        named = {name: row for name, row in named.items() if row[self._layout.values].any()}
        rates = {name: self._layout.rates(row, spreads.get(name)) for name, row in named.items()}
        train_seconds, num_intervals, check_seconds = (float(total) / self._num_ranks for total in seconds)
        step_seconds = train_seconds / num_intervals if num_intervals else None
        self._series.append(ProfiledStep(pending.step, rates, check_seconds, step_seconds))
        if pending.is_averaged:
            self._averages.add(pending.last_look + 1, self._series[-1], named, train_seconds, num_intervals)

    def _rank_spreads(self, changes: npt.NDArray[np.float64]) -> dict[str, float]:
        """Changed values, float64 [shards, ranks] -> by category: those of the rank with the most, over the ranks' mean.

        Shards that are gathered together are padded together, so each has the spread of its parameter group.
        """
        totals = np.zeros((max(self._param_groups, default=-1) + 1, self._num_ranks))
        np.add.at(totals, self._param_groups, changes)
        means = totals.mean(axis=1)
        spreads = np.divide(totals.max(axis=1), means, out=np.ones_like(means), where=means > 0)
        weights: dict[str, float] = {}
        sums: dict[str, float] = {}
        for (name, _, size, _), param_group, by_rank in zip(self._described, self._param_groups, changes, strict=True):
            if not by_rank.any():
                continue
            for key in (categorize(name), ALL):
                weights[key] = weights.get(key, 0.0) + size
                sums[key] = sums.get(key, 0.0) + size * float(spreads[param_group])
        return {key: sums[key] / weights[key] for key in weights}

    def _shards(self) -> Iterator[_Shard]:
        """The local shards that can be compared, in the order of the model's parameters; tied ones once."""
        cast_dtypes: dict[int, torch.dtype | None] = {}
        param_group_numbers: dict[int, int] = {}  # several modules may share a parameter group
        number_of_parameter: dict[int, int] = {}
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                for param_group in param_groups(cast(nn.Module, module)):
                    number = param_group_numbers.setdefault(id(param_group), len(param_group_numbers))
                    for parameter, _, cast_to in sharded_parameters(param_group):
                        cast_dtypes[id(parameter)], number_of_parameter[id(parameter)] = cast_to, number
        num_sharded = 0
        for index, (name, parameter) in enumerate(self._model.named_parameters()):
            num_sharded += id(parameter) in cast_dtypes
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            if local.device.type == "meta":
                raise CieraPolicyError(
                    f"{name} is on the meta device, without values: materialise the model before step()"
                )
            dtype = parameter.dtype
            if dtype.is_floating_point:
                dtype = self._dtype or cast_dtypes.get(id(parameter)) or dtype
            if dtype not in FORMATS or hasattr(local, "fsdp_pre_all_gather"):
                reason = "makes its own gather inputs" if dtype in FORMATS else f"is gathered in {dtype}"
                note = f"{name} {reason} and was skipped"
                if note not in self._notes:
                    self._notes.append(note)
                continue
            parts = 1
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                for dim, placement in enumerate(parameter.placements):
                    parts *= mesh.size(dim) if isinstance(placement, Shard) else 1
            number = number_of_parameter.get(id(parameter), len(param_group_numbers) + index)
            yield _Shard(name, local.detach().reshape(-1), dtype, parameter.numel(), parts, number)
        if num_sharded < len(cast_dtypes):
            raise CieraPolicyError(
                f"{len(cast_dtypes) - num_sharded} parameters of {_name_of(self._model)} are not sharded now: call "
                "Profiler.step() right after optimizer.step(), when FSDP2 has resharded all of them"
            )

    def _sum(self, counts: Row) -> None:
        """Adds up `counts` over all ranks, in place."""
        summed = _Pending(0, 0, False, *self._start_sum(counts)).wait()
        counts[:] = summed

    def _start_sum(self, counts: Row) -> tuple[torch.Tensor, Any]:
        totals = torch.from_numpy(counts)
        if self._num_ranks == 1:
            return totals, None
        if "cpu" not in dist.get_backend_config():  # NCCL alone
            totals = totals.to(torch.accelerator.current_accelerator() or "cpu")
        return totals, dist.all_reduce(totals, async_op=True)


@dataclass
class _Pending:
    """The counts of a look, while they are added up."""

    step: int
    last_look: int
    is_averaged: bool
    counts: torch.Tensor
    work: Any

    def wait(self) -> Row:
        if self.work is not None:
            self.work.wait()
        summed: Row = self.counts.cpu().numpy()
        return summed


class _Clock:
    """Wall time between calls of `step()`, since the last look."""

    def __init__(self) -> None:
        self._left_at: float | None = None
        self.restart()

    def restart(self) -> None:
        self.train_seconds, self.num_intervals = 0.0, 0

    def enter(self) -> None:
        if self._left_at is not None:
            self.train_seconds += time.perf_counter() - self._left_at
            self.num_intervals += 1

    def leave(self) -> None:
        self._left_at = time.perf_counter()


class _Averages:
    """Sums over the looks after the warm-up."""

    def __init__(self, layout: CountLayout) -> None:
        self._layout = layout
        self._rows: dict[str, Row] = {}
        self._per_look: dict[str, dict[str, list[float]]] = {}
        self._seconds = np.zeros(3)
        self._num_looks = 0
        self._blocks: Row = np.zeros((2, 0))
        self.steps: tuple[int, int] | None = None

    def add(self, first: int, look: ProfiledStep, rows: dict[str, Row], train_seconds: float, intervals: float) -> None:
        self.steps = (first if self.steps is None else self.steps[0], look.step)
        self._num_looks += 1
        self._seconds += (train_seconds, intervals, look.check_seconds)
        for name, row in rows.items():
            self._rows[name] = self._rows[name] + row if name in self._rows else row.copy()
            # Each gather is coded on its own, and padded on its own: so these are means over looks, not figures of sums.
            for figure in ("exponent_entropy_bits", "value_change_entropy_bits", "rank_spread"):
                value = getattr(look.rates[name], figure)
                if value is not None:
                    self._per_look.setdefault(name, {}).setdefault(figure, []).append(value)

    def add_blocks(self, index: int, num_shards: int, blocks: tuple[int, int]) -> None:
        self.blocks(num_shards)[:, index] += blocks

    def blocks(self, num_shards: int) -> Row:
        """Changed blocks and all blocks of each shard, float64 [2, num_shards]."""
        if not self._blocks.size:
            self._blocks = np.zeros((2, num_shards))
        return self._blocks

    def rates(self) -> dict[str, Rates]:
        averages: dict[str, Rates] = {}
        for name, row in self._rows.items():
            means: dict[str, Any] = {
                figure: sum(values) / len(values) for figure, values in self._per_look.get(name, {}).items()
            }
            averages[name] = replace(self._layout.rates(row), **means)
        return averages

    def shard_change(self, world_size: int) -> dict[str, dict[int, float]]:
        """The share of shards in which an exponent changed, by category and number of ranks; projected beyond `world_size`."""
        return {
            name: {world_size * cut: share for cut, share in self._layout.shard_change(row).items()}
            for name, row in self._rows.items()
        }

    @property
    def check_seconds(self) -> float | None:
        return float(self._seconds[2] / self._num_looks) if self._num_looks else None

    @property
    def step_seconds(self) -> float | None:
        return float(self._seconds[0] / self._seconds[1]) if self._seconds[1] else None


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CieraPolicyError(f"{name}={value!r} must be an int of at least {least}")


def _name_of(model: nn.Module) -> str:
    """The name of the class that the user wrote; `fully_shard` replaces it by a subclass of its own."""
    name = type(model).__name__
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name
