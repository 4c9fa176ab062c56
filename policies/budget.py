"""What fits into a cache budget."""

from __future__ import annotations

from collections.abc import Sequence


def select_within_budget(cache_bytes: Sequence[int], budget_bytes: int | None) -> list[bool]:
    """Which shards keep their codec, given what each one's caches cost: the largest first, until nothing more fits.

    With one codec every shard saves in proportion to its cache, so the ranking by gain per byte of the paper (section
    3.2) is a tie, and size decides. `None` is no limit. The sum of the chosen costs never exceeds the budget.
    """
    if budget_bytes is None:
        return [True] * len(cache_bytes)
    chosen = [False] * len(cache_bytes)
    left = budget_bytes
    for index in sorted(range(len(cache_bytes)), key=lambda i: (-cache_bytes[i], i)):
        if cache_bytes[index] <= left:
            chosen[index] = True
            left -= cache_bytes[index]
    return chosen
