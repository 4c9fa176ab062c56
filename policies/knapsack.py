"""Which codec each shard takes under a byte budget: a multiple-choice knapsack, with no idea of models, ranks or codecs.

In every array a row is a shard and column 0 means "nothing" (gain 0, cost 0); the given options follow from column 1 on.
A choice is an array with the column of each shard. Nothing here is random or timed: equal input gives equal output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_ciera.policies.greedy import choose_greedily

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

TOLERANCE = 3e-4
"""The search drops what cannot gain more than the best known choice by at least this part of it."""
STATES = 1_000_000
"""Partial choices that the search keeps in all, about: it bounds time and memory."""
STATES_PER_SHARD = 500
"""Partial choices that it may keep for each shard in any case."""


def choose_best(options: Sequence[Sequence[tuple[float, int] | None]], budget_bytes: int | None) -> list[int | None]:
    """`options[shard][option]` = (gain in seconds per optimizer step, cache bytes) -> index of each shard's option.

    `None` as an option: the shard cannot take it; `None` in the result: the shard takes nothing. The sum of gains is the
    largest one whose costs add up to at most `budget_bytes` (`None`: no limit), up to the error below. Options that gain
    nothing are never chosen. Costs are exact integers; their sum over the shards has to fit 64 bits.

    Never worse than the greedy over all pairs of shard and option by gain / cost, nor than the paper's greedy with any one
    option for all shards: both are computed too. Otherwise at most `TOLERANCE` below the optimum; only where the search
    would keep more than about `STATES` partial choices does it merge those of nearly equal gain (see `_merge`), which in
    practice costs far less than it could. Time: O(n k log(n k)) for n shards of k options when the greedy solution of the
    linear relaxation is good enough, as it is for many shards of which none is large; else O(n (n k + s k log(s k))) with
    s = max(`STATES` / n, `STATES_PER_SHARD`).

    Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems", 2004, chapter 11; the bound by the linear relaxation is that
    of Sinha and Zoltners, 1979.
    """
    width = 1 + max(map(len, options), default=0)
    gain = np.full((len(options), width), -np.inf)
    gain[:, 0] = 0.0
    cost = np.zeros((len(options), width), np.int64)
    for shard, row in enumerate(options):
        for column, option in enumerate(row, 1):
            # What does not even fit alone would only weaken the bound.
            if option is not None and option[0] > 0 and (budget_bytes is None or option[1] <= budget_bytes):
                gain[shard, column], cost[shard, column] = option
    best_of_each = gain == gain.max(1, keepdims=True)
    choice: Ints = np.where(best_of_each, cost, np.iinfo(np.int64).max).argmin(1)
    if budget_bytes is not None and _cost(cost, choice) > budget_bytes:
        choice = _choose_within(gain, cost, budget_bytes)
    return [column - 1 if column else None for column in choice.tolist()]


def _choose_within(gain: Floats, cost: Ints, budget: int) -> Ints:
    """The best choice of the greedy ones and the search, where not every shard can have what is best for it."""
    nothing = np.zeros(len(gain), np.int64)
    choices = [_fill(gain, cost, nothing, budget)]
    for column in range(1, gain.shape[1]):
        taken = choose_greedily(gain[:, column].tolist(), cost[:, column].tolist(), budget)
        choices.append(np.where(taken, column, nothing))
    known = max(_gain(gain, choice) for choice in choices)
    choices.append(_fill(gain, cost, _search(gain, cost, budget, known), budget))
    return max(choices, key=lambda choice: _gain(gain, choice))


def _at(table: npt.NDArray[Any], choice: Ints) -> npt.NDArray[Any]:
    return table[np.arange(len(choice)), choice]


def _cost(cost: Ints, choice: Ints) -> int:
    return int(_at(cost, choice).sum())


def _gain(gain: Floats, choice: Ints) -> float:
    return math.fsum(_at(gain, choice).tolist())


def _fill(gain: Floats, cost: Ints, start: Ints, budget: int) -> Ints:
    """`start`, with each shard changed once at most, by gain per byte, while that gains and the budget lasts."""
    more_gain = (gain - _at(gain, start)[:, None]).ravel()
    more_cost = (cost - _at(cost, start)[:, None]).ravel()
    left = budget - _cost(cost, start)
    pairs = np.flatnonzero((more_gain > 0) & (more_cost <= left))
    with np.errstate(divide="ignore"):
        rate = more_gain[pairs] / np.maximum(more_cost[pairs], 0)
    pairs = pairs[np.argsort(-rate, kind="stable")]
    choice = start.copy()
    changed = set()
    for pair, more in zip(pairs.tolist(), more_cost[pairs].tolist(), strict=True):
        shard, column = divmod(pair, gain.shape[1])
        if more <= left and shard not in changed:
            choice[shard] = column
            changed.add(shard)
            left -= more
    return choice


class _Steps(NamedTuple):
    """What leads from the choice without costs to the one of most gain, as the linear relaxation takes it: each step is a
    change of one shard to a column, with what it costs and gains on top of the shard's step before."""

    shard: Ints
    column: Ints
    cost: Ints
    gain: Floats


def _steps(gain: Floats, cost: Ints, start: Ints) -> _Steps:
    """The edges of the upper convex hull of each shard's options, all in descending order of gain per byte."""
    shard, column = np.arange(len(gain)), start
    rate = np.full(len(gain), np.inf)
    steps: list[tuple[Ints, Ints, Ints, Floats]] = []
    rates: list[Floats] = []
    while len(shard):
        more_gain = gain[shard] - gain[shard, column][:, None]
        more_cost = cost[shard] - cost[shard, column][:, None]
        slope = np.where((more_gain > 0) & (more_cost > 0), more_gain / np.maximum(more_cost, 1), 0.0)
        steepest = slope.argmax(1)
        # Rounding must not let a shard's step come before the one it builds on.
        rate = np.minimum(rate, _at(slope, steepest))
        on = rate > 0
        shard, column, rate = shard[on], steepest[on], rate[on]
        steps.append((shard, column, _at(more_cost[on], column), _at(more_gain[on], column)))
        rates.append(rate)
    order = np.argsort(-np.concatenate(rates), kind="stable")
    return _Steps(*(np.concatenate(part)[order] for part in zip(*steps, strict=True)))


def _search(gain: Floats, cost: Ints, budget: int, known: float) -> Ints:
    """A choice of nearly the most gain; any choice when none gains more than `known` by more than `TOLERANCE`.

    Decides one shard after the other. A state is a choice for the shards decided so far, of which only its cost and gain
    count; the steps of the undecided ones that fit into the rest of the budget say what a state gains at least, and with a
    part of the first that does not fit, what it gains at most. States that cost more and gain less than another, or gain
    too little at most, are dropped. Those shards that could change the cost most come first: once they are decided, the
    two bounds are close, and no state is left.
    """
    start = np.where(cost == 0, gain, -np.inf).argmax(1)
    steps = _steps(gain, cost, start)
    first_not_fitting = int(np.searchsorted(np.cumsum(steps.cost), budget, "right"))
    price = steps.gain[first_not_fitting] / steps.cost[first_not_fitting]
    value = gain - price * cost
    loss = value.max(1, keepdims=True) - value
    bound = price * budget + value.max(1).sum()  # of a choice's gain; it is lower by the losses of its options
    change = np.abs(cost - _at(cost, loss.argmin(1))[:, None])
    order = np.argsort(-np.where(bound - loss > known * (1 + TOLERANCE), change, 0).max(1), kind="stable").tolist()

    costs, gains = np.zeros(1, np.int64), np.array([_gain(gain, start)])
    trace: list[tuple[Ints, Ints]] = []  # of each shard decided: each state's state before, and its column
    found = (0, 0, steps.shard[:0], steps.column[:0])
    states = 0
    for place, shard in enumerate([*order, -1]):
        spent, gained = np.append(0, np.cumsum(steps.cost)), np.append(0.0, np.cumsum(steps.gain))
        fitting = np.searchsorted(spent, budget - costs, "right") - 1
        at_least = gains + gained[fitting]
        top = int(at_least.argmax())
        if at_least[top] > known:
            known = float(at_least[top])
            found = (place, top, steps.shard[: fitting[top]], steps.column[: fitting[top]])
        at_most = gains + np.interp(budget - costs, spent, gained)
        kept = np.flatnonzero(at_most > known * (1 + TOLERANCE))
        kept = _merge(gains, kept, max((STATES - states) // (len(order) - place + 1), STATES_PER_SHARD))
        states += len(kept)
        columns = np.flatnonzero(bound - loss[shard] > known * (1 + TOLERANCE))
        if shard < 0 or not len(kept) or not len(columns):
            break
        rest = steps.shard != shard
        steps = _Steps(*(part[rest] for part in steps))
        costs = (costs[kept] + cost[shard, columns][:, None]).ravel()
        gains = (gains[kept] + (gain[shard, columns] - gain[shard, start[shard]])[:, None]).ravel()
        index = _undominated(costs, gains, budget)
        if not len(index):
            break
        costs, gains = costs[index], gains[index]
        trace.append((kept[index % len(kept)], columns[index // len(kept)]))

    place, state, shards, last_columns = found
    choice: Ints = start.copy()
    choice[shards] = last_columns  # a shard's last step counts
    for shard, (before, column) in zip(reversed(order[:place]), reversed(trace[:place]), strict=True):
        choice[shard], state = column[state], before[state]
    return choice


def _undominated(costs: Ints, gains: Floats, budget: int) -> Ints:
    """The states within the budget that gain more than all that cost no more, in ascending order of both."""
    order: Ints = np.argsort(costs, kind="stable")
    index: Ints = order[: np.count_nonzero(costs <= budget)]
    peak = np.maximum.accumulate(gains[index])
    gains_more: Bools = np.diff(peak, prepend=-np.inf) > 0
    index = index[gains_more]
    last_of_its_cost: Bools = np.diff(costs[index], append=np.iinfo(np.int64).max) > 0
    undominated: Ints = index[last_of_its_cost]
    return undominated


def _merge(gains: Floats, kept: Ints, most: int) -> Ints:
    """About `most` of the `kept` states: of those whose gains differ by less than a `most`-th of the range, the cheapest.

    Whatever continues a dropped state continues the one kept for it, at no higher cost, with less gain by that at most.
    """
    if len(kept) <= most:
        return kept
    low, high = gains[kept[0]], gains[kept[-1]]
    cell = ((gains[kept] - low) * (most / (high - low))).astype(np.int64)
    first_of_cell: Bools = np.diff(cell, prepend=-1) > 0
    merged: Ints = kept[first_of_cell]
    return merged
