"""Records a few steps of a run as a trace for `ciera simulate`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.profiling.instruments import Instruments
from fsdp_ciera.profiling.tracing import RecordedStep, build_trace, param_groups_of
from fsdp_ciera.recipes.config import Recipe

_WARMUP_STEPS = 2  # the first gathers are full ones


class Tracer:
    """Times collectives and codec stages of `metrics.trace_steps` steps, and writes `<train.output>/trace.json` on rank 0.

    With `trace_steps = 0` it does nothing. Raises `RecipeError` on CUDA, where the host's clock does not see streams.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device, first_step: int) -> None:
        num_steps = recipe.metrics.trace_steps
        if num_steps and device.type != "cpu":
            raise RecipeError(f'metrics.trace_steps: got {num_steps}, allowed: 0, unless parallel.device is "cpu"')
        self._model = model
        self._recipe = recipe
        self._steps = range(first_step + _WARMUP_STEPS, first_step + _WARMUP_STEPS + num_steps)
        self._watch: Instruments | None = None
        self._recorded: list[RecordedStep] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around optimizer step `step`, counted from 0."""
        if step not in self._steps:
            yield
            return
        with Instruments() as self._watch:
            self._watch.begin()
            yield
            began, ended, recorded = self._watch.end()
        self._recorded.append(RecordedStep(began, ended, recorded, tuple(self._watch.phases)))
        self._watch = None
        if step == self._steps[-1] and dist.get_rank() == 0:
            self._write()

    def enter(self, phase: str) -> None:
        """Begins a phase of the step."""
        if self._watch is not None:
            self._watch.enter(phase)

    def _write(self) -> None:
        parallel = self._recipe.parallel
        trace = build_trace(
            self._recorded,
            param_groups_of(self._model),
            contender="fsdp2" if self._recipe.ciera.policy == "none" else self._recipe.ciera.policy,
            world_size=dist.get_world_size(),
            ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
            num_cores=os.cpu_count() or 1,
            rate_bits_per_second=None,
            is_serial=True,
            item_bytes=getattr(torch, parallel.param_dtype).itemsize,
            reduce_item_bytes=getattr(torch, parallel.reduce_dtype).itemsize,
            num_parameters=sum(parameter.numel() for parameter in self._model.parameters()),
        )
        path = Path(self._recipe.train.output) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace.to_json())
