"""The paper's Benefit-driven Selective Compression (BSC): which shards are worth a cache, under a byte budget."""

from __future__ import annotations

import math
from collections.abc import Sequence


def choose_greedily(gains: Sequence[float], cache_bytes: Sequence[int], budget_bytes: int | None) -> list[bool]:
    """Selects shards by gain g_i = `gains[i]` and cache footprint M_i = `cache_bytes[i]` -> whether each shard is selected.

    Only shards with g_i > 0 are considered, in descending order of g_i / M_i (which counts as infinite for M_i = 0; ties go
    by index), until the budget is used up. The paper does not say what follows a shard that does not fit any more: here that
    shard is skipped, and later, smaller shards may still be selected. The selected M_i never add up to more than
    `budget_bytes` (`None`: no limit).
    """

    def benefit(shard: int) -> float:
        return gains[shard] / cache_bytes[shard] if cache_bytes[shard] else math.inf

    selected = [False] * len(gains)
    left_bytes = budget_bytes
    for shard in sorted(
        (shard for shard, gain in enumerate(gains) if gain > 0), key=benefit, reverse=True
    ):  # keeps ties in order
        if left_bytes is None or cache_bytes[shard] <= left_bytes:
            selected[shard] = True
            left_bytes = None if left_bytes is None else left_bytes - cache_bytes[shard]
    return selected
