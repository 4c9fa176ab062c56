"""Lossless compressors of others on the same bf16 bytes, for benchmarks/codecs.py. None of them has a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import zstandard

Case = tuple[str, str, float, Callable[[], object], Callable[[], object]]
"""Name, "encode" or "decode", bits a value, an untimed call before each round, the timed call."""


def rivals(values: torch.Tensor) -> Iterator[Case]:
    """zstd levels 1 and 3 on the raw bytes, and ZipNN where it is installed. `values` is bf16 [n]."""
    raw = values.view(torch.uint8).numpy()
    for level in (1, 3):
        frame = zstandard.ZstdCompressor(level=level).compress(raw.data)
        bits = 8 * len(frame) / len(values)
        compress = zstandard.ZstdCompressor(level=level).compress
        yield f"zstd level {level}", "encode", bits, _nothing, lambda compress=compress: compress(raw.data)
        yield f"zstd level {level}", "decode", bits, _nothing, lambda frame=frame: zstandard.decompress(frame)
    yield from _zipnn(raw.tobytes(), len(values))


def _zipnn(raw: bytes, num_values: int) -> Iterator[Case]:
    """One worker thread. It reorders its input in place, so every round gets a copy, which is not timed."""
    try:
        from zipnn import ZipNN
    except ImportError:
        return
    coder = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    frame = coder.compress(bytearray(raw))
    assert bytes(coder.decompress(frame)) == raw
    bits = 8 * len(frame) / num_values
    source = bytearray()

    def refill(data: bytes) -> None:
        nonlocal source
        source = bytearray(data)

    frame = bytes(coder.compress(bytearray(raw)))
    yield "ZipNN", "encode", bits, lambda: refill(raw), lambda: coder.compress(source)
    yield "ZipNN", "decode", bits, lambda: refill(frame), lambda: coder.decompress(source)


def _nothing() -> None:
    return None
