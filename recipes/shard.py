"""Shards a transformers causal LM: one FSDP2 parameter group per decoder layer, one for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.config import Parallel, Recipe

if TYPE_CHECKING:
    from fsdp_ciera.policy import CieraPolicy

# Where the causal LMs of transformers keep their decoder layers; the later ones are multimodal models.
_LAYER_PATHS = ("model.layers", "model.language_model.layers", "language_model.model.layers", "language_model.layers")


def build_mesh(parallel: Parallel, device: torch.device, num_ranks: int) -> DeviceMesh:
    """The FSDP mesh: `(shard,)`, or `(replicate, shard)` for HSDP. Raises `RecipeError` if the ranks do not divide."""
    num_shards, remainder = divmod(num_ranks, parallel.replicate)
    if remainder:
        raise RecipeError(f"parallel.replicate: got {parallel.replicate}, allowed: a divisor of the {num_ranks} ranks")
    reshard = parallel.reshard_after_forward
    if not isinstance(reshard, bool) and (reshard >= num_shards or num_shards % reshard):
        raise RecipeError(
            f"parallel.reshard_after_forward: got {reshard}, allowed: true, false or a divisor of the {num_shards} "
            "ranks that share a copy of the model, smaller than their number"
        )
    if parallel.replicate == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (parallel.replicate, num_shards), mesh_dim_names=("replicate", "shard"))


def shard_model(model: nn.Module, recipe: Recipe, mesh: DeviceMesh) -> None:
    """Turns `model` (fp32, on CPU or the mesh's device) into an FSDP2 model in place.

    Every decoder layer is a parameter group of its own; embeddings, final norm and LM head form the root's, so that
    tied embeddings stay in one parameter group. Master weights stay fp32; gathers and compute are in
    `parallel.param_dtype`. With `ciera.policy` other than `"none"` every gather goes through fsdp_ciera.
    """
    parallel = recipe.parallel
    layers = decoder_layers(model)
    if recipe.train.activation_checkpointing:
        # transformers checkpoints a layer's `forward`, inside FSDP2's hooks and without renaming a parameter, which
        # torch's checkpoint_wrapper would do.
        model.activation_checkpointing_enable()  # type: ignore[operator]
    shard = partial(
        _fully_shard(recipe),
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=getattr(torch, parallel.param_dtype), reduce_dtype=getattr(torch, parallel.reduce_dtype)
        ),
    )
    for layer in layers:
        shard(layer, reshard_after_forward=parallel.reshard_after_forward)
    shard(model, reshard_after_forward=parallel.reshard_root_after_forward)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a transformers causal LM, in order. Raises `RecipeError` for an unknown structure."""
    for path in _LAYER_PATHS:
        try:
            layers = attrgetter(path)(model)
        except AttributeError:
            continue
        if isinstance(layers, nn.ModuleList) and len(layers):
            return list(layers)
    raise RecipeError(
        f"model.folder: {type(model).__name__} has no decoder layers under any of {', '.join(_LAYER_PATHS)}"
    )


def ciera_policy(recipe: Recipe) -> CieraPolicy | None:
    """The policy that the recipe describes, `None` for stock FSDP2. Raises `CieraPolicyError`.

    Learning rate and micro-batches, which a plan depends on, are those of the recipe.
    """
    ciera = recipe.ciera
    if ciera.policy == "none":
        return None
    from fsdp_ciera.policy import CieraPolicy

    settings = {field.name: getattr(ciera, field.name) for field in fields(ciera) if field.name != "policy"}
    changes: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if changes.get("cache_budget") == "none":
        changes["cache_budget"] = None
    changes |= {"learning_rate": recipe.optimizer.lr, "micro_batches": recipe.train.gradient_accumulation}
    return CieraPolicy.paper(**changes) if ciera.policy == "paper" else CieraPolicy(**changes)


def _fully_shard(recipe: Recipe) -> Callable[..., Any]:
    """FSDP2's `fully_shard`, or fsdp_ciera's with the recipe's policy."""
    policy = ciera_policy(recipe)
    if policy is None:
        from torch.distributed.fsdp import fully_shard

        return fully_shard
    from fsdp_ciera import api

    return partial(api.fully_shard, ciera_policy=policy)
