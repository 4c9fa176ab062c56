"""`estimate_memory`: what a policy will cost in memory, before anything is allocated or sent.

The groups are those that FSDP2 has made, or would make; what they cost and which codecs they get is asked of
fsdp_ciera.planning.plan and fsdp_ciera.gather.layout, which decide it for live gathers too.
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
    """Bytes on each rank that a policy costs a model, beyond what stock FSDP2 takes."""

    world_size: int
    cache_bytes: int = 0
    """All caches, once every group has been gathered forward and backward: what `stats(model).cache_bytes` will say."""
    by_category: dict[str, int] = field(default_factory=dict)
    """The caches by shard category; they add up to `cache_bytes`."""
    by_codec: dict[str, int] = field(default_factory=dict)
    """The caches by codec, with 0 for codecs that are used and cache nothing; they add up to `cache_bytes`."""
    shard_bytes_by_codec: dict[str, int] = field(default_factory=dict)
    """Bytes of local shards, as gathered, that travel by each codec: how much of the model a budget leaves raw."""
    held_output_bytes: int = 0
    """Outputs that are kept for codecs that decode in place, less what counts as cache: what `stats(model)` calls so."""
    buffer_bytes: int = 0
    """Most that one gather holds besides caches and output: the payloads of all ranks that exchange them, as if none
    of them were smaller than raw, the own one where it was made, and what a hierarchical gather holds in addition. Gone
    when it ends. Not counted is what the backend takes, as in stock FSDP2: gloo copies what it gathers once more."""
    gathered_bytes: int = 0
    """The largest group, gathered: what stock FSDP2 allocates for it."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
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
    """What `policy` costs each of `world_size` ranks that share the parameters of `model`, on any device or on "meta".

    A model that is not sharded yet is taken as FSDP2 would shard it: `units` in groups of their own (default: the entries
    of the outermost lists of two or more modules of one class, that is the layers; a list of modules is one group) and
    the rest in the root's; gathered as `mp_policy.param_dtype` (default: the parameters' own); with an int for
    `reshard_after_forward`, all but the root are gathered over that many ranks in backward, as rank 0 sees it. HSDP: give
    the size of the shard dimension. A model under FSDP2 has all that already, so these three are not looked at then; ask
    between steps, when parameters are sharded. The plan is the one that `attach(model, policy)` will make; but where it would
    measure links and codecs, shards get the codec that sends the fewest bytes, which caches most, and a budget that is
    a share of free memory counts as none.

    Allocates nothing on the model's device and communicates nothing; a model that is not sharded needs no process group.
    Cost: some microseconds a parameter. Raises `CieraPolicyError` for arguments that are not allowed, or a
    `world_size` that is not that of a sharded model.
    """
    if not isinstance(policy, CieraPolicy):
        raise CieraPolicyError(f"policy={policy!r} must be a fsdp_ciera.CieraPolicy, for example CieraPolicy.paper()")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise CieraPolicyError(f"world_size={world_size!r} must be an int of at least 1")
    check_node_size(policy)
    roots = list(_fsdp_roots(model))
    if roots:
        shapes_of_roots = [list(_live_shapes(root, policy)) for root in roots]
        found = max((shape.world_size for shapes in shapes_of_roots for shape in shapes), default=1)
        if found != world_size:
            raise CieraPolicyError(
                f"world_size={world_size}, but the parameters of {type(model).__name__} are sharded over {found} ranks "
                f"(with HSDP the shard dimension counts): call estimate_memory(model, policy, {found})"
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
    """The plan of these groups, from what the policy says: without figures for link and codecs, as if only bytes counted."""
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
                cached = CODECS[run.codec].cache_bytes(
                    run.num_values, shape.dtype, policy.block_size, span.cut.num_nodes - 1
                )
                by_category[run.category] = by_category.get(run.category, 0) + cached
                by_codec[run.codec] = by_codec.get(run.codec, 0) + cached
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
    """What gather.exchange holds at most: a payload is as large as the shard, its section tables and block bitmaps."""
    shard_bytes = layout.num_values * layout.dtype.itemsize
    own = everyones = 0
    if not layout.is_raw:
        own = shard_bytes + sum(
            NUM_SECTIONS[run.codec] * TABLE_ENTRY_BYTES + -(-run.num_values // (8 * block_size)) for run in layout.runs
        )
        everyones = span.cut.num_nodes * own
    if span.cut.is_flat:
        return own + everyones
    column = span.cut.num_nodes * shard_bytes
    # the payloads of all are gone when columns are gathered
    return own + column + max(everyones, span.cut.ranks_per_node * column)


# A model under FSDP2


def _fsdp_roots(model: nn.Module) -> Iterator[nn.Module]:
    """The FSDP modules that are in no other one."""
    if isinstance(model, FSDPModule):
        yield cast(nn.Module, model)
        return
    for child in model.children():
        yield from _fsdp_roots(child)


def _live_shapes(root: nn.Module, policy: CieraPolicy) -> Iterator[GroupShape]:
    """The groups under an FSDP root, in the order in which it lists them."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    groups = {id(group): group for m in root.modules() if isinstance(m, FSDPModule) for group in param_groups(m)}
    own = {id(group) for group in param_groups(root)}
    for key, group in groups.items():
        if names_are_known(group):
            yield shape_of(group, policy)
        else:
            yield _shape_before_forward(group, names, policy, is_root=key in own)


def _shape_before_forward(
    group: FSDPParamGroup, names: dict[int, str], policy: CieraPolicy, *, is_root: bool
) -> GroupShape:
    """The shape that a group will have once its root has run its first forward; before, FSDP2 has settled no dtype."""
    parameters = sharded_parameters(group)
    return shape_from_parameters(
        [names[id(parameter)] for parameter, _, _ in parameters],
        [size for _, size, _ in parameters],
        [gathered_dtype(parameter.dtype, cast_dtype) for parameter, _, cast_dtype in parameters],
        shard_world_size(group),
        spans_of_group(group, policy, will_be_root=is_root),
    )
