"""Units: every text that holds a size, a rate, a speed, a time or a share is read and written here.

    parse_bytes("8GiB")         8589934592              format_bytes(65536)         "64 KiB"
    parse_speed("200Mbit/s")    25e6 bytes a second     format_speed(8e9)           "8 GB/s"
    parse_rate("200mbit")       2e8 bits a second       format_rate(2e8)            "200mbit"
    parse_seconds("30us")       3e-5                    format_seconds(0.0123)      "12.3 ms"
                                                        format_share(0.054)         "5.4 %"

A rate is what `tc` limits a link to and is written as `tc` writes it; a speed is what a user says of a link. Readers raise
`UnitError` with what is allowed.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from fsdp_ciera.errors import UnitError

BYTES = {
    "B": 1,
    "KB": 10**3,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Bytes of a unit of size."""
BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
"""Bits of a unit of rate, as `tc` writes it."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of a unit of time."""

_BITS_A_SECOND = {"bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9}  # as links are sold; in a speed, not in a rate
_RATE_UNITS = ("kbit", "mbit", "gbit")
_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"


# readers


def parse_bytes(text: str) -> int:
    """`"8GiB"` -> 8589934592."""
    number, unit = _split(text)
    if unit not in BYTES:
        raise UnitError(
            f'{text!r} is not a byte size: write a number and one of {", ".join(BYTES)}, for example "8GiB"'
        )
    return int(Fraction(number) * BYTES[unit])


def parse_speed(text: str) -> float:
    """`"8GB/s"`, `"200Mbit/s"`, `"25gbps"` -> bytes a second."""
    number, unit = _split(text.strip().removesuffix("/s"))
    unit_bytes = BYTES.get(unit) or (BITS | _BITS_A_SECOND).get(unit.lower(), 0) / 8
    if not unit_bytes or not float(number) > 0:
        raise UnitError(f'{text!r} is not a speed: write one such as "8GB/s" or "200Mbit/s"')
    return float(number) * unit_bytes


def parse_seconds(text: str) -> float:
    """`"30us"` -> 3e-5."""
    number, unit = _split(text)
    if unit not in SECONDS:
        raise UnitError(f'{text!r} is not a time: write a number and one of {", ".join(SECONDS)}, for example "30us"')
    return float(number) * SECONDS[unit]


def parse_rate(text: str) -> float:
    """`"200mbit"` -> 2e8 bits a second. Refuses a text that `tc` reads differently or not at all."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if match is None or match[2] not in _RATE_UNITS or float(match[1]) == 0:
        raise UnitError(f'rate={text!r} must be a number and one of {", ".join(_RATE_UNITS)}, for example "200mbit"')
    return float(match[1]) * BITS[match[2]]


def _split(text: str) -> tuple[str, str]:
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]+)\s*", text)
    return ("0", "") if match is None else (match[1], match[2])


# writers


def format_bytes(num_bytes: float) -> str:
    """`"64 KiB"`, `"1.5 MiB"`."""
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes >= BYTES[unit]:
            number = num_bytes / BYTES[unit]
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def format_in(num_bytes: float, unit: str, num_digits: int = 1) -> str:
    """`num_bytes` in `unit`, without the unit: 1234567890 in `"MB"` -> `"1,234.6"`; `"-"` for NaN."""
    return format_number(num_bytes / BYTES[unit], num_digits)


def format_number(value: float, num_digits: int) -> str:
    """`"1,234.5"`; `"-"` for NaN, which stands for an unknown value."""
    return "-" if math.isnan(value) else f"{value:,.{num_digits}f}"


def format_speed(bytes_per_second: float) -> str:
    """`"8 GB/s"`."""
    for unit in ("GB", "MB", "kB"):
        if bytes_per_second >= BYTES[unit]:
            return f"{bytes_per_second / BYTES[unit]:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"


def format_rate(bits_per_second: float | None) -> str:
    """`"200mbit"`; `None`: `"no limit"`."""
    if bits_per_second is None:
        return "no limit"
    for unit in reversed(_RATE_UNITS):
        if bits_per_second >= BITS[unit]:
            return f"{bits_per_second / BITS[unit]:g}{unit}"
    return f"{bits_per_second:g}bit"


def format_host_rate(rate: str | None) -> str:
    """`"200mbit"` -> `"200 Mbit/s a host"`."""
    if rate is None:
        return "no limit"
    digits = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{digits} {rate[len(digits) :].capitalize()}/s a host"


def format_digits(seconds: float) -> str:
    """About three digits, without the unit."""
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"


def format_seconds(seconds: float) -> str:
    """`"1.23 s"`, `"12.3 ms"`."""
    return f"{format_digits(seconds)} s" if seconds >= 1 else f"{format_digits(1e3 * seconds)} ms"


def format_share(share: float, num_digits: int = 1, *, signed: bool = False) -> str:
    """`0.054` -> `"5.4 %"`, or `"+5.4 %"`; `"-"` for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:{'+' if signed else ''}.{num_digits}f} %"
