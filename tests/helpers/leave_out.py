"""Tests that are collected and not run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: Sequence[pytest.Item]) -> None:
    """Takes `left_out` away from `items`, and pytest counts them as deselected."""
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        ids = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in ids]
