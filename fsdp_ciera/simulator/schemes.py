"""How the other contenders' steps follow from a stock step, where nobody recorded them ("derived").

What a codec sends and what its stages take come from the tables of `ciera plan` (policies/): expected payloads by category and
learning rate, codec costs by machine. A policy that chooses makes its plan here as it would at the first gather.
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
from fsdp_ciera.policies.costs import CodecCost, change_of
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
    """How the step of a contender of the stand follows from a stock step."""

    contender: Contender
    source: str
    """What the derivation rests on."""
    bits: float | None = None
    """A value, in every gather; of codecs that are not ours."""
    cost_like: str = ""
    """The codec of ours whose stages take as long."""
    reduce_item_bytes: int | None = None
    """Of a gradient, where it is not what the trace says."""

    @property
    def key(self) -> str:
        """The contender's."""
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
        """Of ours, to choose from; none of all others."""
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
    """What derivations go by."""

    table: Table
    learning_rate: float
    costs: Mapping[str, CodecCost]
    between: Link
    inside: Link
    overlap: bool
    """As on CUDA: encoding runs beside other work, and a gather of nothing sends nothing, not even a head."""
    budget: str | None = "8GiB"
    """Caches on a rank, of the policies that choose."""
    is_hierarchical: bool = False


def shapes_at(
    groups: Sequence[tuple[Sequence[str], Sequence[int]]], place: Place, policy: CieraPolicy
) -> list[GroupShape]:
    """Groups of parameters (names, whole sizes in values) cut evenly among the ranks: bf16, two gathers a step."""
    spans = spans_of([(range(place.world_size), 2)], policy)
    return [
        GroupShape(tuple(names), tuple(-(-size // place.world_size) for size in sizes), torch.bfloat16, place.world_size,
                   spans)
        for names, sizes in groups
    ]  # fmt: skip


def derive(
    stock: Trace,
    scheme: Scheme,
    groups: Sequence[tuple[Sequence[str], Sequence[int]]],
    place: Place,
    given: Assumptions | None,
) -> Trace:
    """The step of `scheme`, from that of stock FSDP2 at `place`. Cost: no work that grows with the number of ranks.

    `given` may be missing where the scheme needs no costs.
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
    if given is None:
        raise SimulationError(f"the step of {scheme.key!r} depends on codec costs, and none are given")
    coded: list[tuple[_Gather, _Gather] | None]
    if scheme.bits is not None:
        coded = [_peer_group(sum(sizes) / place.world_size, scheme, place, given) for _, sizes in groups]
    else:
        coded = _our_groups(scheme, groups, place, given)
    return replace(stock, contender=scheme.key, events=tuple(_coded(stock, coded, given, place)))


@dataclass(frozen=True, kw_only=True)
class _Gather:
    """A group's gather under a codec: seconds of a rank's stages, and its payload."""

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
    stock: Trace, coded: Sequence[tuple[_Gather, _Gather] | None], given: Assumptions, place: Place
) -> Iterator[Event]:
    """Every stock gather of a group becomes that of its codec: the first one after a change of the weights, then repeats."""
    seen: set[int] = set()
    num_coded = sum(found is not None for found in coded)
    if num_coded:  # one small all-reduce agrees on all of them
        yield Event(node="AllReduce", phase="forward", group=None, seconds=0.0,
                    payload_bytes=ROW_BYTES * num_coded, num_collectives=1)  # fmt: skip
    for event in stock.events:
        found = None if event.node != "AllGather" or event.group is None else coded[event.group]
        if found is None or event.group is None:
            yield event
            continue
        is_repeat = event.group in seen
        seen.add(event.group)
        gather = found[is_repeat]
        sends = gather.payload_bytes > 0 or not given.overlap  # there a head travels even where nothing changed
        own = replace(event, seconds=0.0, payload_bytes=0, num_collectives=0)
        if not (given.overlap and is_repeat):  # agreed on: nothing changed since, and nobody looks
            yield replace(own, node="Hash", seconds=gather.hash_seconds)
        if sends or not is_repeat:
            yield replace(own, node="Cmp", seconds=gather.cmp_seconds)
        head_bytes = HEAD_BYTES if sends else 0
        yield replace(own, payload_bytes=round(gather.payload_bytes) + head_bytes, num_collectives=int(sends))
        if gather.in_node_bytes:
            yield replace(own, node="InNode", payload_bytes=round(gather.in_node_bytes), num_collectives=1)
        yield replace(own, node="Decmp", seconds=gather.decmp_seconds)


def _peer_group(num_values: float, scheme: Scheme, place: Place, given: Assumptions) -> tuple[_Gather, _Gather]:
    assert scheme.bits is not None
    cost = given.costs[scheme.cost_like]
    one_pass = scheme.cost_like == "value_delta"  # reads and writes every value once, both ways
    peers = place.world_size - 1
    gather = _Gather(
        hash_seconds=0.0,
        cmp_seconds=cost.decmp.seconds(num_values, 0.0) if one_pass else cost.cmp.seconds(num_values, 0.0),
        decmp_seconds=cost.decmp.seconds(peers * num_values, 0.0, peers),
        payload_bytes=num_values * scheme.bits / 8,
    )
    return gather, gather


def _our_groups(
    scheme: Scheme, groups: Sequence[tuple[Sequence[str], Sequence[int]]], place: Place, given: Assumptions
) -> list[tuple[_Gather, _Gather] | None]:
    is_two_level = given.is_hierarchical and place.hosts > 1 and place.local_size > 1
    chooses = scheme.is_paper or len(scheme.codecs) > 1
    fields: dict[str, Any] = {
        "cache_budget": given.budget if chooses else None,
        "learning_rate": given.learning_rate,
        "topology": "hierarchical" if is_two_level else "flat",
        "ranks_per_node": place.local_size if is_two_level else None,
    }
    policy = CieraPolicy.paper(**fields) if scheme.is_paper else CieraPolicy(codecs=scheme.codecs, **fields)
    shapes = shapes_at(groups, place, policy)
    if chooses:
        cluster = Cluster(
            world_size=place.world_size,
            ranks_per_node=place.local_size,
            between_nodes=given.between,
            in_node=given.inside,
        )
        conditions = Conditions(
            links=[[cluster.link_of(span) for span in shape.spans] for shape in shapes],
            costs=given.costs,
            budget_bytes=policy.cache_budget_bytes(0),
            table=given.table,
            overlap=given.overlap,
        )
        chosen = make_plan(shapes, policy, conditions).codecs
    else:
        chosen = tuple(tuple(scheme.codecs[0] for _ in shape.names) for shape in shapes)
    return [
        None if all(codec == "raw" for codec in codecs) else _our_group(shape, codecs, policy, given)
        for shape, codecs in zip(shapes, chosen, strict=True)
    ]


def _our_group(
    shape: GroupShape, codecs: Sequence[str], policy: CieraPolicy, given: Assumptions
) -> tuple[_Gather, _Gather]:
    (span,) = shape.spans
    peers = span.cut.num_nodes - 1
    _, layout = next(shape.layouts(codecs))
    made = []
    for is_repeat in (False, True):
        costs = [given.costs.get(codec, CodecCost()) for codec in dict.fromkeys(run.codec for run in layout.runs)]
        stages = [
            max(cost.hash.per_gather for cost in costs),
            max(cost.cmp.per_gather for cost in costs),
            max(cost.decmp.per_gather for cost in costs),
        ]
        payload_bytes = 0.0
        for run in layout.runs:
            codec = run.codec if CODECS[run.codec].supports(shape.dtype) else "raw"
            cost = given.costs.get(codec, CodecCost())
            payload, change = _expected(codec, run.category, given)
            change = 0.0 if is_repeat else change
            stages[0] += cost.hash.seconds(run.num_values, change)
            stages[1] += cost.cmp.seconds(run.num_values, change)
            stages[2] += cost.decmp.seconds(peers * run.num_values, change, peers)
            payload_bytes += run.num_values / 8 * (payload.repeat_bits if is_repeat else payload.first_bits)
        inside = 0.0 if span.cut.is_flat else float(span.cut.num_nodes * shape.shard_bytes)
        made.append(_Gather(hash_seconds=stages[0], cmp_seconds=stages[1], decmp_seconds=stages[2],
                            payload_bytes=payload_bytes, in_node_bytes=inside))  # fmt: skip
    return made[0], made[1]


def _expected(codec: str, category: str, given: Assumptions) -> tuple[Payload, float]:
    """What a codec sends of values of a category, and the share of them that its costs go by."""
    rates, _ = rates_for(given.table, category, given.learning_rate, _BLOCK)
    return expected_payload(codec, torch.bfloat16, rates, _BLOCK), change_of(codec, rates, _BLOCK)
