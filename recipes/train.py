"""The trainer: the same call on every rank, from a recipe to a tuned model.

Everything a step does is a function of the recipe, the step's number and the weights: data, dropout seed and learning
rate have no state of their own that matters. That is what makes a resumed run bitwise equal to an uninterrupted one,
and what makes stock FSDP2 and fsdp_ciera comparable bit by bit.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import deterministic

from fsdp_ciera.errors import CieraFileError
from fsdp_ciera.recipes import checkpoint
from fsdp_ciera.recipes.build import (
    build_optimizer,
    build_scheduler,
    check_vocabulary,
    load_model,
    prepare_transformers,
)
from fsdp_ciera.recipes.config import Parallel, Recipe
from fsdp_ciera.recipes.data import Batches, load_batches
from fsdp_ciera.recipes.metrics import open_writers
from fsdp_ciera.recipes.shard import build_mesh, shard_model
from fsdp_ciera.recipes.together import on_every_rank
from fsdp_ciera.recipes.tracer import Tracer

if TYPE_CHECKING:
    from fsdp_ciera.statistics import CieraStats


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The results of a run, or of its part after a resume. The same on every rank, except digest and stats."""

    first_step: int
    """Optimizer steps that a resumed checkpoint had behind it; the lists start after them."""

    losses: list[float] = field(default_factory=list)
    """Loss of each step: mean over ranks and micro-batches, the exact fp32 value."""

    grad_norms: list[float] = field(default_factory=list)
    """Global L2 norm of the gradients of each step before clipping."""

    seconds: list[float] = field(default_factory=list)
    """Wall-clock seconds of each step, without evaluation and checkpoints."""

    eval_losses: dict[int, float] = field(default_factory=dict)
    """Held-out loss after the step that is the key: mean over ranks and batches."""

    stats: dict[str, Any] | None = None
    """`fsdp_ciera.stats(model).to_dict()` of this rank at the end; `None` for stock FSDP2."""

    final_parameters_digest: str = ""
    """sha256 over the bytes of this rank's fp32 shards, in the order of their names."""


class Observer(Protocol):
    """Watches a run, for example with a `fsdp_ciera.Profiler`. Both calls may be collective."""

    def step(self) -> None:
        """An optimizer step was taken, and its metrics were read; evaluation and checkpoint come after."""

    def finish(self) -> None:
        """The run is over; its process group is still there."""


class _Run(NamedTuple):
    """What the steps of a run work on."""

    recipe: Recipe
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: Batches
    device: torch.device


class Display(Protocol):
    """Shows a run while it goes on."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """`step` (counted from 1) is done, with what the metrics record of it."""

    def note(self, text: str) -> None:
        """A line of text."""


class Show(Protocol):
    """Makes a display, for the steps after `first_step` of `num_steps`."""

    def __call__(self, *, first_step: int, num_steps: int, enabled: bool) -> Display: ...


class Silent:
    """Shows nothing."""

    def __init__(self, *, first_step: int, num_steps: int, enabled: bool) -> None: ...

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def update(self, step: int, values: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


def train(
    recipe: Recipe, *, show: Show = Silent, observe: Callable[[nn.Module], Observer] | None = None
) -> TrainResult:
    """Runs `recipe` to its last step. Collective: every rank of the process group calls it with the same recipe.

    `observe` is called with the sharded model on every rank; what it returns watches the run. `show` makes a display on
    every rank, enabled on rank 0 if the recipe wants it (`fsdp_ciera.cli.progress.Progress`). Initialises the
    process group from the environment (as torchrun sets it) when there is none, and then ends it. Raises
    `RecipeError` or `CieraPolicyError` on all ranks together when recipe, files and model do not fit.
    """
    with _process_group(recipe.parallel) as device, _deterministic(recipe.train.deterministic):
        run = _set_up(recipe, device)
        return _run_steps(run, None if observe is None else observe(run.model), show)


def _set_up(recipe: Recipe, device: torch.device) -> _Run:
    num_ranks = dist.get_world_size()
    mesh = build_mesh(recipe.parallel, device, num_ranks)
    prepare_transformers()
    batches = on_every_rank(
        lambda: load_batches(
            recipe.data,
            recipe.model.folder,
            seed=recipe.train.seed,
            micro_batch_size=recipe.train.micro_batch_size,
            num_micro_batches=recipe.train.gradient_accumulation,
            num_ranks=num_ranks,
            num_eval_batches=recipe.train.eval_batches if recipe.train.eval_every else 0,
        )
    )
    model = on_every_rank(lambda: load_model(recipe.model, recipe.data.seq_len))
    check_vocabulary(model, batches.largest_token_id)
    shard_model(model, recipe, mesh)
    model.train()
    optimizer = build_optimizer(model, recipe.optimizer)
    scheduler = build_scheduler(optimizer, recipe.schedule, recipe.train.steps)
    return _Run(recipe, model, optimizer, scheduler, batches, device)


def _run_steps(run: _Run, observer: Observer | None, show: Show) -> TrainResult:
    recipe, rank, num_ranks = run.recipe, dist.get_rank(), dist.get_world_size()
    output, num_steps = Path(recipe.train.output), recipe.train.steps
    resumed = checkpoint.Resumed(0, num_ranks)
    folder = checkpoint.find(recipe.checkpoint.resume, output / "checkpoints")
    if folder is not None:
        resumed = checkpoint.load(folder, run.model, run.optimizer, run.scheduler)
    result = TrainResult(first_step=resumed.num_steps)
    tracer = Tracer(run.model, recipe, run.device, resumed.num_steps)
    writers = open_writers(recipe.metrics, output, rank=rank, first_step=resumed.num_steps + 1)
    shown = rank == 0 and recipe.metrics.progress
    with show(first_step=resumed.num_steps, num_steps=num_steps, enabled=shown) as progress:
        if folder is not None:
            progress.note(f"resumed from {folder}")
        if resumed.num_ranks != num_ranks:
            progress.note(f"saved by {resumed.num_ranks} ranks, resumed by {num_ranks}: not bitwise reproducible")
        for step in range(resumed.num_steps, num_steps):
            with tracer.step(step):
                values = _step(run, step, tracer)
            if observer is not None:
                observer.step()
            result.losses.append(values["loss"])
            result.grad_norms.append(values["grad_norm"])
            result.seconds.append(values["seconds"])
            if _is_due(step + 1, recipe.train.eval_every, num_steps):
                values["eval_loss"] = result.eval_losses[step + 1] = _evaluate(run)
            progress.update(step + 1, values)
            for writer in writers:
                writer.write(step + 1, values)
            if _is_due(step + 1, recipe.checkpoint.every, num_steps):
                checkpoint.save(
                    output / "checkpoints",
                    step + 1,
                    run.model,
                    run.optimizer,
                    run.scheduler,
                    num_keep=recipe.checkpoint.keep,
                )
        if observer is not None:
            observer.finish()
        sent = _ciera_stats(run)
        if sent is not None:
            progress.note(str(sent))
    for writer in writers:
        writer.close()
    if recipe.checkpoint.export is not None:
        dtype = getattr(torch, recipe.parallel.param_dtype)
        checkpoint.export(run.model, recipe.model.folder, Path(recipe.checkpoint.export), dtype)
    # A rank that leaves early would abort its peers' last collectives on gloo.
    dist.barrier()
    return replace(result, stats=sent.to_dict() if sent else None, final_parameters_digest=parameters_digest(run.model))


def _step(run: _Run, step: int, tracer: Tracer) -> dict[str, float]:
    """Takes one optimizer step. Returns what the metrics record of it. Collective."""
    started = time.perf_counter()
    before = _ciera_stats(run)
    rank, num_micro_batches = dist.get_rank(), run.batches.num_micro_batches
    # Seeded by position: dropout needs no RNG state in checkpoints and does not notice evaluations.
    torch.manual_seed(_step_seed(run.recipe.train.seed, step, rank))
    loss = torch.zeros((), dtype=torch.float32, device=run.device)
    for micro_batch in range(num_micro_batches):
        _require_gradient_sync(run.model, micro_batch == num_micro_batches - 1)
        tracer.enter("forward")
        micro_loss = _loss(run, run.batches.batch(step, micro_batch, rank)) / num_micro_batches
        tracer.enter("backward")
        torch.autograd.backward(micro_loss)
        loss += micro_loss.detach().float()
    tracer.enter("optimizer")
    norm = _clip(run.model, run.recipe.optimizer.max_grad_norm)
    learning_rate = float(run.scheduler.get_last_lr()[0])
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad(set_to_none=True)
    values = {"loss": _mean_over_ranks(loss), "grad_norm": float(norm), "lr": learning_rate}
    values["seconds"] = time.perf_counter() - started
    values["tokens_per_second"] = run.batches.num_tokens_per_step / values["seconds"]
    if before is not None and (after := _ciera_stats(run)) is not None:
        raw, wire = after.raw_bytes - before.raw_bytes, after.wire_bytes - before.wire_bytes
        values |= {"raw_bytes": raw, "wire_bytes": wire, "ratio": raw / wire if wire else 1.0}
    return values


def _evaluate(run: _Run) -> float:
    """Held-out loss of the current weights. Collective; leaves weights, gradients and seeds as they were."""
    rank = dist.get_rank()
    num_batches = min(run.recipe.train.eval_batches, run.batches.num_eval_batches)
    total = torch.zeros((), dtype=torch.float32, device=run.device)
    run.model.eval()
    with torch.no_grad():
        for index in range(num_batches):
            total += _loss(run, run.batches.eval_batch(index, rank)).float()
    run.model.train()
    # No backward follows that would free what the root keeps gathered after its forward.
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return _mean_over_ranks(total / num_batches)


def parameters_digest(model: nn.Module) -> str:
    """sha256 over name and bytes of every local parameter shard, in the order of the names. Copies one shard at a time."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(name.encode())
        digest.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _loss(run: _Run, token_ids: Tensor) -> Tensor:
    on_device = token_ids.to(run.device, non_blocking=True)
    loss: Tensor = run.model(input_ids=on_device, labels=on_device, use_cache=False).loss
    return loss


def _require_gradient_sync(model: nn.Module, required: bool) -> None:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(required)


def _clip(model: nn.Module, max_norm: float) -> Tensor:
    """Global gradient norm; scales the gradients down to `max_norm` unless that is 0. Collective."""
    parameters = list(model.parameters())
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _mean_over_ranks(value: Tensor) -> float:
    """The fp32 mean, the same bits on every rank. Collective."""
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


def _step_seed(seed: int, step: int, rank: int) -> int:
    text = f"{seed}/{step}/{rank}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


def _is_due(num_done: int, every: int, num_steps: int) -> bool:
    return every > 0 and (num_done % every == 0 or num_done == num_steps)


def _ciera_stats(run: _Run) -> CieraStats | None:
    """Counts of what this rank has sent so far; `None` for stock FSDP2."""
    if run.recipe.ciera.policy == "none":
        return None
    from fsdp_ciera.api import stats

    return stats(run.model)


@contextmanager
def _process_group(parallel: Parallel) -> Iterator[torch.device]:
    """Yields this rank's device while there is a default process group: makes one if there is none, and then ends it."""
    use_cuda = parallel.device == "cuda" or (parallel.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    is_ours = not dist.is_initialized()
    if is_ours:
        # gloo is there for the objects that checkpoints and `together` exchange.
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=parallel.timeout_seconds))
    try:
        yield device
    except (ValueError, CieraFileError):  # of recipe, policy or table: raised on all ranks, so none is left waiting
        if is_ours:
            dist.destroy_process_group()
        raise
    if is_ours:
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Switches deterministic kernels on or off, as the recipe says, and restores the caller's setting afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = deterministic  # a module with a property, which mypy cannot see
    filled = switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled, warn_only=True)
    # Filling every new buffer guards against reading uninitialised memory; it costs time and changes no result.
    switch.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switch.fill_uninitialized_memory = filled
