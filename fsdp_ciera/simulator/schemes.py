"""Derives the steps of contenders that nobody recorded from a stock step ("derived").

The bytes that a codec sends and the seconds of its stages come from the tables of `ciera plan` (policies/): expected payloads
by category and learning rate, codec costs by machine. A policy that chooses among codecs makes its plan here as it would at the
first gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_ciera.bench.contenders import CONTENDERS, Contender
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import SimulationError
from fsdp_ciera.gather.agreement import ROW_BYTES
from fsdp_ciera.kernels.heads import HEAD_BYTES
from fsdp_ciera.planning.choose import make_plan
from fsdp_ciera.planning.forecast import Cluster
from fsdp_ciera.planning.plan import Conditions
from fsdp_ciera.planning.shapes import GroupShape, spans_of
from fsdp_ciera.policies.costs import CodecCost, StageCost, change_of
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policies.payloads import Payload, expected_payload
from fsdp_ciera.policies.tables import Table, rates_for
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.profiling.trace import Event, Trace
from fsdp_ciera.simulator.network import Place
from fsdp_ciera.simulator.place import part_of

_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the step of one of the stand's contenders is derived from a stock step."""

    contender: Contender
    source: str
    """What the derivation rests on."""
    bits: float | None = None
    """Bits that a value takes in every gather, for codecs that are not ours."""
    cost_like: str = ""
    """The codec of ours whose stages take as long as those of this one."""
    reduce_item_bytes: int | None = None
    """Bytes of a gradient's value, where they differ from the trace's."""

    @property
    def key(self) -> str:
        """The contender's key."""
        return self.contender.key

    @property
    def keeps(self) -> bool:
        """Whether backward gathers nothing."""
        return self.contender.reshard_after_forward is False

    @property
    def reshards_to_part(self) -> bool:
        """Whether backward gathers among some of the ranks."""
        return self.contender.reshard_after_forward == "int"

    @property
    def codecs(self) -> tuple[str, ...]:
        """Our codecs that the contender chooses from; empty for contenders that are not ours."""
        policy = self.contender.make_policy(_ANY_LEARNING_RATE, 1)
        return () if policy is None else policy.codecs

    @property
    def is_paper(self) -> bool:
        """Whether it is the paper's policy."""
        return self.contender.is_paper

    @property
    def needs_costs(self) -> bool:
        """Whether it codes what it gathers, so that its step depends on what codecs cost and send."""
        return self.contender.policy is not None or self.bits is not None


_ANY_LEARNING_RATE = 1e-5  # a policy's codecs do not depend on it
_TABLES = "rates and costs of `ciera plan`"


def _scheme(key: str, source: str = _TABLES, **fields: Any) -> Scheme:
    return Scheme(contender=CONTENDERS[key], source=source, **fields)


SCHEMES: tuple[Scheme, ...] = (
    _scheme("fsdp2", "the trace"),
    _scheme("fsdp2-keep", "no backward gathers"),
    _scheme("fsdp2-int", "backward gathers in a part"),
    _scheme("zero3", "two gathers, gradients in 16 bits", reduce_item_bytes=2),
    _scheme("int8", "8 bits and a scale for 4096 values; costs of a pass over them", bits=8 + 32 / 4096,
            cost_like="value_delta"),
    _scheme("zstd", "12.4 bits (ZipNN paper, zstd on bf16 models); costs of entropy", bits=12.4, cost_like="entropy"),
    _scheme("zipnn", "10.6 bits (ZipNN paper, bf16 models); costs of entropy", bits=10.6, cost_like="entropy"),
    *(_scheme(key) for key in ("entropy", "exponent_block", "exponent_delta", "value_delta", "paper", "default")),
)  # fmt: skip
"""Of the stand's contenders, those whose steps can be derived."""
BY_KEY: Mapping[str, Scheme] = {scheme.key: scheme for scheme in SCHEMES}


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a derivation assumes of codecs, links and schedule."""

    table: Table
    learning_rate: float
    costs: Mapping[str, CodecCost]
    between: Link
    inside: Link
    overlap: bool
    """Whether encoding runs beside other work, as on CUDA. Then a gather of unchanged values sends nothing, not even a head."""
    budget: str | None = "8GiB"
    """Memory for caches on a rank, for policies that choose among codecs; `None`: no limit."""
    is_hierarchical: bool = False


def shapes_at(
    param_groups: Sequence[tuple[Sequence[str], Sequence[int]]], place: Place, policy: CieraPolicy
) -> list[GroupShape]:
    """Returns shapes of param groups (names, whole sizes in values) cut evenly among the ranks: bf16, two gathers a step."""
    spans = spans_of([(range(place.world_size), 2)], policy)
    return [
        GroupShape(tuple(names), tuple(-(-size // place.world_size) for size in sizes), torch.bfloat16, place.world_size,
                   spans)
        for names, sizes in param_groups
    ]  # fmt: skip


def derive(
    stock: Trace,
    scheme: Scheme,
    param_groups: Sequence[tuple[Sequence[str], Sequence[int]]],
    place: Place,
    assumptions: Assumptions | None,
) -> Trace:
    """Derives the step of `scheme` from that of stock FSDP2 at `place`. Cost: no work that grows with the number of ranks.

    `param_groups`: names and whole sizes in values of the parameters of each. `assumptions` may be `None` if the scheme needs
    no costs; otherwise `SimulationError` is raised.
    """
    if place.world_size < 2 or scheme.key == "fsdp2":
        return replace(stock, contender=scheme.key)
    if scheme.keeps or scheme.reshards_to_part:
        return replace(stock, contender=scheme.key, events=tuple(_resharded(stock, scheme, place)))
    if scheme.reduce_item_bytes is not None:
        factor = scheme.reduce_item_bytes / stock.reduce_item_bytes
        events = [
            replace(event, payload_bytes=round(event.payload_bytes * factor))
            if event.node == "ReduceScatter"
            else event
            for event in stock.events
        ]
        return replace(stock, contender=scheme.key, reduce_item_bytes=scheme.reduce_item_bytes, events=tuple(events))
    if assumptions is None:
        raise SimulationError(f"the step of {scheme.key!r} depends on codec costs, and none are given")
    coded: list[tuple[_Gather, _Gather] | None]
    if scheme.bits is not None:
        coded = [_peer_gathers(sum(sizes) / place.world_size, scheme, place, assumptions) for _, sizes in param_groups]
    else:
        coded = _our_gathers(scheme, param_groups, place, assumptions)
    return replace(stock, contender=scheme.key, events=tuple(_coded(stock, coded, assumptions, place)))


@dataclass(frozen=True, kw_only=True)
class _Gather:
    """A param group's gather under a codec: the seconds of a rank's stages, and its payload."""

    hash_seconds: float
    cmp_seconds: float
    decmp_seconds: float
    payload_bytes: float
    in_node_bytes: float = 0.0


def _resharded(stock: Trace, scheme: Scheme, place: Place) -> Iterator[Event]:
    part = part_of(place)
    for event in stock.events:
        if event.node == "AllGather" and event.phase == "backward":
            if scheme.keeps:
                continue
            event = replace(event, payload_bytes=round(event.payload_bytes * place.world_size / part))
        yield event


def _coded(
    stock: Trace, coded: Sequence[tuple[_Gather, _Gather] | None], assumptions: Assumptions, place: Place
) -> Iterator[Event]:
    """Replaces every stock gather of a coded param group: the first by the gather after a change of the weights, all others by
    that of a repeat. `coded`: both gathers of each param group; `None` where it stays plain."""
    seen: set[int] = set()
    num_coded = sum(gathers is not None for gathers in coded)
    if num_coded:  # one small all-reduce agrees on all of them
        yield Event(node="AllReduce", phase="forward", group=None, seconds=0.0,
                    payload_bytes=ROW_BYTES * num_coded, num_collectives=1)  # fmt: skip
    for event in stock.events:
        gathers = None if event.node != "AllGather" or event.group is None else coded[event.group]
        if gathers is None or event.group is None:
            yield event
            continue
        is_repeat = event.group in seen
        seen.add(event.group)
        gather = gathers[is_repeat]
        sends = (
            gather.payload_bytes > 0 or not assumptions.overlap
        )  # without overlap a head travels even where nothing changed
        own = replace(event, seconds=0.0, payload_bytes=0, num_collectives=0)
        if not (assumptions.overlap and is_repeat):  # ranks agreed that nothing changed since: no hash
            yield replace(own, node="Hash", seconds=gather.hash_seconds)
        if sends or not is_repeat:
            yield replace(own, node="Cmp", seconds=gather.cmp_seconds)
        head_bytes = HEAD_BYTES if sends else 0
        yield replace(own, payload_bytes=round(gather.payload_bytes) + head_bytes, num_collectives=int(sends))
        if gather.in_node_bytes:
            yield replace(own, node="InNode", payload_bytes=round(gather.in_node_bytes), num_collectives=1)
        yield replace(own, node="Decmp", seconds=gather.decmp_seconds)


def _peer_gathers(num_values: float, scheme: Scheme, place: Place, assumptions: Assumptions) -> tuple[_Gather, _Gather]:
    assert scheme.bits is not None
    cost = assumptions.costs[scheme.cost_like]
    is_one_pass = scheme.cost_like == "value_delta"  # reads and writes every value once, both ways
    num_peers = place.world_size - 1
    gather = _Gather(
        hash_seconds=0.0,
        cmp_seconds=cost.decmp.seconds(num_values, 0.0) if is_one_pass else cost.cmp.seconds(num_values, 0.0),
        decmp_seconds=cost.decmp.seconds(num_peers * num_values, 0.0, num_peers),
        payload_bytes=num_values * scheme.bits / 8,
    )
    return gather, gather


def _our_gathers(
    scheme: Scheme,
    param_groups: Sequence[tuple[Sequence[str], Sequence[int]]],
    place: Place,
    assumptions: Assumptions,
) -> list[tuple[_Gather, _Gather] | None]:
    is_two_level = assumptions.is_hierarchical and place.hosts > 1 and place.local_size > 1
    chooses = scheme.is_paper or len(scheme.codecs) > 1
    fields: dict[str, Any] = {
        "cache_budget": assumptions.budget if chooses else None,
        "learning_rate": assumptions.learning_rate,
        "topology": "hierarchical" if is_two_level else "flat",
        "ranks_per_node": place.local_size if is_two_level else None,
    }
    policy = CieraPolicy.paper(**fields) if scheme.is_paper else CieraPolicy(codecs=scheme.codecs, **fields)
    shapes = shapes_at(param_groups, place, policy)
    if chooses:
        cluster = Cluster(
            world_size=place.world_size,
            ranks_per_node=place.local_size,
            between_nodes=assumptions.between,
            in_node=assumptions.inside,
        )
        conditions = Conditions(
            links=[[cluster.link_of(span) for span in shape.spans] for shape in shapes],
            costs=assumptions.costs,
            budget_bytes=policy.cache_budget_bytes(0),
            table=assumptions.table,
            overlap=assumptions.overlap,
        )
        chosen = make_plan(shapes, policy, conditions).codecs
    else:
        chosen = tuple(tuple(scheme.codecs[0] for _ in shape.names) for shape in shapes)
    return [
        None if all(codec == "raw" for codec in codecs) else _gathers_of(shape, codecs, assumptions)
        for shape, codecs in zip(shapes, chosen, strict=True)
    ]


def _stages_of(cost: CodecCost) -> tuple[StageCost, StageCost, StageCost]:
    return cost.hash, cost.cmp, cost.decmp


def _gathers_of(shape: GroupShape, codecs: Sequence[str], assumptions: Assumptions) -> tuple[_Gather, _Gather]:
    """Returns the first gather of a param group after a change of the weights, and a repeat of it."""
    (span,) = shape.spans
    num_peers = span.cut.num_nodes - 1
    _, layout = next(shape.layouts(codecs))
    costs = [assumptions.costs.get(run.codec, CodecCost()) for run in layout.runs]
    once_a_gather = [
        max(cost.per_gather for cost in of_stage) for of_stage in zip(*map(_stages_of, costs), strict=True)
    ]
    gathers = []
    for is_repeat in (False, True):
        stages, payload_bytes = list(once_a_gather), 0.0
        for run in layout.runs:
            codec = run.codec if CODECS[run.codec].supports(shape.dtype) else "raw"
            cost = assumptions.costs.get(codec, CodecCost())
            payload, change = _expected(codec, run.category, assumptions)
            change = 0.0 if is_repeat else change
            stages[0] += cost.hash.seconds(run.num_values, change)
            stages[1] += cost.cmp.seconds(run.num_values, change)
            stages[2] += cost.decmp.seconds(num_peers * run.num_values, change, num_peers)
            payload_bytes += run.num_values / 8 * (payload.repeat_bits if is_repeat else payload.first_bits)
        in_node_bytes = 0.0 if span.cut.is_flat else float(span.cut.num_nodes * shape.shard_bytes)
        gathers.append(_Gather(hash_seconds=stages[0], cmp_seconds=stages[1], decmp_seconds=stages[2],
                               payload_bytes=payload_bytes, in_node_bytes=in_node_bytes))  # fmt: skip
    return gathers[0], gathers[1]


def _expected(codec: str, category: str, assumptions: Assumptions) -> tuple[Payload, float]:
    """Returns the expected payload of a category's values under a codec, and the share of changes that its costs depend on."""
    rates, _ = rates_for(assumptions.table, category, assumptions.learning_rate, _BLOCK)
    return expected_payload(codec, torch.bfloat16, rates, _BLOCK), change_of(codec, rates, _BLOCK)
