"""The kernels that the codecs call, and the one place where an implementation is chosen: today NumPy on one core.

A faster implementation (a native build of the same functions) replaces names here and nowhere else. Each must agree bit
for bit with `reference`, the readable torch form; tests/test_kernels_reference.py compares them.
"""

from __future__ import annotations

from fsdp_ciera.kernels.bits import pack_bits, pack_nibbles, unpack_bits, unpack_nibbles
from fsdp_ciera.kernels.changes import ChangeFinder, Moves, SizeFinder
from fsdp_ciera.kernels.hashing import BlockHasher
from fsdp_ciera.kernels.memory import Bytes, empty_bytes, zeros_tensor
from fsdp_ciera.kernels.planes import Merger, merge_rows, split
from fsdp_ciera.kernels.reference import CHUNK_VALUES, checksum, chunks_of

__all__ = [
    "CHUNK_VALUES",
    "BlockHasher",
    "Bytes",
    "ChangeFinder",
    "Merger",
    "Moves",
    "SizeFinder",
    "checksum",
    "chunks_of",
    "empty_bytes",
    "merge_rows",
    "pack_bits",
    "pack_nibbles",
    "split",
    "unpack_bits",
    "unpack_nibbles",
    "zeros_tensor",
]
