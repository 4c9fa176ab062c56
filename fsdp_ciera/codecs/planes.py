"""Splits a run into exponents and sign+mantissa and merges them, a chunk at a time, while exponents are in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import FloatFormat
from fsdp_ciera.kernels.reference import CHUNK_VALUES, chunks_of

SPLIT_VALUES = 2 * CHUNK_VALUES
"""The number of values split in one call: their exponents still stay in the cache, in half as many calls."""


def split(
    values: torch.Tensor,
    fmt: FloatFormat,
    plane: torch.Tensor | None = None,
    exponents: torch.Tensor | None = None,
    chunk_values: int = SPLIT_VALUES,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Splits values [n]. Yields each chunk with its exponents, uint8 [chunk], which are valid until the next chunk is yielded.

    Writes the sign+mantissa of each chunk into `plane` [fmt.remainder_bytes(n)] and its exponents into `exponents` [n],
    where these are given. `chunk_values` must be a multiple of 8.
    """
    kernels, num_values = kernels_of(values), len(values)
    buffer = (
        torch.empty(min(chunk_values, num_values), dtype=torch.uint8, device=values.device)
        if exponents is None
        else exponents
    )
    for chunk in chunks_of(num_values, chunk_values):
        chunk_exponents = buffer[: chunk.stop - chunk.start] if exponents is None else buffer[chunk]
        kernels.split_planes(values[chunk], fmt, chunk_exponents, *_parts(plane, fmt, num_values, chunk))
        yield chunk, chunk_exponents


def split_remainder(
    values: torch.Tensor, fmt: FloatFormat, plane: torch.Tensor, exponents: torch.Tensor | None = None
) -> None:
    """Writes the sign+mantissa of values [n] into `plane`, and in the same pass their exponents into `exponents`, if given."""
    kernels_of(values).split_planes(values, fmt, exponents, *_parts(plane, fmt, len(values), slice(0, len(values))))


def merge(
    exponents: torch.Tensor, plane: torch.Tensor, fmt: FloatFormat, num_values: int, chunk: slice, out: torch.Tensor
) -> None:
    """Merges the exponents of a chunk and the plane of all `num_values` values into `out` [chunk]. The chunk starts at a
    multiple of 8."""
    low, top = _parts(plane, fmt, num_values, chunk)
    assert low is not None
    kernels_of(out).merge_planes(exponents, low, top, fmt, out)


def _parts(
    plane: torch.Tensor | None, fmt: FloatFormat, num_values: int, chunk: slice
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The low bytes and the top bits of a chunk, as views of the plane; `None` where there are none."""
    if plane is None:
        return None, None
    low, top = fmt.remainder_slices(num_values, chunk)
    return plane[low], plane[top] if fmt.top_bits else None
