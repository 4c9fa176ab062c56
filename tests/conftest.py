"""What every test runs under.

pytest                   a cover of policies, operations and backends, drawn by a seed that is another one every day
pytest --seed 7          the cover that seed 7 draws
pytest --everything      all combinations
"""

from __future__ import annotations

import datetime
import signal

import pytest

import kernel_digest

# A shell's background job starts with SIGINT ignored, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="all combinations of policies, operations and backends")
    parser.addoption("--seed", type=int, help="draws the cover of combinations")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = datetime.date.today().toordinal()


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.everything:
        return "all combinations"
    kernels = "left out: kernels and their tests are those that passed" if kernel_digest.has_passed() else "run"
    return (
        f"a cover of the combinations, drawn by --seed {config.option.seed}; "
        f"the PTX interpreter's and the shim's tests: {kernels}"
    )


@pytest.fixture(scope="session")
def cover_seed(request: pytest.FixtureRequest) -> int | None:
    """Draws a cover of combinations; `None` asks for all of them."""
    return None if request.config.option.everything else int(request.config.option.seed)
