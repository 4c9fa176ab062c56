"""The parameter groups that FSDP2 would make of a model that is not sharded yet, on any device or on "meta"."""

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
    """Number of ranks of a backward gather if it spans fewer than all ranks, else `None`. Raises `CieraPolicyError` for a value
    that is not allowed."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    part_size = reshard_after_forward
    if not isinstance(part_size, int) or part_size < 1 or world_size % part_size:
        raise CieraPolicyError(
            f"reshard_after_forward={part_size!r} must be a bool, None or a divisor of the world_size, which is {world_size}"
        )
    return part_size if 1 < part_size < world_size else None


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
    """The shapes of the parameter groups that FSDP2 would make, in the order in which the root will list them: its own first.

    Arguments are as in `fsdp_ciera.estimate_memory`. Floating-point parameters are gathered as `cast_dtype`. `shard_dim` maps a
    parameter to the dimension that it is cut along. The root keeps its parameters after forward, FSDP2's default, unless
    `root_reshards`.
    """
    part_size = _part_size(reshard_after_forward, world_size)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ranks = list(range(world_size))
    root_spans = spans_of([(ranks, 2 if root_reshards else 1)], policy)
    num_gathers = 1 if reshard_after_forward is False else 2
    unit_spans = spans_of([(ranks, num_gathers)] if part_size is None else [(ranks, 1), (ranks[:part_size], 1)], policy)
    positions = {id(module): position for position, module in enumerate(model.modules())}
    unit_modules = [
        [unit] if isinstance(unit, nn.Module) else list(unit) for unit in (_layers(model) if units is None else units)
    ]
    owners = {id(module) for modules in unit_modules for module in modules}
    if not owners <= positions.keys():
        raise CieraPolicyError(f"units={units!r} must be modules of the model, or lists of them")
    unit_modules.sort(key=lambda modules: min(positions[id(module)] for module in modules))
    seen: set[int] = set()  # a parameter that several modules share is gathered once
    unit_parameters = [_managed_parameters(modules, owners, seen) for modules in unit_modules]
    root_parameters = [] if id(model) in owners else _managed_parameters([model], owners, seen)
    return [
        shape_from_parameters(
            [names[id(parameter)] for parameter in parameters],
            [_padded_shard_size(parameter, world_size, shard_dim(parameter)) for parameter in parameters],
            [gathered_dtype(parameter.dtype, cast_dtype) for parameter in parameters],
            world_size,
            spans,
        )
        for parameters, spans in (
            (root_parameters, root_spans),
            *((parameters, unit_spans) for parameters in unit_parameters),
        )
        if parameters
    ]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost lists of at least two modules of one class; experts inside a layer are not among them."""
    entries = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    if is_list and len(entries) >= 2 and len({type(entry) for entry in entries}) == 1:
        yield from entries
    else:
        for entry in entries:
            yield from _layers(entry)


def _managed_parameters(modules: Sequence[nn.Module], owners: set[int], seen: set[int]) -> list[nn.Parameter]:
    """The parameters that FSDP2 puts into the parameter group of `modules`, in its order: children first, other `owners` left
    out, and no parameter that is `seen`. Adds them to `seen`."""
    roots = {id(module) for module in modules}
    visited: set[int] = set()
    parameters: list[nn.Parameter] = []

    def visit(module: nn.Module) -> None:
        if id(module) in visited or (id(module) in owners and id(module) not in roots):
            return
        visited.add(id(module))
        for child in module.children():
            visit(child)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parameters.append(parameter)

    for module in modules:
        visit(module)
    return parameters


def _padded_shard_size(parameter: nn.Parameter, world_size: int, dim: int) -> int:
    """Number of values of the padded local shard. FSDP2 cuts dimension `dim`, of the local part of a `DTensor` parameter."""
    shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    return -(-shape[dim] // world_size) * prod(shape[:dim]) * prod(shape[dim + 1 :]) if shape else 1


def gathered_dtype(own: torch.dtype, cast_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter in the gather: FSDP2 casts floating-point parameters only."""
    return cast_dtype if cast_dtype is not None and own.is_floating_point else own


def shape_from_parameters(
    names: Sequence[str], sizes: Sequence[int], dtypes: Sequence[torch.dtype], world_size: int, spans: tuple[Span, ...]
) -> GroupShape:
    """The shape of a parameter group of these parameters, with `sizes` values in each shard. Parameters of several dtypes are
    gathered as bytes."""
    if len(set(dtypes)) == 1:
        return GroupShape(tuple(names), tuple(sizes), dtypes[0], world_size, spans)
    num_bytes = [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    return GroupShape(tuple(names), tuple(num_bytes), torch.uint8, world_size, spans)
