"""`Link`: the paper's Comm(.), which maps the payload of an all-gather to seconds, as a latency and a bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite

import numpy as np

from fsdp_ciera.errors import UnitError
from fsdp_ciera.units import format_speed, parse_seconds, parse_speed

_ALLOWED = 'write a speed such as "8GB/s" or "200Mbit/s", and a latency behind it if you like: "25MB/s 2ms"'


@dataclass(frozen=True)
class Link:
    """A link between ranks that gather from one another.

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
        """The paper's Comm(num_bytes) in seconds, among `world_size` ranks; 0 if there is nothing to gather."""
        if world_size < 2 or num_bytes <= 0:
            return 0.0
        return self.latency_seconds + (world_size - 1) * num_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{format_speed(self.bytes_per_second)} after {1e6 * self.latency_seconds:.0f} us"


def parse_link(text: str) -> Link:
    """`"8GB/s"`, `"200Mbit/s"`, `"25MB/s 2ms"` -> a link; a text without a latency gives latency 0. Raises `UnitError`, whose
    text says what is allowed."""
    words = text.split()
    if 1 <= len(words) <= 2:
        with suppress(UnitError):
            return Link(sum(map(parse_seconds, words[1:])), parse_speed(words[0]))
    raise UnitError(f"{text!r} is no link: {_ALLOWED}")


def fit_link(samples: Sequence[tuple[int, float]], world_size: int) -> Link:
    """Fits a link to `samples`, pairs of a payload in bytes and the seconds that its all-gather took.

    Minimizes the squares of relative errors, so that small payloads count as much as large ones. Neither the latency nor the
    bandwidth is below 0.
    """
    sizes = np.array([(world_size - 1) * num_bytes for num_bytes, _ in samples], np.float64)
    seconds = np.array([sample_seconds for _, sample_seconds in samples], np.float64)
    weights = 1 / np.maximum(seconds, 1e-9)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
    latency, per_byte = np.linalg.lstsq(columns, seconds * weights, rcond=None)[0]
    if per_byte <= 0:  # no payload was large enough to tell
        latency, per_byte = 0.0, float((seconds / sizes).min())
    if latency < 0:
        latency, per_byte = 0.0, float((sizes * seconds * weights**2).sum() / ((sizes * weights) ** 2).sum())
    return Link(float(latency), 1 / float(per_byte))


def slowest(links: Sequence[Link]) -> Link:
    """A link with the highest latency and the lowest speed of `links`, so that it is no faster than any of them."""
    return Link(max(link.latency_seconds for link in links), min(link.bytes_per_second for link in links))
