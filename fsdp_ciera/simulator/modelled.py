"""Builds a stock step of a model that nobody ran: parameters as in `ciera plan`, seconds of compute from options or estimates.

Param groups and their order are FSDP2's: one for each layer, and the root's with embedding, last norm and head, which is
gathered before the first layer and again before the backward. Shards are cut evenly here; FSDP2 cuts one dimension and pads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_ciera.planning.future import future_shapes
from fsdp_ciera.policies.categories import categorize
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.profiling.trace import Event, Trace, TracedGroup
from fsdp_ciera.simulator.network import Place

_ADAMW_BYTES = 28
"""Bytes that AdamW reads and writes for a value: fp32 master, gradient and two moments in, all but the gradient out."""
_MEMORY_BYTES_PER_SECOND = 0.94e12
"""The memory bandwidth of policies/machines.py."""


@dataclass(frozen=True, kw_only=True)
class ComputeCosts:
    """What the seconds of a rank's own work follow from."""

    layer_seconds: float | None = None
    """Seconds of a layer's forward; `None`: they are estimated from `flops_per_second`."""
    flops_per_second: float = 125e12
    """FLOP/s that a rank really reaches; by default 40 % of an A100's 312e12."""
    tokens: int = 4096
    """Tokens that a rank trains on in a step."""
    backward_factor: float = 2.0
    """Seconds of the backward over those of the forward; 3 with activation checkpointing."""

    def describe(self) -> str:
        """Says for notes where the seconds come from."""
        if self.layer_seconds is not None:
            return f"compute: {1e3 * self.layer_seconds:g} ms a layer's forward as told, backward {self.backward_factor:g}x"
        return (
            f"compute: an ESTIMATE, 2 FLOP a token and active value at {self.flops_per_second / 1e12:g} TFLOP/s, "
            f"{self.tokens} tokens a rank, backward {self.backward_factor:g}x; attention scores left out"
        )


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """A model's param groups, the root's first: names and sizes in values, and how many values of each a token really meets."""

    groups: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    active_values: tuple[float, ...]
    num_parameters: int
    has_root: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelParameters:
        """Reads the parameters of a model, which may be on "meta"."""
        shapes = future_shapes(model, CieraPolicy(), 1, torch.bfloat16, True, None, root_reshards=True)
        share = expert_share(model)
        param_groups = tuple((shape.names, shape.sizes) for shape in shapes)
        return cls(
            groups=param_groups,
            active_values=tuple(_active_values(names, sizes, share) for names, sizes in param_groups),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            has_root=len({len(names) for names, _ in param_groups}) > 1 or len(param_groups) == 1,
        )


def expert_share(model: nn.Module) -> float:
    """Returns the share of routed experts that a token meets, by the model's config; 1 where the config names none."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    num_active = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        num_experts = getattr(config, name, None)
        if isinstance(num_experts, int) and isinstance(num_active, int) and num_experts > 0:
            return min(1.0, num_active / num_experts)
    return 1.0


def stock_step(model: ModelParameters, place: Place, costs: ComputeCosts, reduce_item_bytes: int) -> Trace:
    """Returns stock FSDP2's step at `place` with bf16 gathers. Its collectives have 0 seconds until a network prices them."""
    param_groups = tuple(
        TracedGroup(name=_param_group_name(names, index), values_per_rank=-(-sum(sizes) // place.world_size))
        for index, (names, sizes) in enumerate(model.groups)
    )
    return Trace(
        contender="fsdp2",
        world_size=place.world_size,
        ranks_per_host=place.ranks_per_host,
        num_cores=0,
        rate_bits_per_second=None,
        is_serial=False,
        item_bytes=2,
        reduce_item_bytes=reduce_item_bytes,
        num_parameters=model.num_parameters,
        iteration_seconds=(),
        groups=param_groups,
        events=tuple(_events(model, param_groups, place, costs, reduce_item_bytes)),
    )


def _events(
    model: ModelParameters,
    param_groups: tuple[TracedGroup, ...],
    place: Place,
    costs: ComputeCosts,
    reduce_item_bytes: int,
) -> Iterator[Event]:
    def gather(index: int, phase: str) -> Iterator[Event]:
        if place.world_size > 1:
            payload_bytes = 2 * param_groups[index].values_per_rank
            yield Event(
                node="AllGather", phase=phase, group=index, seconds=0.0, payload_bytes=payload_bytes, num_collectives=1
            )

    def reduce(index: int) -> Iterator[Event]:
        if place.world_size > 1:
            payload_bytes = reduce_item_bytes * param_groups[index].values_per_rank
            yield Event(node="ReduceScatter", phase="backward", group=index, seconds=0.0, payload_bytes=payload_bytes,
                        num_collectives=1)  # fmt: skip

    def compute(index: int, phase: str) -> Event:
        if costs.layer_seconds is not None and not (model.has_root and index == 0):
            seconds = costs.layer_seconds
        else:
            flops_per_second = costs.flops_per_second
            if costs.layer_seconds is not None:  # the head, as fast as the layers
                flops_per_second = 2 * costs.tokens * model.active_values[1] / max(costs.layer_seconds, 1e-12)
            seconds = 2 * costs.tokens * model.active_values[index] / flops_per_second
        factor = 1.0 if phase == "forward" else costs.backward_factor
        return Event(node="Compute", phase=phase, group=index, seconds=factor * seconds)

    root_indexes = [0] if model.has_root else []
    layer_indexes = list(range(len(root_indexes), len(param_groups)))
    for index in root_indexes + layer_indexes:
        yield from gather(index, "forward")
        if index in layer_indexes:
            yield compute(index, "forward")
    for index in root_indexes:
        yield compute(index, "forward")
    for index in root_indexes:
        yield from gather(index, "backward")
        yield compute(index, "backward")
    for index in reversed(layer_indexes):
        yield from gather(index, "backward")
        yield compute(index, "backward")
        yield from reduce(index)
    for index in root_indexes:
        yield from reduce(index)
    if place.world_size > 1:
        yield Event(node="AllReduce", phase="optimizer", group=None, seconds=0.0, payload_bytes=4, num_collectives=1)
    num_values = sum(param_group.values_per_rank for param_group in param_groups)
    optimizer_seconds = num_values * _ADAMW_BYTES / _MEMORY_BYTES_PER_SECOND
    yield Event(node="Compute", phase="optimizer", group=None, seconds=optimizer_seconds)


def _active_values(names: tuple[str, ...], sizes: tuple[int, ...], share: float) -> float:
    """Counts the values that multiply a token: a `share` of the routed experts, and of the embeddings the head alone."""
    total = 0.0
    has_head = any("lm_head" in name for name in names)
    for name, size in zip(names, sizes, strict=True):
        category = categorize(name)
        if category == "embedding" and has_head and "lm_head" not in name:
            continue
        total += size * (share if category == "expert_ffn" and "experts." in name and "shared" not in name else 1.0)
    return total


def _param_group_name(names: tuple[str, ...], index: int) -> str:
    for name in names:
        parts = name.split(".")
        number_indexes = [part_index for part_index, part in enumerate(parts) if part.isdecimal()]
        if number_indexes:
            return ".".join(parts[: number_indexes[0] + 1])
    return "root" if index == 0 else f"group {index}"
