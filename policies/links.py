"""`Link`: the paper's Comm(.), the seconds of an all-gather by its payload, as latency and bandwidth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

_BYTES = {
    "B": 1.0,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
}
_BITS = {
    "bit": 1.0,
    "kbit": 1e3,
    "mbit": 1e6,
    "gbit": 1e9,
    "tbit": 1e12,
    "bps": 1.0,
    "kbps": 1e3,
    "mbps": 1e6,
    "gbps": 1e9,
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_HOW = 'write a speed such as "8GB/s" or "200Mbit/s", and a latency behind it if you like: "25MB/s 2ms"'


@dataclass(frozen=True)
class Link:
    """Between ranks that gather from one another.

    An all-gather of n bytes a rank over W ranks takes `latency_seconds + (W - 1) * n / bytes_per_second`: the speed is what
    NCCL calls bus bandwidth.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ValueError(f"latency_seconds={self.latency_seconds!r} must be a number of at least 0")
        if not (isfinite(self.bytes_per_second) and self.bytes_per_second > 0):
            raise ValueError(f"bytes_per_second={self.bytes_per_second!r} must be a number above 0")

    def seconds(self, num_bytes: float, world_size: int) -> float:
        """Comm(num_bytes) of the paper, among `world_size` ranks; 0 where there is nothing to gather."""
        if world_size < 2 or num_bytes <= 0:
            return 0.0
        return self.latency_seconds + (world_size - 1) * num_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{speed_text(self.bytes_per_second)} after {1e6 * self.latency_seconds:.0f} us"


def parse_link(text: str) -> Link:
    """`"8GB/s"`, `"200Mbit/s"`, `"25MB/s 2ms"` -> a link; without a latency it has none. Raises `ValueError` with what is
    allowed."""
    words = text.replace("/s", "").split()
    found = [re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]+)", word) for word in words]
    if 1 <= len(words) <= 2 and all(found):
        (speed, unit), *rest = [(float(match[1]), match[2]) for match in found if match is not None]
        bytes_per_second = speed * _BYTES[unit] if unit in _BYTES else speed * _BITS.get(unit.lower(), 0.0) / 8
        latency = [value * _SECONDS.get(unit, -1.0) for value, unit in rest]
        if bytes_per_second > 0 and all(seconds >= 0 for seconds in latency):
            return Link(sum(latency), bytes_per_second)
    raise ValueError(f"{text!r} is no link: {_HOW}")


def fit_link(samples: Sequence[tuple[int, float]], world_size: int) -> Link:
    """Payloads in bytes with the seconds that their all-gathers took -> the link that fits best.

    Least squares of relative errors, so that small payloads count as much as large ones; neither figure below 0.
    """
    sizes = np.array([(world_size - 1) * num_bytes for num_bytes, _ in samples], np.float64)
    seconds = np.array([taken for _, taken in samples], np.float64)
    weights = 1 / np.maximum(seconds, 1e-9)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
    latency, per_byte = np.linalg.lstsq(columns, seconds * weights, rcond=None)[0]
    if per_byte <= 0:  # no payload was large enough to tell
        latency, per_byte = 0.0, float((seconds / sizes).min())
    if latency < 0:
        latency, per_byte = 0.0, float((sizes * seconds * weights**2).sum() / ((sizes * weights) ** 2).sum())
    return Link(float(latency), 1 / float(per_byte))


def slowest(links: Sequence[Link]) -> Link:
    """The link that is none of these, but no faster than any: the highest latency, the lowest speed."""
    return Link(max(link.latency_seconds for link in links), min(link.bytes_per_second for link in links))


def speed_text(bytes_per_second: float) -> str:
    """`8e9` -> `"8.0 GB/s"`."""
    for unit in ("GB", "MB", "kB"):
        if bytes_per_second >= _BYTES[unit]:
            return f"{bytes_per_second / _BYTES[unit]:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"
