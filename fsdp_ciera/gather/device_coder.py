"""Entropy coding of what a payload on CUDA holds: nvCOMP's ANS where it is installed (fsdp_ciera.kernels.nvcomp).

Large parts are coded in chunks while sizes are settled; the chunks' sizes travel ahead like everything else about sizes, so all
ranks know which parts are coded and where each chunk lies. A part that coding does not make smaller goes uncoded.

NOT YET RUN ON A GPU. Test: test_device_gather.py, with a stand-in for nvCOMP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_ciera.kernels import nvcomp

ALIGNMENT = 16
"""Bytes: where parts of a payload and coded chunks may begin, at multiples of it."""
LEAST_BYTES = 64 << 10  # smaller parts are not coded: tables and launches cost more than the bytes they save


def aligned(num_bytes: int) -> int:
    """Rounded up to where the next part or chunk may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Part:
    """One part of a payload, as it is stored."""

    num_bytes: int
    """Uncoded."""
    chunk_bytes: tuple[int, ...] = ()
    """Of each coded chunk; none where the part is stored as it is."""

    @property
    def stored_bytes(self) -> int:
        """What it takes in the payload, up to where the next part may begin."""
        return sum(map(aligned, self.chunk_bytes)) if self.chunk_bytes else aligned(self.num_bytes)


class PartCoder:
    """Codes and decodes parts, uint8 tensors on the device. Waits for nothing."""

    def __init__(self, ans: nvcomp.Ans) -> None:
        self._ans = ans
        self.version = ans.version

    @staticmethod
    def num_chunks(num_bytes: int) -> int:
        """Into how many chunks a part is coded; 0: it is not."""
        return nvcomp.num_chunks_of(num_bytes) if num_bytes >= LEAST_BYTES else 0

    def encode(self, part: torch.Tensor) -> nvcomp.Coded:
        """The chunks and, on the device, their sizes. A chunk that could not be coded counts as larger than any."""
        coded = self._ans.compress(part)
        return coded._replace(chunk_bytes=coded.chunk_bytes.masked_fill(coded.statuses != 0, coded.chunk_stride_bytes))

    def store(self, coded: nvcomp.Coded, stored: Part, into: torch.Tensor) -> None:
        """Coded chunks -> uint8 [stored.stored_bytes], side by side."""
        start = 0
        for number, num_bytes in enumerate(stored.chunk_bytes):
            chunk = coded.scratch[number * coded.chunk_stride_bytes :][:num_bytes]
            into[start : start + num_bytes].copy_(chunk)
            start += aligned(num_bytes)

    def places(self, stored: Part, device: torch.device) -> torch.Tensor:
        """int64 [2, chunks] on the device: where each chunk begins, counted from its part, and its bytes. Made when sizes are
        settled, since a copy from the host may wait."""
        starts = [0]
        for num_bytes in stored.chunk_bytes[:-1]:
            starts.append(starts[-1] + aligned(num_bytes))
        return torch.tensor([starts, stored.chunk_bytes], dtype=torch.int64).to(device)

    def decode(self, part: torch.Tensor, stored: Part, places: torch.Tensor, damage: torch.Tensor) -> torch.Tensor:
        """A stored part -> uint8 [stored.num_bytes]. `damage` int32 [1] becomes 1 where a chunk is broken."""
        out = torch.empty(stored.num_bytes, dtype=torch.uint8, device=part.device)
        statuses = self._ans.decompress(places[0] + part.data_ptr(), places[1].contiguous(), out)
        damage |= (statuses != 0).any().to(torch.int32)
        return out


def choose(num_bytes: int, chunk_bytes: Sequence[int]) -> Part:
    """Coded or not: whichever takes fewer bytes."""
    coded = Part(num_bytes, tuple(chunk_bytes))
    return coded if chunk_bytes and coded.stored_bytes < aligned(num_bytes) else Part(num_bytes)


def part_coder() -> PartCoder | None:
    """The coder, where there is one that places chunks as payloads do. `nvcomp.why_not_available` says why there is none."""
    if nvcomp.why_not_available() is not None:
        return None
    ans = nvcomp.ans()
    fits = all(ALIGNMENT % one.input == 0 for one in (ans.compress_alignments, ans.decompress_alignments))
    return PartCoder(ans) if fits else None
