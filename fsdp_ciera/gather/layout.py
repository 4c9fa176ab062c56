"""Layout: names the runs in a parameter group's flat buffer, each with its category and codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_ciera.policies.categories import categorize


@dataclass(frozen=True)
class Run:
    """A stretch of the buffer with one category and one codec: `num_values` values from index `start` on."""

    category: str
    codec: str
    start: int
    num_values: int
    names: tuple[str, ...]

    @property
    def stop(self) -> int:
        """The index behind the last value."""
        return self.start + self.num_values


@dataclass(frozen=True)
class Layout:
    """The runs of one rank's slot of a gather, in buffer order and without holes. The same on every rank."""

    runs: tuple[Run, ...]
    num_values: int
    dtype: torch.dtype

    @property
    def is_raw(self) -> bool:
        """Whether no run has a codec other than `raw`, so that shards may go straight from input to output."""
        return all(run.codec == "raw" for run in self.runs)


def build_layout(
    names: Sequence[str], sizes: Sequence[int], codecs: Sequence[str], num_values: int, dtype: torch.dtype
) -> Layout:
    """Builds the layout of a shard. Neighbours with the same category and codec become one run; empty stretches vanish.

    `sizes` are numbers of values of `dtype`. Where they do not add up to `num_values` (an FSDP2 extension makes its own gather
    inputs), nobody knows what lies where: the whole buffer becomes one raw run of category `other`.
    """
    if sum(sizes) != num_values:
        return Layout((Run("other", "raw", 0, num_values, tuple(names)),), num_values, dtype)
    runs: list[Run] = []
    start = 0
    for name, size, codec in zip(names, sizes, codecs, strict=True):
        category = categorize(name)
        last = runs[-1] if runs else None
        if size == 0:
            continue
        if last is not None and (last.category, last.codec) == (category, codec):
            runs[-1] = Run(category, codec, last.start, last.num_values + size, (*last.names, name))
        else:
            runs.append(Run(category, codec, start, size, (name,)))
        start += size
    return Layout(tuple(runs), num_values, dtype)
