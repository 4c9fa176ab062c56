"""Builds what a run trains with: model, optimizer and learning-rate schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.config import Model, Optimizer, Schedule


def prepare_transformers() -> None:
    """Makes transformers know the model types that only we know, and keeps its own progress bars off the screen."""
    from transformers.utils import logging

    from fsdp_ciera.recipes.models import register_auto_classes

    logging.disable_progress_bar()
    register_auto_classes()


def load_model(model: Model, seq_len: int) -> nn.Module:
    """The pretrained causal LM of `model.folder` in fp32 on CPU, with pinned implementations.

    Costs 4 bytes a parameter on each rank until it is sharded. Raises `RecipeError` when the folder holds no model
    that we know, lacks weights, or was not made for `seq_len` positions.
    """
    if not (Path(model.folder) / "config.json").is_file():
        raise RecipeError(f'model.folder: got "{model.folder}", allowed: a folder with a config.json')
    try:
        loaded = _from_folder(model) if model.name is None else _from_published_layout(model, model.name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RecipeError(f'model.folder: "{model.folder}" cannot be loaded: {reason}') from error
    limit = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and seq_len > limit:
        raise RecipeError(f"data.seq_len: got {seq_len}, allowed: at most the model's {limit} positions")
    if model.router_aux_loss and not hasattr(loaded.config, "output_router_logits"):
        raise RecipeError(f"model.router_aux_loss: got true, allowed: false, since {type(loaded).__name__} has none")
    if hasattr(loaded.config, "output_router_logits"):
        loaded.config.output_router_logits = model.router_aux_loss
    result: nn.Module = loaded
    return result


def check_vocabulary(model: nn.Module, largest_token_id: int) -> None:
    """Raises `RecipeError` if the tokenizer gave ids that the model has no embedding for."""
    num_embeddings = len(model.get_input_embeddings().weight)  # type: ignore[operator]
    if largest_token_id >= num_embeddings:
        raise RecipeError(
            f"model.folder: the tokenizer gives ids up to {largest_token_id}, the model embeds {num_embeddings}"
        )


def _from_folder(model: Model) -> Any:
    from transformers import AutoModelForCausalLM

    experts = {} if model.experts == "auto" else {"experts_implementation": model.experts}
    loaded, info = AutoModelForCausalLM.from_pretrained(
        model.folder,
        dtype=torch.float32,
        attn_implementation=model.attention,
        local_files_only=True,
        output_loading_info=True,
        **experts,
    )
    lacking = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if lacking:
        raise ValueError(f"{len(lacking)} weights are missing or of another shape, such as {lacking[0]}")
    return loaded


def _from_published_layout(model: Model, name: str) -> Any:
    from fsdp_ciera.recipes.models import load_pretrained

    loaded: Any = load_pretrained(model.folder, name, dtype=torch.float32)
    loaded.set_attn_implementation(model.attention)
    if model.experts != "auto":
        loaded.set_experts_implementation(model.experts)
    return loaded


def build_optimizer(model: nn.Module, section: Optimizer) -> AdamW:
    """AdamW over the sharded fp32 parameters; weight decay on matrices only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer_groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [options for options in optimizer_groups if options["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
    )


def build_scheduler(optimizer: TorchOptimizer, schedule: Schedule, num_steps: int) -> LRScheduler:
    """Linear warm-up, then the recipe's decay."""
    from transformers import get_scheduler

    if schedule.decay == "constant":
        scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=schedule.warmup_steps)
    else:
        scheduler = get_scheduler(
            "cosine_with_min_lr",
            optimizer,
            num_warmup_steps=schedule.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs={"min_lr_rate": schedule.final_lr_fraction},
        )
    result: LRScheduler = scheduler
    return result
