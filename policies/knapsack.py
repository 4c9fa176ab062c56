"""Which codec each shard takes under a byte budget: a multiple-choice knapsack that knows nothing of models, ranks or codecs.

In every array a row is a shard. Column 0 means "nothing" (gain 0, cost 0); the shard's options start at column 1.
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
"""The search drops states that cannot gain more than the best known choice by at least this share of its gain."""
STATES = 1_000_000
"""About how many partial choices the search keeps in total. Bounds time and memory."""
STATES_PER_SHARD = 500
"""Number of partial choices that the search may always keep for each shard."""


def choose_best(options: Sequence[Sequence[tuple[float, int] | None]], budget_bytes: int | None) -> list[int | None]:
    """Chooses an option for each shard: `options[shard][option]` = (gain in seconds per optimizer step, cache bytes) -> the
    index of each shard's option.

    `None` as an option: the shard cannot take it; `None` in the result: the shard takes nothing. The choice has the largest
    sum of gains whose costs add up to at most `budget_bytes` (`None`: no limit), up to the error below. Options that gain
    nothing are never chosen. Costs are exact integers; their sum over the shards has to fit 64 bits.

    The choice is never worse than the greedy choice over all pairs of shard and option by gain / cost, nor than the paper's
    greedy choice with the same option for all shards: both are computed too. It is at most `TOLERANCE` below the optimum,
    unless the search would keep more than about `STATES` partial choices: then it merges those of nearly equal gain (see
    `_merge`), which in practice costs far less than it could.

    Time: O(n k log(n k)) for n shards of k options when the greedy solution of the linear relaxation is good enough, as it is
    for many shards of which none is large; else O(n (n k + s k log(s k))) with s = max(`STATES` / n, `STATES_PER_SHARD`).

    Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems", 2004, chapter 11; the bound by the linear relaxation is that
    of Sinha and Zoltners, 1979.
    """
    width = 1 + max(map(len, options), default=0)
    gain = np.full((len(options), width), -np.inf)
    gain[:, 0] = 0.0
    cost = np.zeros((len(options), width), np.int64)
    for shard, row in enumerate(options):
        for column, option in enumerate(row, 1):
            # An option that does not even fit alone would only weaken the bound.
            if option is not None and option[0] > 0 and (budget_bytes is None or option[1] <= budget_bytes):
                gain[shard, column], cost[shard, column] = option
    is_best_of_shard = gain == gain.max(1, keepdims=True)
    choice: Ints = np.where(is_best_of_shard, cost, np.iinfo(np.int64).max).argmin(1)
    if budget_bytes is not None and _cost(cost, choice) > budget_bytes:
        choice = _choose_within(gain, cost, budget_bytes)
    return [column - 1 if column else None for column in choice.tolist()]


def _choose_within(gain: Floats, cost: Ints, budget: int) -> Ints:
    """The best of the greedy choices and the search's choice, for a budget that cannot give every shard its best option."""
    nothing = np.zeros(len(gain), np.int64)
    choices = [_fill(gain, cost, nothing, budget)]
    for column in range(1, gain.shape[1]):
        is_taken = choose_greedily(gain[:, column].tolist(), cost[:, column].tolist(), budget)
        choices.append(np.where(is_taken, column, nothing))
    known_gain = max(_gain(gain, choice) for choice in choices)
    choices.append(_fill(gain, cost, _search(gain, cost, budget, known_gain), budget))
    return max(choices, key=lambda choice: _gain(gain, choice))


def _at(table: npt.NDArray[Any], choice: Ints) -> npt.NDArray[Any]:
    return table[np.arange(len(choice)), choice]


def _cost(cost: Ints, choice: Ints) -> int:
    return int(_at(cost, choice).sum())


def _gain(gain: Floats, choice: Ints) -> float:
    return math.fsum(_at(gain, choice).tolist())


def _fill(gain: Floats, cost: Ints, start: Ints, budget: int) -> Ints:
    """`start` with some shards changed, each at most once: changes that gain and fit the budget, by gain per byte."""
    more_gain = (gain - _at(gain, start)[:, None]).ravel()
    more_cost = (cost - _at(cost, start)[:, None]).ravel()
    left_budget = budget - _cost(cost, start)
    pairs = np.flatnonzero((more_gain > 0) & (more_cost <= left_budget))
    with np.errstate(divide="ignore"):
        rate = more_gain[pairs] / np.maximum(more_cost[pairs], 0)
    pairs = pairs[np.argsort(-rate, kind="stable")]
    choice = start.copy()
    changed = set()
    for pair, pair_cost in zip(pairs.tolist(), more_cost[pairs].tolist(), strict=True):
        shard, column = divmod(pair, gain.shape[1])
        if pair_cost <= left_budget and shard not in changed:
            choice[shard] = column
            changed.add(shard)
            left_budget -= pair_cost
    return choice


class _Steps(NamedTuple):
    """The steps by which the linear relaxation goes from the choice without costs to the choice with most gain. Each step
    changes one shard to a column; its cost and gain are those on top of the shard's step before."""

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
        # Rounding must not put a shard's step before the step that it builds on.
        rate = np.minimum(rate, _at(slope, steepest))
        has_step = rate > 0
        shard, column, rate = shard[has_step], steepest[has_step], rate[has_step]
        steps.append((shard, column, _at(more_cost[has_step], column), _at(more_gain[has_step], column)))
        rates.append(rate)
    order = np.argsort(-np.concatenate(rates), kind="stable")
    return _Steps(*(np.concatenate(arrays)[order] for arrays in zip(*steps, strict=True)))


def _search(gain: Floats, cost: Ints, budget: int, known_gain: float) -> Ints:
    """A choice of nearly the most gain; any choice if none gains more than `known_gain` by more than `TOLERANCE`.

    The search decides one shard after the other. A state is a choice for the shards decided so far, of which only the cost
    and the gain count. The steps of the undecided shards that fit into the rest of the budget give a lower bound of what a
    state can gain; with a part of the first step that does not fit, they give an upper bound. The search drops states that
    cost more and gain less than another one, and states whose upper bound is too low. It first decides the shards that could
    change the cost most: once they are decided, the two bounds are close, and no state is left.
    """
    start = np.where(cost == 0, gain, -np.inf).argmax(1)
    steps = _steps(gain, cost, start)
    first_not_fitting = int(np.searchsorted(np.cumsum(steps.cost), budget, "right"))
    price = steps.gain[first_not_fitting] / steps.cost[first_not_fitting]
    value = gain - price * cost
    loss = value.max(1, keepdims=True) - value
    bound = price * budget + value.max(1).sum()  # of a choice's gain; it is lower by the losses of its options
    change = np.abs(cost - _at(cost, loss.argmin(1))[:, None])
    order = np.argsort(-np.where(bound - loss > known_gain * (1 + TOLERANCE), change, 0).max(1), kind="stable").tolist()

    costs, gains = np.zeros(1, np.int64), np.array([_gain(gain, start)])
    trace: list[tuple[Ints, Ints]] = []  # of each shard decided: each state's state before, and its column
    best = (0, 0, steps.shard[:0], steps.column[:0])  # shards decided, state, and the steps that complete it
    num_states = 0
    for num_decided, shard in enumerate([*order, -1]):
        spent, gained = np.append(0, np.cumsum(steps.cost)), np.append(0.0, np.cumsum(steps.gain))
        fitting = np.searchsorted(spent, budget - costs, "right") - 1
        at_least = gains + gained[fitting]
        top = int(at_least.argmax())
        if at_least[top] > known_gain:
            known_gain = float(at_least[top])
            best = (num_decided, top, steps.shard[: fitting[top]], steps.column[: fitting[top]])
        at_most = gains + np.interp(budget - costs, spent, gained)
        kept = np.flatnonzero(at_most > known_gain * (1 + TOLERANCE))
        max_states = max((STATES - num_states) // (len(order) - num_decided + 1), STATES_PER_SHARD)
        kept = _merge(gains, kept, max_states)
        num_states += len(kept)
        columns = np.flatnonzero(bound - loss[shard] > known_gain * (1 + TOLERANCE))
        if shard < 0 or not len(kept) or not len(columns):
            break
        is_of_other_shard = steps.shard != shard
        steps = _Steps(*(array[is_of_other_shard] for array in steps))
        costs = (costs[kept] + cost[shard, columns][:, None]).ravel()
        gains = (gains[kept] + (gain[shard, columns] - gain[shard, start[shard]])[:, None]).ravel()
        index = _undominated(costs, gains, budget)
        if not len(index):
            break
        costs, gains = costs[index], gains[index]
        trace.append((kept[index % len(kept)], columns[index // len(kept)]))

    num_decided, state, shards, last_columns = best
    choice: Ints = start.copy()
    choice[shards] = last_columns  # a shard's last step counts
    for shard, (previous_states, columns) in zip(
        reversed(order[:num_decided]), reversed(trace[:num_decided]), strict=True
    ):
        choice[shard], state = columns[state], previous_states[state]
    return choice


def _undominated(costs: Ints, gains: Floats, budget: int) -> Ints:
    """The states within the budget that gain more than all that cost no more, in ascending order of both."""
    order: Ints = np.argsort(costs, kind="stable")
    index: Ints = order[: np.count_nonzero(costs <= budget)]
    peak = np.maximum.accumulate(gains[index])
    gains_more: Bools = np.diff(peak, prepend=-np.inf) > 0
    index = index[gains_more]
    is_last_of_cost: Bools = np.diff(costs[index], append=np.iinfo(np.int64).max) > 0
    undominated: Ints = index[is_last_of_cost]
    return undominated


def _merge(gains: Floats, kept: Ints, max_states: int) -> Ints:
    """At most about `max_states` of the `kept` states: the range of gains is cut into `max_states` cells, and the cheapest
    state of each cell stays.

    Every continuation of a dropped state also continues the state that stays for it, at no higher cost, and with a gain that
    is lower by at most one cell.
    """
    if len(kept) <= max_states:
        return kept
    low, high = gains[kept[0]], gains[kept[-1]]
    cell = ((gains[kept] - low) * (max_states / (high - low))).astype(np.int64)
    is_first_of_cell: Bools = np.diff(cell, prepend=-1) > 0
    merged: Ints = kept[is_first_of_cell]
    return merged
