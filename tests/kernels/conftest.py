"""Leaves out what kernel_digest.py says need not run again, unless it is asked for by name or with `--everything`."""

from __future__ import annotations

import pytest

import kernel_digest
from leave_out import leave_out


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels_only: left out while the kernels and their tests are those that passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.everything or not kernel_digest.has_passed():
        return
    asked_for = " ".join(str(argument) for argument in config.invocation_params.args)
    in_lane = [
        item for item in items if item.path.name in kernel_digest.LANE or item.get_closest_marker("kernels_only")
    ]
    left_out = [item for item in in_lane if item.path.name not in asked_for]
    leave_out(config, items, left_out)
