"""The stages that codecs are made of, for benchmarks/codecs.py: each a call that goes once over all values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from fsdp_ciera.entropy import SectionWriter, StoredSection, SymbolReader, entropy_bits
from fsdp_ciera.kernels import ops, reference
from fsdp_ciera.kernels.formats import FORMATS


def stages(values: torch.Tensor, block_size: int) -> Iterator[tuple[str, float | None, Callable[[], object]]]:
    """Name, bits a value, and the call. `values` is bf16 [a multiple of block_size].

    Bits are those that zstd makes, and beside unzstd the entropy of what comes out of it.
    """
    fmt, num_values = FORMATS[torch.bfloat16], len(values)
    words, rows = fmt.words(values), values.view(1, -1)
    exponents, plane = np.zeros(num_values, np.uint8), np.zeros(num_values, np.uint8)
    target, other = torch.zeros_like(values), values.clone()
    fresh_words = fmt.words(other)
    room = np.zeros(num_values, np.uint8)
    hashes = np.empty((num_values // block_size, 2), np.uint64)
    chunk_blocks = ops.CHUNK_VALUES // block_size

    def split() -> None:
        for _ in ops.split(words, fmt, plane, exponents):
            pass

    def hash_all() -> None:
        hasher = ops.BlockHasher(block_size, chunk_blocks)
        blocks = exponents[: len(hashes) * block_size].reshape(-1, block_size)
        for chunk in ops.chunks_of(len(hashes), chunk_blocks):
            hasher.add(blocks[chunk], hashes[chunk])
        hasher.finish(hashes)

    def compare() -> None:
        finder = ops.ChangeFinder(ops.CHUNK_VALUES)
        for chunk in ops.chunks_of(num_values):
            finder.compare(words[chunk], fresh_words[chunk])

    def code() -> SectionWriter:
        sections = SectionWriter(room)
        sections.code(lambda: [exponents], num_values)
        return sections

    split()
    ((coding, num_bytes),) = code().entries
    section = StoredSection(coding, room[:num_bytes].copy())

    def decode() -> None:
        reader = SymbolReader(section, num_values)
        for chunk in ops.chunks_of(num_values):
            reader.read(chunk.stop - chunk.start)
        reader.finish()

    yield "memcpy", None, lambda: target.copy_(values)
    yield "memcpy into fresh memory of torch", None, lambda: torch.empty_like(values).copy_(values)
    yield (
        "memcpy into fresh memory of ours",
        None,
        lambda: torch.from_numpy(ops.empty_bytes(2 * num_values)).copy_(values.view(torch.uint8)),
    )
    yield "split", None, split
    yield "hash", None, hash_all
    yield "compare with last values", None, compare
    yield "zstd of all exponents", 8 * num_bytes / num_values, code
    yield "unzstd of all exponents", entropy_bits(exponents), decode
    yield "merge", None, lambda: ops.merge_rows(exponents[None], plane[None], fmt, fmt.words(target)[None])
    yield "checksum", None, lambda: ops.checksum(rows)
    yield "split, torch reference", None, lambda: reference.split_planes(rows, fmt)
    parts = (torch.from_numpy(exponents).view(1, -1), torch.from_numpy(plane).view(1, -1))
    yield "merge, torch reference", None, lambda: reference.merge_planes(*parts, fmt, out=target.view(1, -1))
    whole = torch.from_numpy(exponents[: len(hashes) * block_size]).view(-1, block_size)
    yield "hash, torch reference", None, lambda: reference.hash_blocks(whole)
