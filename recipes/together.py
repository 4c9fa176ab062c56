"""One outcome for all ranks: what fails on one is raised on every one, so that none waits for a rank that gave up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fsdp_ciera.errors import RecipeError

T = TypeVar("T")


def on_every_rank(action: Callable[[], T]) -> T:
    """Runs `action` on each rank. A `RecipeError` on any rank is raised on all, with the lowest rank's text.

    Collective over the default process group, one small object gather; other exceptions are not shared.
    """
    error: str | None = None
    try:
        result = action()
    except RecipeError as raised:
        error = str(raised)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for text in errors:
        if text is not None:
            raise RecipeError(text)
    return result


def on_rank_zero(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 and returns its result on all ranks, or raises its error on all of them.

    Collective over the default process group, one small object broadcast. A `RecipeError` stays one; anything else becomes a
    `RuntimeError` that names it.
    """
    outcome: list[tuple[bool, T | Exception]] = []
    if dist.get_rank() == 0:
        try:
            outcome = [(True, action())]
        except RecipeError as error:
            outcome = [(False, error)]
        except Exception as error:
            outcome = [(False, RuntimeError(f"rank 0: {type(error).__name__}: {error}"))]
    shared: list[tuple[bool, T | Exception] | None] = [outcome[0] if outcome else None]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    _, value = shared[0]
    if isinstance(value, Exception):
        raise value
    return value
