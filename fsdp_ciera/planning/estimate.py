"""`estimate_memory`: the memory that a policy will cost, before anything is allocated or sent.

The parameter groups are those that FSDP2 has made, or would make. Their codecs and their costs come from
fsdp_ciera.planning.choose and fsdp_ciera.gather.layout, as those of live gathers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ciera._compat import (
    FSDPModule,
    FSDPParamGroup,
    names_are_known,
    param_groups,
    shard_world_size,
    sharded_parameters,
)
from fsdp_ciera.backends.host_coder import NUM_SECTIONS
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.gather.layout import Layout
from fsdp_ciera.gather.topology import check_node_size
from fsdp_ciera.kernels.heads import TABLE_ENTRY_BYTES
from fsdp_ciera.planning.choose import make_plan
from fsdp_ciera.planning.future import future_shapes, gathered_dtype, shape_from_parameters
from fsdp_ciera.planning.plan import Conditions, Plan
from fsdp_ciera.planning.shapes import GroupShape, Span, shape_of, spans_of_group
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.units import format_in


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of memory that a policy costs a model on each rank, beyond what stock FSDP2 takes."""

    world_size: int
    cache_bytes: int = 0
    """All caches, once every parameter group has been gathered forward and backward: `stats(model).cache_bytes` then."""
    by_category: dict[str, int] = field(default_factory=dict)
    """The caches by shard category; they add up to `cache_bytes`."""
    by_codec: dict[str, int] = field(default_factory=dict)
    """The caches by codec, with 0 for codecs that are used and cache nothing; they add up to `cache_bytes`."""
    shard_bytes_by_codec: dict[str, int] = field(default_factory=dict)
    """By codec: bytes of local shards, as gathered, that it encodes. `"raw"` says how much of the model a budget leaves raw."""
    held_output_bytes: int = 0
    """Outputs that are kept for codecs that decode in place, less what counts as cache: as in `stats(model)`."""
    buffer_bytes: int = 0
    """The most that one gather holds besides caches and output, until it ends: the payloads of all ranks that exchange them, as
    if none were smaller than raw, the own payload where it was made, and what a hierarchical gather holds in addition. What the
    backend of torch.distributed takes is not counted, as in stock FSDP2: gloo copies what it gathers once more."""
    gathered_bytes: int = 0
    """The largest parameter group, gathered: what stock FSDP2 allocates for it."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.world_size == 1:
            return "fsdp_ciera: no memory, since nothing is gathered (world_size is 1)"
        held = (
            f"{format_in(self.held_output_bytes, 'MiB')} MiB of outputs that are held, "
            if self.held_output_bytes
            else ""
        )
        codecs = ", ".join(f"{codec} {format_in(num_bytes, 'MiB')}" for codec, num_bytes in self.by_codec.items())
        return (
            f"fsdp_ciera: {format_in(self.cache_bytes, 'MiB')} MiB of caches on each of {self.world_size} ranks ({codecs}), "
            f"{held}and at most {format_in(self.buffer_bytes, 'MiB')} MiB while a group is gathered"
        )


def estimate_memory(
    model: nn.Module,
    policy: CieraPolicy,
    world_size: int,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    units: Sequence[nn.Module | Sequence[nn.Module]] | None = None,
) -> MemoryEstimate:
    """The memory that `policy` costs each of `world_size` ranks that share the parameters of `model`.

    A model that is not sharded yet is planned as FSDP2 would shard it. Each of `units` becomes a parameter group (default: the
    entries of the outermost lists of two or more modules of one class, that is the layers; a list of modules becomes one
    parameter group), and the rest of the model belongs to the root. Parameters are gathered as `mp_policy.param_dtype`
    (default: their own dtype). With an int for `reshard_after_forward`, all parameter groups but the root's are gathered over
    that many ranks in backward, as rank 0 sees it. For HSDP, `world_size` is the size of the shard dimension.

    A model under FSDP2 already has all this, so the three optional arguments are ignored for it; call this between steps, when
    parameters are sharded.

    The plan is the one that `attach(model, policy)` will make, with two exceptions: where that would measure links and codecs,
    shards get the codec that sends the fewest bytes, which caches most; and a budget that is a share of free memory counts as
    no limit.

    The model may be on any device or on "meta". Allocates nothing on its device and communicates nothing; a model that is not
    sharded needs no process group. Cost: some microseconds a parameter. Raises `CieraPolicyError` for arguments that are not
    allowed, and for a `world_size` other than that of a sharded model.
    """
    if not isinstance(policy, CieraPolicy):
        raise CieraPolicyError(f"policy={policy!r} must be a fsdp_ciera.CieraPolicy, for example CieraPolicy.paper()")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise CieraPolicyError(f"world_size={world_size!r} must be an int of at least 1")
    check_node_size(policy)
    roots = list(_fsdp_roots(model))
    if roots:
        shapes_of_roots = [list(_live_shapes(root, policy)) for root in roots]
        num_ranks = max((shape.world_size for shapes in shapes_of_roots for shape in shapes), default=1)
        if num_ranks != world_size:
            raise CieraPolicyError(
                f"world_size={world_size}, but the parameters of {type(model).__name__} are sharded over {num_ranks} ranks "
                f"(with HSDP the shard dimension counts): call estimate_memory(model, policy, {num_ranks})"
            )
    else:
        cast_dtype = None if mp_policy is None else mp_policy.param_dtype
        shapes_of_roots = [future_shapes(model, policy, world_size, cast_dtype, reshard_after_forward, units)]
    plans: list[tuple[GroupShape, Sequence[str]]] = []
    held_output_bytes = 0
    for shapes in shapes_of_roots:  # every FSDP root has the whole budget
        plan = plan_without_measuring(shapes, policy)
        plans += zip(shapes, plan.codecs, strict=True)
        held_output_bytes += plan.held_output_bytes(shapes)
    return replace(_estimate(plans, policy, world_size), held_output_bytes=held_output_bytes)


def plan_without_measuring(shapes: Sequence[GroupShape], policy: CieraPolicy) -> Plan:
    """The plan of parameter groups with these shapes, from the policy alone: if the policy does not give both the link and the
    codec costs, only bytes count."""
    links = None
    if isinstance(policy.link, Link) and not policy.measures:
        links = [[policy.link for _ in shape.spans] for shape in shapes]
    budget_bytes = None if policy.is_share_of_memory else policy.cache_budget_bytes(0)
    return make_plan(shapes, policy, Conditions(links=links, costs=policy.codec_costs or {}, budget_bytes=budget_bytes))


def _estimate(
    plans: Iterable[tuple[GroupShape, Sequence[str]]], policy: CieraPolicy, world_size: int
) -> MemoryEstimate:
    by_category: dict[str, int] = {}
    by_codec: dict[str, int] = {}
    shard_bytes: dict[str, int] = {}
    buffer_bytes = gathered_bytes = 0
    for shape, codecs in plans:
        for span, layout in shape.layouts(codecs):
            buffer_bytes = max(buffer_bytes, _buffer_bytes(span, layout, policy.block_size))
            for run in layout.runs:
                cache_bytes = CODECS[run.codec].cache_bytes(
                    run.num_values, shape.dtype, policy.block_size, span.cut.num_nodes - 1
                )
                by_category[run.category] = by_category.get(run.category, 0) + cache_bytes
                by_codec[run.codec] = by_codec.get(run.codec, 0) + cache_bytes
        if shape.spans:
            gathered_bytes = max(gathered_bytes, shape.world_size * shape.shard_bytes)
            for codec, size in zip(codecs, shape.sizes, strict=True):
                shard_bytes[codec] = shard_bytes.get(codec, 0) + size * shape.dtype.itemsize
    return MemoryEstimate(
        world_size=world_size,
        cache_bytes=sum(by_codec.values()),
        by_category=by_category,
        by_codec=by_codec,
        shard_bytes_by_codec=shard_bytes,
        buffer_bytes=buffer_bytes,
        gathered_bytes=gathered_bytes,
    )


def _buffer_bytes(span: Span, layout: Layout, block_size: int) -> int:
    """The most bytes that gather.exchange holds: a payload is at most as large as the shard, its section tables and its block
    bitmaps together."""
    shard_bytes = layout.num_values * layout.dtype.itemsize
    own_bytes = all_payload_bytes = 0
    if not layout.is_raw:
        own_bytes = shard_bytes + sum(
            NUM_SECTIONS[run.codec] * TABLE_ENTRY_BYTES + -(-run.num_values // (8 * block_size)) for run in layout.runs
        )
        all_payload_bytes = span.cut.num_nodes * own_bytes
    if span.cut.is_flat:
        return own_bytes + all_payload_bytes
    column_bytes = span.cut.num_nodes * shard_bytes
    # the payloads of all ranks are gone when columns are gathered
    return own_bytes + column_bytes + max(all_payload_bytes, span.cut.ranks_per_node * column_bytes)


# A model under FSDP2


def _fsdp_roots(model: nn.Module) -> Iterator[nn.Module]:
    """The FSDP modules that are inside no other FSDP module."""
    if isinstance(model, FSDPModule):
        yield cast(nn.Module, model)
        return
    for child in model.children():
        yield from _fsdp_roots(child)


def _live_shapes(root: nn.Module, policy: CieraPolicy) -> Iterator[GroupShape]:
    """The shapes of the parameter groups under an FSDP root, in the order in which the root lists them."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    param_groups_by_id = {
        id(param_group): param_group
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for param_group in param_groups(module)
    }
    root_ids = {id(param_group) for param_group in param_groups(root)}
    for key, param_group in param_groups_by_id.items():
        if names_are_known(param_group):
            yield shape_of(param_group, policy)
        else:
            yield _shape_before_forward(param_group, names, policy, is_root=key in root_ids)


def _shape_before_forward(
    param_group: FSDPParamGroup, names: dict[int, str], policy: CieraPolicy, *, is_root: bool
) -> GroupShape:
    """The shape that a parameter group will have after its root's first forward, before which FSDP2 has settled no dtype."""
    parameters = sharded_parameters(param_group)
    return shape_from_parameters(
        [names[id(parameter)] for parameter, _, _ in parameters],
        [size for _, size, _ in parameters],
        [gathered_dtype(parameter.dtype, cast_dtype) for parameter, _, cast_dtype in parameters],
        shard_world_size(param_group),
        spans_of_group(param_group, policy, will_be_root=is_root),
    )
