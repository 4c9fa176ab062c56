"""A stock step of a model that nobody ran: `ciera plan`'s parameters, and seconds of compute that are told or estimated.

Groups and their order are FSDP2's: a group for each layer, and the root's with embedding, last norm and head, which is gathered
before the first layer and again before the backward. Shards are cut evenly; FSDP2 cuts one dimension and pads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_ciera.planning.future import future_shapes
from fsdp_ciera.policies.categories import categorize
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.profiling.trace import Event, Group, Trace
from fsdp_ciera.simulator.network import Place

_ADAMW_BYTES = 28
"""Read and written by AdamW for a value: fp32 master, gradient and two moments in, all but the gradient out."""
_MEMORY_BYTES_PER_SECOND = 0.94e12
"""As in policies/machines.py."""


@dataclass(frozen=True, kw_only=True)
class ComputeCosts:
    """The seconds of a rank's own work."""

    layer_seconds: float | None = None
    """Of a layer's forward; `None`: estimated from `flops_per_second`."""
    flops_per_second: float = 125e12
    """That a rank really reaches: 40 % of an A100's 312e12."""
    tokens: int = 4096
    """That a rank trains on in a step."""
    backward_factor: float = 2.0
    """Backward over forward; 3 with activation checkpointing."""

    def describe(self) -> str:
        """For notes: where the seconds come from."""
        if self.layer_seconds is not None:
            return f"compute: {1e3 * self.layer_seconds:g} ms a layer's forward as told, backward {self.backward_factor:g}x"
        return (
            f"compute: an ESTIMATE, 2 FLOP a token and active value at {self.flops_per_second / 1e12:g} TFLOP/s, "
            f"{self.tokens} tokens a rank, backward {self.backward_factor:g}x; attention scores left out"
        )


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """By group, the root's first: names and sizes in values, and how many values a token really meets."""

    groups: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    active_values: tuple[float, ...]
    num_parameters: int
    has_root: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelParameters:
        """Of a model, which may be on "meta"."""
        shapes = future_shapes(model, CieraPolicy(), 1, torch.bfloat16, True, None, root_reshards=True)
        share = expert_share(model)
        groups = tuple((shape.names, shape.sizes) for shape in shapes)
        return cls(
            groups=groups,
            active_values=tuple(_active_values(names, sizes, share) for names, sizes in groups),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            has_root=len({len(names) for names, _ in groups}) > 1 or len(groups) == 1,
        )


def expert_share(model: nn.Module) -> float:
    """The share of routed experts that a token meets, by the model's config; 1 where it names none."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    chosen = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        number = getattr(config, name, None)
        if isinstance(number, int) and isinstance(chosen, int) and number > 0:
            return min(1.0, chosen / number)
    return 1.0


def stock_step(model: ModelParameters, place: Place, costs: ComputeCosts, reduce_item_bytes: int) -> Trace:
    """Stock FSDP2 at `place`, bf16 gathers; seconds of collectives are left to a network."""
    groups = tuple(
        Group(name=_group_name(names, number), values_per_rank=-(-sum(sizes) // place.world_size))
        for number, (names, sizes) in enumerate(model.groups)
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
        groups=groups,
        events=tuple(_events(model, groups, place, costs, reduce_item_bytes)),
    )


def _events(
    model: ModelParameters, groups: tuple[Group, ...], place: Place, costs: ComputeCosts, reduce_item_bytes: int
) -> Iterator[Event]:
    def gather(group: int, phase: str) -> Iterator[Event]:
        if place.world_size > 1:
            payload = 2 * groups[group].values_per_rank
            yield Event(
                node="AllGather", phase=phase, group=group, seconds=0.0, payload_bytes=payload, num_collectives=1
            )

    def reduce(group: int) -> Iterator[Event]:
        if place.world_size > 1:
            payload = reduce_item_bytes * groups[group].values_per_rank
            yield Event(node="ReduceScatter", phase="backward", group=group, seconds=0.0, payload_bytes=payload,
                        num_collectives=1)  # fmt: skip

    def compute(group: int, phase: str) -> Event:
        if costs.layer_seconds is not None and not (model.has_root and group == 0):
            seconds = costs.layer_seconds
        else:
            rate = costs.flops_per_second
            if costs.layer_seconds is not None:  # the head, as fast as the layers
                rate = 2 * costs.tokens * model.active_values[1] / max(costs.layer_seconds, 1e-12)
            seconds = 2 * costs.tokens * model.active_values[group] / rate
        factor = 1.0 if phase == "forward" else costs.backward_factor
        return Event(node="Compute", phase=phase, group=group, seconds=factor * seconds)

    root = [0] if model.has_root else []
    layers = list(range(len(root), len(groups)))
    for group in root + layers:
        yield from gather(group, "forward")
        if group in layers:
            yield compute(group, "forward")
    for group in root:
        yield compute(group, "forward")
    for group in root:
        yield from gather(group, "backward")
        yield compute(group, "backward")
    for group in reversed(layers):
        yield from gather(group, "backward")
        yield compute(group, "backward")
        yield from reduce(group)
    for group in root:
        yield from reduce(group)
    if place.world_size > 1:
        yield Event(node="AllReduce", phase="optimizer", group=None, seconds=0.0, payload_bytes=4, num_collectives=1)
    values = sum(group.values_per_rank for group in groups)
    yield Event(node="Compute", phase="optimizer", group=None, seconds=values * _ADAMW_BYTES / _MEMORY_BYTES_PER_SECOND)


def _active_values(names: tuple[str, ...], sizes: tuple[int, ...], share: float) -> float:
    """Values that multiply a token: of routed experts a share, of embeddings the head alone."""
    total = 0.0
    has_head = any("lm_head" in name for name in names)
    for name, size in zip(names, sizes, strict=True):
        category = categorize(name)
        if category == "embedding" and has_head and "lm_head" not in name:
            continue
        total += size * (share if category == "expert_ffn" and "experts." in name and "shared" not in name else 1.0)
    return total


def _group_name(names: tuple[str, ...], number: int) -> str:
    for name in names:
        parts = name.split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()]
        if places:
            return ".".join(parts[: places[0] + 1])
    return "root" if number == 0 else f"group {number}"
