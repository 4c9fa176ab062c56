"""What fits into a cache budget: a pure function from costs to choices, with no idea of models, ranks or codecs."""

from __future__ import annotations

from collections.abc import Sequence


def choose_within_budget(cost_bytes: Sequence[Sequence[int | None]], budget_bytes: int | None) -> list[int | None]:
    """Which option each shard takes: the first one, in order of preference, whose cost still fits.

    `cost_bytes[shard][option]` is what the caches of an option cost, `None` where the shard cannot take it; every shard
    has the same options in the same order. Option by option, the shards that have none yet are offered it, those first
    that it costs most, and take it when it fits into what is left. `None` in the result: nothing fits. The costs of the
    chosen options never add up to more than `budget_bytes` (`None`: no limit), and equal arguments give equal choices.

    The order of preference stands in for the gain of an option. A knapsack that weighs measured gains is to replace
    it behind the same arguments and result.
    """
    left = budget_bytes
    choices: list[int | None] = [None] * len(cost_bytes)
    for option in range(max(map(len, cost_bytes), default=0)):
        costs = {shard: cost for shard, row in enumerate(cost_bytes) if (cost := row[option]) is not None}
        for shard in sorted(costs, key=lambda shard: (-costs[shard], shard)):
            if choices[shard] is None and (left is None or costs[shard] <= left):
                choices[shard] = option
                left = None if left is None else left - costs[shard]
    return choices
