"""`make_plan`: makes plans, as a pure function.

    shapes + rates (tables, or measured) + links + codec costs  ->  gain and cache of every (shard, codec)
    gains and caches + budget                                    ->  one codec a shard (policies/knapsack.py, greedy.py)

cohort.py calls it for live parameter groups, estimate.py and forecast.py for those that a model would get. Here a shape stands
for its parameter group, and a shard for its parameter.
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
"""The learning rate of a policy that has none: of the two usual ones, the one with more changes, so that gains are not promised
too high."""
BYTES_COUNT = Link(0.0, 1.0)
"""A link so slow that only bytes count."""


@dataclass(frozen=True)
class _Option:
    """A codec that a shard may take, and what it brings."""

    codec: str
    payload: Payload
    gain_seconds: float
    """Seconds that the codec saves in a step; bytes where only bytes count."""
    raw_bytes: float
    item_bits: int
    """Bits of a value that goes raw."""
    cache_bytes: int


def make_plan(shapes: Sequence[GroupShape], policy: CieraPolicy, conditions: Conditions) -> Plan:
    """The plan under `policy` of the parameter groups with these shapes. Equal arguments give equal plans.

    With several codecs in the policy, shards get the codecs that gain most in total within the budget, and go raw where none
    gains; a single codec is used for every opted-in shard that fits. A parameter group goes raw as a whole if its gains do not
    outweigh its part of the agreements. Cost: some ten microseconds a (shard, codec).
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
        codecs=tuple(tuple("raw" if option is None else option.codec for option in choices) for choices in chosen),
        rows=rows,
        overhead_bytes=sum(
            _overhead_bytes(index, shape, choices, policy, conditions)
            for index, (shape, choices) in enumerate(zip(shapes, chosen, strict=True))
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
    """The rates of every category that the shapes have, and notes."""
    rates: dict[str, Rates] = {}
    notes: dict[str, list[str]] = {}
    if policy.learning_rate is None:
        notes[f"no learning_rate in the policy: {lr:g} is assumed"] = []
    present = {categorize(name) for shape in shapes for name in shape.names}
    for category in CATEGORIES:
        if category in present:
            rates[category], category_notes = rates_for(table, category, lr, policy.block_size)
            for note in category_notes:
                notes.setdefault(note, []).append(category)
    return rates, tuple(note.format(category=", ".join(categories)) for note, categories in notes.items())


def _offers(
    index: int, shape: GroupShape, policy: CieraPolicy, conditions: Conditions, rates: Mapping[str, Rates]
) -> list[list[_Option]]:
    """The options of each shard of a parameter group."""
    measured = conditions.measured[index] if conditions.measured is not None else None
    options_by_shard = []
    for shard, (name, size) in enumerate(zip(shape.names, shape.sizes, strict=True)):
        category = categorize(name)
        options = []
        for column, codec in enumerate(policy.codecs):
            allowed = codec in policy.codecs_for(category) and CODECS[codec].supports(shape.dtype)
            if not allowed or codec == "raw" or codec in conditions.missing_codecs or not size:
                continue
            payload = expected_payload(codec, shape.dtype, rates[category], policy.block_size)
            if measured is not None and not np.isnan(measured[:, shard, column]).any():
                # gathers are padded to the largest rank's payload, so a smaller one would promise too much gain
                bits = 8 * float(measured[:, shard, column].max()) / size
                payload = Payload(bits, bits if CODECS[codec].stateless else payload.repeat_bits)
            options.append(_option(index, shape, size, codec, payload, rates[category], policy, conditions))
        options_by_shard.append(options)
    return options_by_shard


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
    """The option `codec` of a shard with `size` values."""
    gain = 0.0
    change = change_of(codec, rates, policy.block_size)
    cost = conditions.costs.get(codec, FREE)
    for span_index, span in enumerate(shape.spans):
        link = BYTES_COUNT if conditions.links is None else conditions.links[index][span_index]
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
    """The chosen option of each shard, by shape and shard; `None`: raw. `offers` are the options by shape and shard."""
    offers = list(offers)
    if len(policy.codecs) == 1:
        return _select_by_shape(offers, policy, conditions)
    while True:
        chosen = _select_by_shape(offers, policy, conditions)
        must_repeat = False
        for index, choices in enumerate(chosen):
            if any(choices) and _gain(choices) <= _fixed_seconds(index, shapes, choices, policy, conditions):
                offers[index] = [[] for _ in choices]
                must_repeat = True
            elif (kept := _kept_options(index, offers, choices, shapes[index], policy, conditions)) is not None:
                offers[index] = kept
                must_repeat = True
        if not must_repeat:  # every repeat leaves some shape fewer options, so the loop ends
            return chosen


def _gain(choices: Sequence[_Option | None]) -> float:
    return sum(option.gain_seconds for option in choices if option is not None)


def _kept_options(
    index: int,
    offers: Sequence[list[list[_Option]]],
    choices: Sequence[_Option | None],
    shape: GroupShape,
    policy: CieraPolicy,
    conditions: Conditions,
) -> list[list[_Option]] | None:
    """The codecs in force as the only options of a parameter group's shards, if other codecs do not gain more than a full
    gather costs; else `None`."""
    if conditions.current is None or conditions.links is None:
        return None
    current = conditions.current[index]
    kept = [
        [option for option in options if option.codec == codec]
        for options, codec in zip(offers[index], current, strict=True)
    ]
    is_unchanged = [option.codec if option else "raw" for option in choices] == list(current)
    if is_unchanged or kept == offers[index]:
        return None
    extra_gain = _gain(choices) - _gain([option for options in kept for option in options])
    links = conditions.links[index]
    full_gather_seconds = sum(
        link.seconds(shape.shard_bytes, span.cut.num_nodes) for span, link in zip(shape.spans, links, strict=True)
    )
    return kept if extra_gain * (policy.adapt_every or 1) <= full_gather_seconds else None


def _select_by_shape(
    offers: Sequence[list[list[_Option]]], policy: CieraPolicy, conditions: Conditions
) -> list[list[_Option | None]]:
    """Selects one option a shard for all shapes together, since they share the budget."""
    all_shards = [options for options_by_shard in offers for options in options_by_shard]
    selected = iter(_select(all_shards, policy, conditions.budget_bytes))
    return [[next(selected) for _ in options_by_shard] for options_by_shard in offers]


def _select(shards: Sequence[Sequence[_Option]], policy: CieraPolicy, budget_bytes: int | None) -> list[_Option | None]:
    # a single codec is used wherever it fits, even without a gain: its value is how much of the model it covers
    values = [
        [option.gain_seconds if len(policy.codecs) > 1 else option.raw_bytes for option in options]
        for options in shards
    ]
    if policy.selection == "greedy":
        best_of_shards = [
            max(range(len(option_values)), key=option_values.__getitem__) if option_values else None
            for option_values in values
        ]
        is_selected = choose_greedily(
            [
                0.0 if best is None else option_values[best]
                for best, option_values in zip(best_of_shards, values, strict=True)
            ],
            [
                0 if best is None else options[best].cache_bytes
                for best, options in zip(best_of_shards, shards, strict=True)
            ],
            budget_bytes,
        )
        choices = [best if is_taken else None for best, is_taken in zip(best_of_shards, is_selected, strict=True)]
    else:
        choices = choose_best(
            [
                [(value, option.cache_bytes) for value, option in zip(option_values, options, strict=True)]
                for option_values, options in zip(values, shards, strict=True)
            ],
            budget_bytes,
        )
    return [None if choice is None else options[choice] for options, choice in zip(shards, choices, strict=True)]


def _fixed_seconds(
    index: int,
    shapes: Sequence[GroupShape],
    choices: Sequence[_Option | None],
    policy: CieraPolicy,
    conditions: Conditions,
) -> float:
    """Seconds of a step that a parameter group saves by going raw as a whole: those of the heads of payloads, of its share of
    the agreements, and those that codecs take once a gather."""
    if conditions.links is None or not policy.may_go_plain:
        return 0.0
    codec_seconds = conditions.per_gather_seconds([option.codec for option in choices if option is not None])
    seconds = 0.0
    for span, link in zip(shapes[index].spans, conditions.links[index], strict=True):
        agreement_seconds = _agreement_bytes(span.cut.world_size) / link.bytes_per_second
        agreement_seconds += link.latency_seconds / len(shapes)
        head_seconds = span.num_gathers * (span.cut.num_nodes - 1) * HEAD_BYTES / link.bytes_per_second
        seconds += policy.micro_batches * (agreement_seconds + head_seconds + span.num_gathers * codec_seconds)
    return seconds


def _agreement_bytes(world_size: int) -> float:
    """Bytes that a rank sends in an agreement for one parameter group, in a ring."""
    return 2 * (world_size - 1) / world_size * ROW_BYTES


def _rows(
    shapes: Sequence[GroupShape], chosen: Sequence[list[_Option | None]], policy: CieraPolicy
) -> tuple[PlanRow, ...]:
    """The rows of a plan, by category and codec."""
    rows: dict[tuple[Category, str], PlanRow] = {}
    for shape, choices in zip(shapes, chosen, strict=True):
        is_plain = policy.may_go_plain and not any(choices)
        for name, size, option in zip(shape.names, shape.sizes, choices, strict=True):
            category, codec = categorize(name), "raw" if option is None else option.codec
            raw_bytes = wire_bytes = in_node_bytes = 0.0
            for span in shape.spans:
                raw_shard_bytes = float(shape.size_in(span, size) * shape.dtype.itemsize)
                num_gathers = span.num_gathers * policy.micro_batches
                stock_bytes, coded_bytes, inside_bytes = _sent_bytes(
                    span.cut, num_gathers, raw_shard_bytes, option, is_plain
                )
                raw_bytes += stock_bytes
                wire_bytes += coded_bytes + inside_bytes
                in_node_bytes += inside_bytes
            row = rows.setdefault((category, codec), PlanRow(category=category, codec=codec))
            rows[category, codec] = replace(
                row,
                num_shards=row.num_shards + 1,
                raw_bytes=row.raw_bytes + raw_bytes,
                wire_bytes=row.wire_bytes + wire_bytes,
                in_node_bytes=row.in_node_bytes + in_node_bytes,
                cache_bytes=row.cache_bytes + (0 if option is None else option.cache_bytes),
                gain_seconds=row.gain_seconds + (0.0 if option is None else option.gain_seconds),
            )
    return tuple(sorted(rows.values(), key=lambda row: (CATEGORIES.index(row.category), -row.raw_bytes, row.codec)))


def _sent_bytes(
    cut: Cut, num_gathers: int, raw_bytes: float, option: _Option | None, is_plain: bool
) -> tuple[float, float, float]:
    """Bytes that leave a rank for one shard of `raw_bytes` in a step: with stock FSDP2; with the plan, in the part of gathers
    that codecs work on; with the plan, inside nodes. A plain gather is a ring, in which only one rank of each node at a time
    sends to another node."""
    stock_bytes = num_gathers * (cut.world_size - 1) * raw_bytes
    if is_plain:
        return stock_bytes, stock_bytes / cut.ranks_per_node, stock_bytes * (1 - 1 / cut.ranks_per_node)
    payload_bytes = num_gathers * raw_bytes
    if option is not None:
        payload = option.payload
        payload_bytes = raw_bytes / option.item_bits * (payload.first_bits + (num_gathers - 1) * payload.repeat_bits)
    inside_bytes = num_gathers * (cut.ranks_per_node - 1) * cut.num_nodes * raw_bytes
    return stock_bytes, (cut.num_nodes - 1) * payload_bytes, inside_bytes


def _overhead_bytes(
    index: int, shape: GroupShape, choices: Sequence[_Option | None], policy: CieraPolicy, conditions: Conditions
) -> float:
    """Bytes of agreements, heads and section tables of a parameter group, less the bytes that its rows count too much."""
    if policy.may_go_plain and not any(choices):
        return 0.0
    codecs = ["raw" if option is None else option.codec for option in choices]
    # a repeat that sends nothing sends no section table either
    sends_in_repeats = any(
        size and (option is None or option.payload.repeat_bits)
        for option, size in zip(choices, shape.sizes, strict=True)
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
    # rows count every shard as large as on its largest rank, but all shards together are as large as on one rank
    shards = [shard for shard, option in enumerate(choices) if option is not None]
    columns = [policy.codecs.index(option.codec) for option in choices if option is not None]
    bytes_by_rank = measured[:, shards, columns]
    counted_bytes, largest_bytes = bytes_by_rank.max(axis=0).sum(), bytes_by_rank.sum(axis=1).max()
    return total - float(counted_bytes - largest_bytes) * sum(span.most_nodes - 1 for span in shape.spans)
