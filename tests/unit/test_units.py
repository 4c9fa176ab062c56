"""Sizes, rates, speeds and times, read and written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fsdp_ciera import units
from fsdp_ciera.errors import UnitError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.parse_bytes, "8GiB", 8 << 30),
        (units.parse_bytes, " 1.5 MB ", 1_500_000),
        (units.parse_bytes, "0.3kB", 300),
        (units.parse_speed, "8GB/s", 8e9),
        (units.parse_speed, "200Mbit/s", 25e6),
        (units.parse_speed, "25gbps", 3.125e9),
        (units.parse_speed, "1.5e3 MB/s", 1.5e9),
        (units.parse_rate, "1.5gbit", 1.5e9),
        (units.parse_seconds, "30us", 3e-5),
        (units.parse_seconds, "0s", 0.0),
    ],
)
def test_a_text_is_read(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (units.parse_bytes, "8"),
        (units.parse_bytes, "-8GiB"),
        (units.parse_bytes, "8 gib"),
        (units.parse_speed, "0GB/s"),
        (units.parse_speed, "8 parsec/s"),
        (units.parse_rate, "200Mbit"),  # `tc` reads it as something else
        (units.parse_rate, "0mbit"),
        (units.parse_rate, "200bit"),
        (units.parse_seconds, "1h"),
    ],
)
def test_what_is_wrong_is_named(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(UnitError, match=text):
        read(text)


def test_texts_that_are_written() -> None:
    assert [units.format_bytes(n) for n in (512, 1536, 2**20, 200 * 2**30)] == ["512 B", "1.5 KiB", "1 MiB", "200 GiB"]
    assert [units.format_speed(n) for n in (8e9, 2.5e7, 12)] == ["8 GB/s", "25 MB/s", "12 B/s"]
    assert [units.format_rate(n) for n in (2e8, 1.5e9, None, 12.0)] == ["200mbit", "1.5gbit", "no limit", "12bit"]
    assert units.format_host_rate("200mbit") == "200 Mbit/s a host"
    assert [units.format_seconds(n) for n in (1.234, 0.0123, 1234.5)] == ["1.23 s", "12.3 ms", "1,234 s"]
    assert [units.format_share(0.0543), units.format_share(0.0543, 2, signed=True)] == ["5.4 %", "+5.43 %"]
    assert [units.format_in(1234567890, "MB"), units.format_in(3 << 29, "GiB", 2)] == ["1,234.6", "1.50"]
    assert units.format_share(math.nan) == units.format_number(math.nan, 1) == "-"
