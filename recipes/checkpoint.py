"""Saves and resumes a run with torch.distributed.checkpoint; a save that was interrupted never looks complete."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.together import on_rank_zero

_STEP_FOLDER = re.compile(r"step-(\d+)")


class Resumed(NamedTuple):
    """What a checkpoint says about the run that wrote it."""

    num_steps: int
    """Optimizer steps that are behind."""

    num_ranks: int
    """Ranks of that run; with another number data order and sums differ, so the continuation is not bitwise equal."""


def save(
    root: Path, step: int, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, *, num_keep: int
) -> Path:
    """Writes `root/step-N`: model, optimizer, scheduler and step, each rank its own shards. Collective.

    The files are written and synced in `step-N.tmp`, which rank 0 renames once all ranks are through. The newest
    `num_keep` checkpoints up to this step stay. There is no RNG state to save: the trainer seeds every step from the
    recipe's seed and the step's number.
    """
    final, partial = root / f"step-{step}", root / f"step-{step}.tmp"
    on_rank_zero(lambda: _make_empty(partial))
    save_distributed(_state(step, model, optimizer, scheduler), checkpoint_id=partial)
    on_rank_zero(lambda: _publish(partial, final, num_keep))
    return final


def load(folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> Resumed:
    """Restores what `save` wrote, into a model sharded over any number of ranks. Collective.

    Continuing is bitwise equal to never having stopped as long as recipe and number of ranks are the same.
    """
    state = _state(0, model, optimizer, scheduler)
    try:
        load_distributed(state, checkpoint_id=folder)
    except CheckpointException as error:  # raised on all ranks together
        cause = str(next(iter(error.failures.values()))[0]).partition("\n")[0]
        raise RecipeError(f"checkpoint.resume: {folder} does not fit this model: {cause}") from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return Resumed(state["step"], state["num_ranks"])


def find(resume: str, root: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` names, decided by rank 0 for all. Collective.

    `None` for `"none"`, and for `"latest"` while `root` holds no complete checkpoint. Raises `RecipeError` for a path
    that is no complete checkpoint.
    """
    if resume == "none":
        return None
    return on_rank_zero(lambda: _newest(root) if resume == "latest" else _checked(Path(resume)))


def export(model: nn.Module, source: str, target: Path, dtype: torch.dtype) -> None:
    """Writes the full model in `dtype` to `target`, with the tokenizer of `source`, for `from_pretrained`. Collective.

    Gathers everything into rank 0's memory.
    """
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_rank_zero(lambda: _write_pretrained(model, full, source, target, dtype))


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a finished checkpoint: renamed, and with the metadata that DCP writes last."""
    return _STEP_FOLDER.fullmatch(folder.name) is not None and (folder / ".metadata").is_file()


def _state(step: int, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
        "step": step,
        "num_ranks": dist.get_world_size(),
    }


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted save left
    folder.mkdir(parents=True)


def _publish(partial: Path, final: Path, num_keep: int) -> None:
    replaced = final.with_name(f"{final.name}.old.tmp")
    if final.exists():  # a run that resumed from an earlier step comes by again
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    older = [folder for folder in _complete(final.parent) if _step_of(folder) <= _step_of(final)]
    for folder in older[:-num_keep]:
        shutil.rmtree(folder, ignore_errors=True)


def _newest(root: Path) -> Path | None:
    complete = _complete(root)
    return complete[-1] if complete else None


def _checked(folder: Path) -> Path:
    if not is_complete(folder):
        raise RecipeError(
            f'checkpoint.resume: got "{folder}", allowed: "none", "latest" or the folder of a complete checkpoint '
            "(step-N, with a .metadata file in it)"
        )
    return folder


def _complete(root: Path) -> list[Path]:
    folders = [folder for folder in root.iterdir() if is_complete(folder)] if root.is_dir() else []
    return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> int:
    match = _STEP_FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))


def _write_pretrained(model: Any, full: dict[str, Any], source: str, target: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with torch.device("meta"):  # a plain model of the same class: the trained one's parameters are DTensors
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype)
    plain.load_state_dict({name: tensor.to(dtype) for name, tensor in full.items()}, assign=True)
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(target)
