"""The paper's Benefit-driven Selective Compression (BSC): which shards are worth a cache, under a byte budget."""

from __future__ import annotations

import math
from collections.abc import Sequence


def choose_greedily(gains: Sequence[float], cache_bytes: Sequence[int], budget_bytes: int | None) -> list[bool]:
    """Gain g_i and cache footprint M_i = `cache_bytes[i]` of each shard -> whether the shard is selected.

    Only shards with g_i > 0 are considered, in descending order of g_i / M_i (M_i = 0 counts as infinitely good, ties go
    by index), until the budget is used up. The paper leaves open what follows a shard that does not fit any more: here it
    is skipped, and smaller ones further down may still be taken. The selected M_i never add up to more than
    `budget_bytes` (`None`: no limit).
    """

    def benefit(shard: int) -> float:
        return gains[shard] / cache_bytes[shard] if cache_bytes[shard] else math.inf

    selected = [False] * len(gains)
    left = budget_bytes
    for shard in sorted(
        (i for i, gain in enumerate(gains) if gain > 0), key=benefit, reverse=True
    ):  # keeps ties in order
        if left is None or cache_bytes[shard] <= left:
            selected[shard] = True
            left = None if left is None else left - cache_bytes[shard]
    return selected
