"""The stages that codecs are made of, for benchmarks/codecs.py: each a call that goes once over all values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from fsdp_ciera.codecs.sections import SectionWriter, StoredSection, SymbolReader, entropy_bits
from fsdp_ciera.kernels import reference
from fsdp_ciera.kernels.changes import Form
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.memory import empty_bytes
from fsdp_ciera.kernels.reference import chunks_of


def stages(values: torch.Tensor, block_size: int) -> Iterator[tuple[str, float | None, Callable[[], object]]]:
    """Name, bits a value, and the call. `values` is bf16 [a multiple of block_size].

    Bits are those that zstd makes; for unzstd, the entropy of its output.
    """
    fmt, num_values, kernels = FORMATS[torch.bfloat16], len(values), kernels_of(values)
    exponents, plane = (torch.zeros(num_values, dtype=torch.uint8) for _ in range(2))
    target, other = torch.zeros_like(values), values.clone()
    room = np.zeros(num_values, np.uint8)

    def code() -> SectionWriter:
        sections = SectionWriter(room)
        sections.code(lambda: [exponents.numpy()], num_values)
        return sections

    kernels.split_planes(values, fmt, exponents, plane)
    ((coding, num_bytes),) = code().entries
    section = StoredSection(coding, room[:num_bytes].copy())

    def decode() -> None:
        reader = SymbolReader(section, num_values)
        for chunk in chunks_of(num_values):
            reader.read(chunk.stop - chunk.start)
        reader.finish()

    yield "memcpy", None, lambda: target.copy_(values)
    yield "memcpy into fresh memory of torch", None, lambda: torch.empty_like(values).copy_(values)
    yield (
        "memcpy into fresh memory of ours",
        None,
        lambda: torch.from_numpy(empty_bytes(2 * num_values)).copy_(values.view(torch.uint8)),
    )
    for name, build in (("", kernels), (", torch reference", reference)):
        yield f"split{name}", None, lambda build=build: build.split_planes(values, fmt, exponents, plane)
        yield f"merge{name}", None, lambda build=build: build.merge_planes(exponents, plane, None, fmt, target)
        yield f"hash{name}", None, lambda build=build: build.hash_blocks(values, fmt, block_size)
        yield f"find no change{name}", None, lambda build=build: build.find_changes(values, other, fmt, Form())
        yield f"checksum{name}", None, lambda build=build: build.checksum(values.view(1, -1))
    yield "zstd of all exponents", 8 * num_bytes / num_values, code
    yield "unzstd of all exponents", entropy_bits(exponents.numpy()), decode
