"""`forecast`: compares a policy for a model on a cluster with FSDP2, ZeRO-3 and ZeRO++. Nothing is allocated or sent.

Bytes and seconds are those of one rank in an optimizer step. Seconds are those of the links alone, without overlap with
computation: a projection, not a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.planning.choose import make_plan
from fsdp_ciera.planning.future import future_shapes
from fsdp_ciera.planning.plan import Conditions, Plan
from fsdp_ciera.planning.shapes import GroupShape, Span
from fsdp_ciera.policies.costs import CodecCost
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policies.tables import Table
from fsdp_ciera.policy import CieraPolicy


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`world_size` GPUs, `ranks_per_node` on each node."""

    world_size: int
    ranks_per_node: int
    between_nodes: Link
    """The link of a flat all-gather over all nodes. Its speed is NCCL's bus bandwidth: what a node sends and receives (200
    Gbit/s InfiniBand: 8 GB/s in the paper). Gathers that a node's ranks make side by side share it."""
    in_node: Link
    """The link of an all-gather within a node."""

    def __post_init__(self) -> None:
        if (
            self.world_size < 2
            or self.ranks_per_node < 1
            or self.world_size % min(self.ranks_per_node, self.world_size)
        ):
            raise CieraPolicyError(
                f"world_size={self.world_size} in nodes of {self.ranks_per_node} is not allowed: at least 2 ranks, and nodes "
                "that are all full"
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.world_size // self.ranks_per_node)

    @property
    def local_size(self) -> int:
        """Number of ranks of a node."""
        return self.world_size // self.num_nodes

    @property
    def ring_share(self) -> int:
        """The number of ranks of which one sends to another node, in a ring over all ranks; 1 if there is one node."""
        return 1 if self.num_nodes == 1 else self.local_size

    @property
    def flat_link(self) -> Link:
        """The link of a flat gather over all ranks."""
        return self.in_node if self.num_nodes == 1 else self.between_nodes

    def link_of(self, span: Span) -> Link:
        """The link that the payloads of `span` take."""
        if self.num_nodes == 1 or span.cut.world_size <= self.ranks_per_node:
            return self.in_node
        if span.cut.is_flat:
            return self.between_nodes
        return replace(
            self.between_nodes, bytes_per_second=self.between_nodes.bytes_per_second / span.cut.ranks_per_node
        )


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """One way to train: what a rank sends in an optimizer step, and what it holds beyond plain FSDP2's memory."""

    name: str
    gather_bytes: float
    """Bytes of gathers that this rank sends, to any rank."""
    slow_bytes: float
    """The part of `gather_bytes` that crosses nodes, as the average rank of a node sends it (in a ring one rank of each node
    sends across); all of `gather_bytes` if there is one node."""
    reduce_bytes: float
    """Bytes that this rank sends to reduce gradients."""
    gather_seconds: float
    """Seconds of gathers on the links, plus the seconds that codecs take on the critical path."""
    extra_memory_bytes: float
    is_lossless: bool
    source: str
    """Where the scheme is described."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan, and the contenders to compare; the last contender is fsdp_ciera with that plan."""

    cluster: Cluster
    num_parameters: int
    topology: str
    plan: Plan
    contenders: tuple[ForecastRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "plan": self.plan.to_dict()}


def forecast(
    model: nn.Module,
    policy: CieraPolicy,
    cluster: Cluster,
    *,
    costs: Mapping[str, CodecCost],
    overlap: bool = True,
    table: Table | None = None,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
) -> Forecast:
    """Plans `model` (any device; "meta" needs no memory) on `cluster`, with layers and root that reshard after forward.

    `costs` are the codec costs of one rank; with `overlap` encoding costs nothing (the paper's CCP). With `policy.topology`
    "auto", gathers are flat or hierarchical, whichever takes fewer seconds. A fused parameter of experts is cut along dimension
    1 if that needs no padding and dimension 0 does. Time: below a second. Raises `CieraPolicyError`, also for a `cache_budget`
    that is a share of free memory.
    """
    if policy.is_share_of_memory:
        raise CieraPolicyError(
            f"cache_budget={policy.cache_budget!r} is a share of a GPU that is not there: give bytes"
        )
    topologies: list[Literal["flat", "hierarchical"]] = ["flat", "hierarchical"]
    if cluster.num_nodes == 1 or cluster.local_size == 1:
        topologies = ["flat"]
    elif policy.topology != "auto":
        topologies = [policy.topology]
    candidates = []
    for topology in topologies:
        ranks_per_node = cluster.ranks_per_node if topology == "hierarchical" else None
        topology_policy = replace(policy, topology=topology, ranks_per_node=ranks_per_node)
        shapes = future_shapes(
            model,
            topology_policy,
            cluster.world_size,
            param_dtype,
            reshard_after_forward=True,
            units=None,
            shard_dim=lambda p: _shard_dim(p, cluster.world_size),
            root_reshards=True,
        )
        conditions = Conditions(
            links=[[cluster.link_of(span) for span in shape.spans] for shape in shapes],
            costs=costs,
            budget_bytes=topology_policy.cache_budget_bytes(0),
            table=table,
            overlap=overlap,
        )
        plan = make_plan(shapes, topology_policy, conditions)
        seconds = _planned_seconds(shapes, plan, topology_policy, cluster, conditions)
        candidates.append((seconds, topology, shapes, plan))
    seconds, topology, shapes, plan = min(candidates, key=lambda candidate: candidate[0])
    ours = ForecastRow(
        name="fsdp_ciera",
        gather_bytes=plan.wire_bytes,
        slow_bytes=(plan.wire_bytes - plan.in_node_bytes) / (cluster.ring_share if topology == "flat" else 1),
        reduce_bytes=_reduce_bytes(shapes, cluster, reduce_dtype.itemsize),
        gather_seconds=seconds,
        extra_memory_bytes=plan.cache_bytes + plan.held_output_bytes(shapes),
        is_lossless=True,
        source=f"{topology} gathers",
    )
    contenders = (*_others(shapes, policy, cluster, param_dtype, reduce_dtype), ours)
    return Forecast(
        cluster=cluster,
        num_parameters=sum(p.numel() for p in model.parameters()),
        topology=topology,
        plan=plan,
        contenders=contenders,
        notes=(*_notes(model, policy, cluster, shapes), *plan.notes),
    )


def _notes(model: nn.Module, policy: CieraPolicy, cluster: Cluster, shapes: Sequence[GroupShape]) -> Iterator[str]:
    """Texts that say what the figures of the forecast assume."""
    num_cut_inside = sum(1 for p in model.parameters() if _shard_dim(p, cluster.world_size))
    if num_cut_inside:
        yield (
            f"{num_cut_inside} parameters of experts are cut along dimension 1 (fully_shard's shard_placement_fn): cut along "
            f"dimension 0, {cluster.world_size} ranks would gather padding"
        )
    gathered_share = (
        cluster.world_size * sum(sum(shape.sizes) for shape in shapes) / sum(p.numel() for p in model.parameters())
    )
    if gathered_share > 1.02:
        yield (
            f"padded shards: {cluster.world_size} ranks gather {gathered_share:.2f} times the model, with FSDP2 and fsdp_ciera "
            "alike (ZeRO cuts flat, and would not); share the parameters among fewer ranks (HSDP)"
        )
    if policy.micro_batches > 1:
        yield (
            "FSDP2 and fsdp_ciera reduce gradients once a step, and keep them whole until then "
            "(set_requires_gradient_sync); ZeRO reduces in every micro-batch"
        )


def _shard_dim(parameter: nn.Parameter, world_size: int) -> int:
    shape = parameter.shape
    return 1 if len(shape) == 3 and shape[0] % world_size and shape[1] % world_size == 0 else 0


def _planned_seconds(
    shapes: Sequence[GroupShape], plan: Plan, policy: CieraPolicy, cluster: Cluster, conditions: Conditions
) -> float:
    """Seconds of the gathers of a step: those of raw gathers on the same links, minus the gain, plus those that codecs take
    once a gather and those of gathers inside nodes."""
    total, agreement_seconds = -plan.gain_seconds, 0.0  # one agreement for all parameter groups
    for shape, codecs in zip(shapes, plan.codecs, strict=True):
        is_raw = all(codec == "raw" for codec in codecs)
        for span in shape.spans:
            link, cut = cluster.link_of(span), span.cut
            num_gathers = span.num_gathers * policy.micro_batches
            if is_raw and policy.may_go_plain:
                total += num_gathers * cluster.flat_link.seconds(shape.shard_bytes, cut.world_size)
                continue
            total += num_gathers * link.seconds(shape.shard_bytes, cut.num_nodes)
            total += num_gathers * cluster.in_node.seconds(cut.num_nodes * shape.shard_bytes, cut.ranks_per_node)
            total += num_gathers * conditions.per_gather_seconds(codecs)
            agreement_seconds = max(agreement_seconds, policy.micro_batches * link.latency_seconds)
    return total + agreement_seconds


def _reduce_bytes(shapes: Sequence[GroupShape], cluster: Cluster, item_bytes: float) -> float:
    """Bytes that a rank sends in one reduce-scatter of all gradients, with `item_bytes` bytes per value."""
    return (cluster.world_size - 1) * item_bytes * sum(sum(shape.sizes) for shape in shapes)


def _others(
    shapes: Sequence[GroupShape],
    policy: CieraPolicy,
    cluster: Cluster,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> list[ForecastRow]:
    """The contenders besides fsdp_ciera, as their publications describe them.

    ZeRO-3 (Rajbhandari et al. 2020, section 7): two gathers and a reduce-scatter in 16 bits of every micro-batch. ZeRO++ (Wang
    et al. 2023, sections 3.1 to 3.3): the forward gather in 8 bits, the backward gather inside nodes from a second copy, the
    gradients in 4 bits; scales of quantised blocks are left out.
    """
    micro_batches, world_size = policy.micro_batches, cluster.world_size
    num_values = sum(sum(shape.sizes) for shape in shapes)
    flat_link = cluster.flat_link
    peers = world_size - 1
    gathered_bytes = peers * num_values * param_dtype.itemsize

    def seconds(num_gathers: float, item_bytes: float, link: Link = flat_link, num_ranks: int = world_size) -> float:
        scale = world_size / num_ranks  # fewer ranks hold the same number of values together
        return num_gathers * sum(link.seconds(scale * sum(shape.sizes) * item_bytes, num_ranks) for shape in shapes)

    item_bytes = param_dtype.itemsize
    reduce_bytes = _reduce_bytes(shapes, cluster, reduce_dtype.itemsize)
    local_size = cluster.local_size
    ring_share = cluster.ring_share
    second_copy_bytes = num_values * world_size / local_size * item_bytes
    in_node_bytes = (local_size - 1) * second_copy_bytes
    return [
        ForecastRow(
            name="FSDP2",
            gather_bytes=2 * micro_batches * gathered_bytes,
            slow_bytes=2 * micro_batches * gathered_bytes / ring_share,
            reduce_bytes=reduce_bytes,
            gather_seconds=seconds(2 * micro_batches, item_bytes),
            extra_memory_bytes=0,
            is_lossless=True,
            source="reshard_after_forward=True",
        ),
        ForecastRow(
            name="FSDP2, no reshard",
            gather_bytes=micro_batches * gathered_bytes,
            slow_bytes=micro_batches * gathered_bytes / ring_share,
            reduce_bytes=reduce_bytes,
            gather_seconds=seconds(micro_batches, item_bytes),
            extra_memory_bytes=world_size * num_values * item_bytes,
            is_lossless=True,
            source="reshard_after_forward=False",
        ),
        ForecastRow(
            name="ZeRO-3",
            gather_bytes=2 * micro_batches * gathered_bytes,
            slow_bytes=2 * micro_batches * gathered_bytes / ring_share,
            reduce_bytes=micro_batches * _reduce_bytes(shapes, cluster, 2),
            gather_seconds=seconds(2 * micro_batches, item_bytes),
            extra_memory_bytes=0,
            is_lossless=True,
            source="16 bits, gradients too",
        ),
        ForecastRow(
            name="ZeRO++ (lossy)",
            gather_bytes=micro_batches * (peers * num_values + in_node_bytes),
            slow_bytes=micro_batches
            * (peers * num_values / ring_share + (in_node_bytes if cluster.num_nodes == 1 else 0)),
            reduce_bytes=micro_batches * _reduce_bytes(shapes, cluster, 0.5),
            gather_seconds=seconds(micro_batches, 1) + seconds(micro_batches, item_bytes, cluster.in_node, local_size),
            extra_memory_bytes=second_copy_bytes,
            is_lossless=False,
            source="8-bit gather, second copy a node",
        ),
    ]
