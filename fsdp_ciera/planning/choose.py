"""How a plan is made: a pure function.

    shapes + rates (tables, or measured) + links + codec costs  ->  gain and cache of every (shard, codec)
    gains and caches + budget                                    ->  one codec a shard (policies/knapsack.py, greedy.py)

cohort.py calls it for live groups, estimate.py and forecast.py for those that a model would get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp_ciera.backends.host_coder import NUM_SECTIONS
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.gather.agreement import ROW_BYTES
from fsdp_ciera.gather.topology import Cut
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.heads import HEAD_BYTES, TABLE_ENTRY_BYTES
from fsdp_ciera.planning.plan import Conditions, Plan, PlanRow
from fsdp_ciera.planning.shapes import GroupShape
from fsdp_ciera.policies.categories import CATEGORIES, Category, categorize
from fsdp_ciera.policies.costs import FREE, CodecCost, change_of
from fsdp_ciera.policies.gain import ShardBytes, StepTraffic, paper_gain
from fsdp_ciera.policies.greedy import choose_greedily
from fsdp_ciera.policies.knapsack import choose_best
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policies.payloads import Payload, expected_payload
from fsdp_ciera.policies.rates import Rates
from fsdp_ciera.policies.tables import DEFAULT_TABLE, Table, load_table, rates_for
from fsdp_ciera.policy import CieraPolicy

ASSUMED_LEARNING_RATE = 1e-4
"""Where the policy does not say: the one of the usual two at which more changes, so that gains are not promised too high."""
BYTES_COUNT = Link(0.0, 1.0)
"""So slow that nothing but bytes counts."""


@dataclass(frozen=True)
class _Option:
    """A codec for a shard."""

    codec: str
    payload: Payload
    gain_seconds: float
    """A step; bytes where only bytes count."""
    raw_bytes: float
    item_bits: int
    """Of a value that goes raw."""
    cache_bytes: int


def make_plan(shapes: Sequence[GroupShape], policy: CieraPolicy, conditions: Conditions) -> Plan:
    """The plan of these groups under `policy`. Equal arguments give equal plans.

    A policy with several codecs gives each shard the one with most gain, as far as gains are positive and the budget goes;
    one with a single codec uses it wherever it is opted in and fits. A group whose gains do not outweigh its part of the
    agreements goes raw altogether. Cost: some ten microseconds a (shard, codec).
    """
    lr = policy.learning_rate or ASSUMED_LEARNING_RATE
    table = conditions.table or load_table(policy.tables or DEFAULT_TABLE)
    rates, notes = _rates_of_categories(shapes, policy, table, lr)
    offers = [_offers(index, shape, policy, conditions, rates) for index, shape in enumerate(shapes)]
    chosen = _choose(shapes, offers, policy, conditions)
    by_seconds = conditions.links is not None
    rows = tuple(row if by_seconds else replace(row, gain_seconds=0.0) for row in _rows(shapes, chosen, policy))
    links = [link for spans in conditions.links or () for link in spans]
    return Plan(
        codecs=tuple(tuple("raw" if option is None else option.codec for option in group) for group in chosen),
        rows=rows,
        overhead_bytes=sum(
            _overhead_bytes(index, shape, group, policy, conditions)
            for index, (shape, group) in enumerate(zip(shapes, chosen, strict=True))
        ),
        budget_bytes=conditions.budget_bytes,
        table=table.name,
        learning_rate=lr,
        link=min(links, key=lambda link: link.bytes_per_second) if links else None,
        notes=notes,
    )


def _rates_of_categories(
    shapes: Sequence[GroupShape], policy: CieraPolicy, table: Table, lr: float
) -> tuple[dict[str, Rates], tuple[str, ...]]:
    found: dict[str, Rates] = {}
    notes: dict[str, list[str]] = {}
    if policy.learning_rate is None:
        notes[f"no learning_rate in the policy: {lr:g} is assumed"] = []
    present = {categorize(name) for shape in shapes for name in shape.names}
    for category in CATEGORIES:
        if category in present:
            found[category], its_notes = rates_for(table, category, lr, policy.block_size)
            for note in its_notes:
                notes.setdefault(note, []).append(category)
    return found, tuple(note.format(category=", ".join(categories)) for note, categories in notes.items())


def _offers(
    index: int, shape: GroupShape, policy: CieraPolicy, conditions: Conditions, rates: Mapping[str, Rates]
) -> list[list[_Option]]:
    """The codecs that each shard of a group may take."""
    measured = conditions.measured[index] if conditions.measured is not None else None
    made = []
    for place, (name, size) in enumerate(zip(shape.names, shape.sizes, strict=True)):
        category = categorize(name)
        options = []
        for number, codec in enumerate(policy.codecs):
            allowed = codec in policy.codecs_for(category) and CODECS[codec].supports(shape.dtype)
            if not allowed or codec == "raw" or codec in conditions.missing_codecs or not size:
                continue
            payload = expected_payload(codec, shape.dtype, rates[category], policy.block_size)
            if measured is not None and not np.isnan(measured[:, place, number]).any():
                # gathers are padded to the largest rank's payload: never promise less
                bits = 8 * float(measured[:, place, number].max()) / size
                payload = Payload(bits, bits if CODECS[codec].stateless else payload.repeat_bits)
            options.append(_option(index, shape, size, codec, payload, rates[category], policy, conditions))
        made.append(options)
    return made


def _option(
    index: int,
    shape: GroupShape,
    size: int,
    codec: str,
    payload: Payload,
    rates: Rates,
    policy: CieraPolicy,
    conditions: Conditions,
) -> _Option:
    gain = 0.0
    change = change_of(codec, rates, policy.block_size)
    cost = conditions.costs.get(codec, FREE)
    for place, span in enumerate(shape.spans):
        link = BYTES_COUNT if conditions.links is None else conditions.links[index][place]
        num_values = shape.size_in(span, size)
        traffic = StepTraffic(
            num_values=num_values,
            raw_bytes=num_values * shape.dtype.itemsize,
            world_size=span.cut.num_nodes,
            num_gathers=span.num_gathers * policy.micro_batches,
            link=link,
            overlap=conditions.overlap,
        )
        if policy.selection == "greedy" and codec == "exponent_block":
            gain += traffic.num_gathers * _gain_by_the_paper(traffic, shape, change, cost, policy.block_size)
        else:
            gain += traffic.gain(
                cost, num_values * payload.first_bits / 8, num_values * payload.repeat_bits / 8, change
            )
    item_bytes = shape.dtype.itemsize
    cache_bytes = shape.cost_bytes(codec, size, policy.block_size)
    return _Option(codec, payload, gain, float(size * item_bytes), 8 * item_bytes, cache_bytes)


def _gain_by_the_paper(traffic: StepTraffic, shape: GroupShape, q: float, cost: CodecCost, block_size: int) -> float:
    """The paper's g_i: every gather of a step counts as if the weights had changed before it."""
    shard = ShardBytes(traffic.num_values, 8 * shape.dtype.itemsize, FORMATS[shape.dtype].exponent_bits, block_size)
    peers = traffic.world_size - 1
    return paper_gain(
        lambda num_bytes: traffic.link.seconds(num_bytes, traffic.world_size),
        shard,
        q,
        T_hash=0.0 if traffic.overlap else cost.hash.seconds(shard.N, q),
        T_cmp=0.0 if traffic.overlap else cost.cmp.seconds(shard.N, q),
        T_decmp=cost.decmp.seconds(peers * shard.N, q, peers),
    )


def _choose(
    shapes: Sequence[GroupShape], offers: Sequence[list[list[_Option]]], policy: CieraPolicy, conditions: Conditions
) -> list[list[_Option | None]]:
    """One option a shard, by group."""
    offers = list(offers)
    if len(policy.codecs) == 1:
        return _select_by_group(offers, policy, conditions)
    while True:
        chosen = _select_by_group(offers, policy, conditions)
        again = False
        for index, group in enumerate(chosen):
            if any(group) and _gain(group) <= _group_seconds(index, shapes, group, policy, conditions):
                offers[index] = [[] for _ in group]
                again = True
            elif (kept := _kept_options(index, offers, group, shapes[index], policy, conditions)) is not None:
                offers[index] = kept
                again = True
        if not again:  # every round leaves some group fewer options, so there is a last one
            return chosen


def _gain(group: Sequence[_Option | None]) -> float:
    return sum(option.gain_seconds for option in group if option is not None)


def _kept_options(
    index: int,
    offers: Sequence[list[list[_Option]]],
    group: Sequence[_Option | None],
    shape: GroupShape,
    policy: CieraPolicy,
    conditions: Conditions,
) -> list[list[_Option]] | None:
    """The codecs in force as the only options of a group, where others are not worth a full gather; else `None`."""
    if conditions.current is None or conditions.links is None:
        return None
    current = conditions.current[index]
    kept = [
        [option for option in its if option.codec == codec] for its, codec in zip(offers[index], current, strict=True)
    ]
    is_as_before = [option.codec if option else "raw" for option in group] == list(current)
    if is_as_before or kept == offers[index]:
        return None
    more = _gain(group) - _gain([option for its in kept for option in its])
    links = conditions.links[index]
    full = sum(
        link.seconds(shape.shard_bytes, span.cut.num_nodes) for span, link in zip(shape.spans, links, strict=True)
    )
    return kept if more * (policy.adapt_every or 1) <= full else None


def _select_by_group(
    offers: Sequence[list[list[_Option]]], policy: CieraPolicy, conditions: Conditions
) -> list[list[_Option | None]]:
    picked = iter(_select([options for group in offers for options in group], policy, conditions.budget_bytes))
    return [[next(picked) for _ in group] for group in offers]


def _select(shards: Sequence[Sequence[_Option]], policy: CieraPolicy, budget_bytes: int | None) -> list[_Option | None]:
    # a single codec goes wherever it fits, gain or no gain: as much of the model as the budget allows
    values = [[option.gain_seconds if len(policy.codecs) > 1 else option.raw_bytes for option in its] for its in shards]
    if policy.selection == "greedy":
        best = [max(range(len(its)), key=its.__getitem__) if its else None for its in values]
        taken = choose_greedily(
            [0.0 if place is None else its[place] for place, its in zip(best, values, strict=True)],
            [0 if place is None else its[place].cache_bytes for place, its in zip(best, shards, strict=True)],
            budget_bytes,
        )
        choices = [place if is_taken else None for place, is_taken in zip(best, taken, strict=True)]
    else:
        choices = choose_best(
            [
                [(value, option.cache_bytes) for value, option in zip(*pair, strict=True)]
                for pair in zip(values, shards, strict=True)
            ],
            budget_bytes,
        )
    return [None if choice is None else options[choice] for options, choice in zip(shards, choices, strict=True)]


def _group_seconds(
    index: int,
    shapes: Sequence[GroupShape],
    group: Sequence[_Option | None],
    policy: CieraPolicy,
    conditions: Conditions,
) -> float:
    """What a raw group does without in a step: heads of payloads, a share of the agreements, and what codecs take however
    few shards have them."""
    if conditions.links is None or not policy.may_go_plain:
        return 0.0
    once = conditions.per_gather_seconds([option.codec for option in group if option is not None])
    seconds = 0.0
    for span, link in zip(shapes[index].spans, conditions.links[index], strict=True):
        told = _agreement_bytes(span.cut.world_size) / link.bytes_per_second + link.latency_seconds / len(shapes)
        heads = span.num_gathers * (span.cut.num_nodes - 1) * HEAD_BYTES / link.bytes_per_second
        seconds += policy.micro_batches * (told + heads + span.num_gathers * once)
    return seconds


def _agreement_bytes(world_size: int) -> float:
    """Of one group, in a ring."""
    return 2 * (world_size - 1) / world_size * ROW_BYTES


def _rows(
    shapes: Sequence[GroupShape], chosen: Sequence[list[_Option | None]], policy: CieraPolicy
) -> tuple[PlanRow, ...]:
    found: dict[tuple[Category, str], PlanRow] = {}
    for shape, group in zip(shapes, chosen, strict=True):
        is_plain = policy.may_go_plain and not any(group)
        for name, size, option in zip(shape.names, shape.sizes, group, strict=True):
            category, codec = categorize(name), "raw" if option is None else option.codec
            raw_bytes = wire_bytes = in_node_bytes = 0.0
            for span in shape.spans:
                raw_shard = float(shape.size_in(span, size) * shape.dtype.itemsize)
                num_gathers = span.num_gathers * policy.micro_batches
                raw, sent, in_node = _sent_bytes(span.cut, num_gathers, raw_shard, option, is_plain)
                raw_bytes += raw
                wire_bytes += sent + in_node
                in_node_bytes += in_node
            row = found.setdefault((category, codec), PlanRow(category=category, codec=codec))
            found[category, codec] = replace(
                row,
                num_shards=row.num_shards + 1,
                raw_bytes=row.raw_bytes + raw_bytes,
                wire_bytes=row.wire_bytes + wire_bytes,
                in_node_bytes=row.in_node_bytes + in_node_bytes,
                cache_bytes=row.cache_bytes + (0 if option is None else option.cache_bytes),
                gain_seconds=row.gain_seconds + (0.0 if option is None else option.gain_seconds),
            )
    places = {category: place for place, category in enumerate(CATEGORIES)}
    return tuple(sorted(found.values(), key=lambda row: (places[row.category], -row.raw_bytes, row.codec)))


def _sent_bytes(
    cut: Cut, num_gathers: int, raw_bytes: float, option: _Option | None, is_plain: bool
) -> tuple[float, float, float]:
    """Bytes that leave a rank for one shard of `raw_bytes` in a step: as stock FSDP2; as planned, where codecs work; as
    planned, inside nodes. A plain gather goes round in a ring, so that of a node's ranks one in turn sends to another node."""
    stock = num_gathers * (cut.world_size - 1) * raw_bytes
    if is_plain:
        return stock, stock / cut.ranks_per_node, stock * (1 - 1 / cut.ranks_per_node)
    sent = num_gathers * raw_bytes
    if option is not None:
        payload = option.payload
        sent = raw_bytes / option.item_bits * (payload.first_bits + (num_gathers - 1) * payload.repeat_bits)
    return stock, (cut.num_nodes - 1) * sent, num_gathers * (cut.ranks_per_node - 1) * cut.num_nodes * raw_bytes


def _overhead_bytes(
    index: int, shape: GroupShape, group: Sequence[_Option | None], policy: CieraPolicy, conditions: Conditions
) -> float:
    """Agreements, heads and section tables of a group, and what its rows promise too much."""
    if policy.may_go_plain and not any(group):
        return 0.0
    codecs = ["raw" if option is None else option.codec for option in group]
    # where nothing at all is sent in a repeat, no table is
    sends_in_repeats = any(
        size and (option is None or option.payload.repeat_bits) for option, size in zip(group, shape.sizes, strict=True)
    )
    total = 0.0
    for span, layout in shape.layouts(codecs):
        num_gathers = span.num_gathers * policy.micro_batches
        total += policy.micro_batches * _agreement_bytes(span.cut.world_size)
        total += num_gathers * (span.cut.num_nodes - 1) * HEAD_BYTES
        tables = sum(NUM_SECTIONS[run.codec] for run in layout.runs) * TABLE_ENTRY_BYTES
        total += (span.cut.num_nodes - 1) * tables * (num_gathers if sends_in_repeats else min(1, num_gathers))
    measured = conditions.measured[index] if conditions.measured is not None else None
    if measured is None or np.isnan(measured).any():
        return total
    # rows count every shard as large as on its largest rank; together they are only as large as on one rank
    places = [(place, policy.codecs.index(option.codec)) for place, option in enumerate(group) if option is not None]
    by_rank = measured[:, [place for place, _ in places], [number for _, number in places]]
    promised, largest = by_rank.max(axis=0).sum(), by_rank.sum(axis=1).max()
    return total - float(promised - largest) * sum(span.most_nodes - 1 for span in shape.spans)
