"""What every test runs under.

pytest                   a cover of policies, operations and backends, drawn by a seed that is another one every day
pytest --seed 7          the cover that seed 7 draws
pytest --everything      all combinations
pytest --share 3         of the tests that are marked `rotating` every third, others the next day (what `make test` runs)
"""

from __future__ import annotations

import datetime
import signal

import pytest

import kernel_digest
from leave_out import leave_out

# A shell's background job starts with SIGINT ignored, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="all combinations of policies, operations and backends")
    parser.addoption("--seed", type=int, help="draws the cover of combinations")
    parser.addoption(
        "--share", type=int, default=1, metavar="N", help="one in N of the rotating tests, drawn by the seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "rotating: one of many alike, or slow; `make test` runs a share of them, another one every day"
    )
    if config.option.seed is None:
        config.option.seed = datetime.date.today().toordinal()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = 1 if config.option.everything else config.option.share
    rotating = [item for item in items if item.get_closest_marker("rotating")]
    left_out = [item for index, item in enumerate(rotating) if (index + config.option.seed) % share]
    leave_out(config, items, left_out)


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.everything:
        return "all combinations"
    kernels = "left out: kernels and their tests are those that passed" if kernel_digest.has_passed() else "run"
    share = f", and one in {config.option.share} of the rotating tests" if config.option.share > 1 else ""
    return (
        f"a cover of the combinations{share}, drawn by --seed {config.option.seed}; "
        f"the PTX interpreter's and the shim's tests: {kernels}"
    )


@pytest.fixture(scope="session")
def cover_seed(request: pytest.FixtureRequest) -> int | None:
    """Draws a cover of combinations; `None` asks for all of them."""
    return None if request.config.option.everything else int(request.config.option.seed)
