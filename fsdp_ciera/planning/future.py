"""The groups that FSDP2 would make of a model that is not sharded yet, on any device or on "meta"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.planning.shapes import GroupShape, Span, spans_of
from fsdp_ciera.policy import CieraPolicy


def _part_size(reshard_after_forward: bool | int | None, world_size: int) -> int | None:
    """The ranks that a backward gather spans when they are fewer than all; `None` when there is no such stream."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    part = reshard_after_forward
    if not isinstance(part, int) or part < 1 or world_size % part:
        raise CieraPolicyError(
            f"reshard_after_forward={part!r} must be a bool, None or a divisor of the world_size, which is {world_size}"
        )
    return part if 1 < part < world_size else None


def future_shapes(
    model: nn.Module,
    policy: CieraPolicy,
    world_size: int,
    cast_dtype: torch.dtype | None,
    reshard_after_forward: bool | int | None,
    units: Sequence[nn.Module | Sequence[nn.Module]] | None,
    shard_dim: Callable[[nn.Parameter], int] = lambda parameter: 0,
    root_reshards: bool = False,
) -> list[GroupShape]:
    """The groups that FSDP2 would make, in the order in which the root will list them: its own first.

    Arguments as those of `fsdp_ciera.estimate_memory`; parameters that float are gathered as `cast_dtype`. `shard_dim` is
    the dimension that a parameter is cut along. The root keeps its parameters after forward, FSDP2's default, unless
    `root_reshards`.
    """
    part = _part_size(reshard_after_forward, world_size)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    whole = list(range(world_size))
    spans = spans_of([(whole, 2 if root_reshards else 1)], policy)
    num_gathers = 1 if reshard_after_forward is False else 2
    unit_spans = spans_of([(whole, num_gathers)] if part is None else [(whole, 1), (whole[:part], 1)], policy)
    position = {id(module): index for index, module in enumerate(model.modules())}
    groups = [
        [unit] if isinstance(unit, nn.Module) else list(unit) for unit in (_layers(model) if units is None else units)
    ]
    owners = {id(module) for group in groups for module in group}
    if not owners <= position.keys():
        raise CieraPolicyError(f"units={units!r} must be modules of the model, or lists of them")
    groups.sort(key=lambda group: min(position[id(module)] for module in group))
    seen: set[int] = set()  # a parameter that several modules share is gathered once
    owned = [_managed_parameters(group, owners, seen) for group in groups]
    rest = [] if id(model) in owners else _managed_parameters([model], owners, seen)
    return [
        shape_from_parameters(
            [names[id(parameter)] for parameter in parameters],
            [_padded_shard_size(parameter, world_size, shard_dim(parameter)) for parameter in parameters],
            [gathered_dtype(parameter.dtype, cast_dtype) for parameter in parameters],
            world_size,
            its_spans,
        )
        for parameters, its_spans in ((rest, spans), *((one, unit_spans) for one in owned))
        if parameters
    ]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost lists of at least two modules of one class; experts inside a layer are none."""
    entries = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    if is_list and len(entries) >= 2 and len({type(entry) for entry in entries}) == 1:
        yield from entries
    else:
        for entry in entries:
            yield from _layers(entry)


def _managed_parameters(group: Sequence[nn.Module], owners: set[int], seen: set[int]) -> list[nn.Parameter]:
    """What FSDP2 puts into the group of these modules, in its order: children first, other units left out."""
    roots = {id(module) for module in group}
    visited: set[int] = set()
    found: list[nn.Parameter] = []

    def visit(module: nn.Module) -> None:
        if id(module) in visited or (id(module) in owners and id(module) not in roots):
            return
        visited.add(id(module))
        for child in module.children():
            visit(child)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(parameter)

    for module in group:
        visit(module)
    return found


def _padded_shard_size(parameter: nn.Parameter, world_size: int, dim: int) -> int:
    """Values of the local shard: FSDP2 cuts one dimension, of the local part where tensor parallelism has cut before."""
    shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    return -(-shape[dim] // world_size) * prod(shape[:dim]) * prod(shape[dim + 1 :]) if shape else 1


def gathered_dtype(own: torch.dtype, cast_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter in the gather: FSDP2 casts floating-point parameters only."""
    return cast_dtype if cast_dtype is not None and own.is_floating_point else own


def shape_from_parameters(
    names: Sequence[str], sizes: Sequence[int], dtypes: Sequence[torch.dtype], world_size: int, spans: tuple[Span, ...]
) -> GroupShape:
    """The shape of a group of these parameters, which have `sizes` values in each shard. Several dtypes: gathered as bytes."""
    if len(set(dtypes)) == 1:
        return GroupShape(tuple(names), tuple(sizes), dtypes[0], world_size, spans)
    num_bytes = [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    return GroupShape(tuple(names), tuple(num_bytes), torch.uint8, world_size, spans)
