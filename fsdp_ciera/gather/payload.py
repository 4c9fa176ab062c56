"""The wire format: a 64-byte header per rank and gather, and the payload behind it (docs/wire-format.md).

    exchange 1   one header of 64 bytes from every rank
    exchange 2   one payload from every rank, padded to the largest

    payload      fixed part of run 0 | ... | fixed part of run n-1 | section table | sections, in run order
    table        one little-endian u64 a section: coding in the top 8 bits, stored bytes in the lower 56

Pure functions between fields and bytes; what the fields mean to a gather is in handshake.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from fsdp_ciera.codecs.sections import Coding, StoredSection
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.memory import Bytes

MAGIC = int.from_bytes(b"CIER", "little")
WIRE_VERSION = 4
HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("wire_version", "<u2"),
        ("status", "<u2"),
        ("fingerprint", "<u8"),
        ("sequence", "<u8"),
        ("base", "<u8"),
        ("payload_bytes", "<u8"),
        ("checksum", "<u8"),
        ("descriptor_bytes", "<u4"),
        ("num_changes", "<u4"),
        ("repeat_bytes", "<u8"),
    ]
)
HEADER_BYTES = 64
assert HEADER.itemsize == HEADER_BYTES
TABLE_ENTRY_BYTES = 8
_LENGTH_BITS = 56


class Status(IntEnum):
    """What a rank says about itself in its header."""

    READY = 0
    ENCODE_FAILED = 1


def pack_header(
    *,
    status: Status,
    fingerprint: int,
    sequence: int,
    base: int,
    descriptor_bytes: int,
    payload_bytes: int = 0,
    repeat_bytes: int = 0,
    checksum: int = 0,
    num_changes: int = 0,
) -> torch.Tensor:
    """-> uint8 [64]. `checksum` may be a signed 64-bit number."""
    header = np.zeros(1, HEADER)
    header["magic"], header["wire_version"], header["status"] = MAGIC, WIRE_VERSION, status
    header["fingerprint"], header["sequence"], header["base"] = fingerprint, sequence, base
    header["payload_bytes"], header["checksum"] = payload_bytes, checksum & 0xFFFF_FFFF_FFFF_FFFF
    header["descriptor_bytes"], header["repeat_bytes"] = descriptor_bytes, repeat_bytes
    header["num_changes"] = num_changes & 0xFFFF_FFFF
    return torch.from_numpy(header.view(np.uint8))


def unpack_headers(gathered: torch.Tensor) -> np.ndarray[Any, Any]:
    """uint8 [world_size, 64] -> structured array [world_size] of dtype `HEADER`."""
    return gathered.numpy().view(HEADER).reshape(-1)


def fingerprint_of(descriptor: Mapping[str, Any]) -> int:
    """A 64-bit number that differs when any field of the descriptor does."""
    return int.from_bytes(hashlib.blake2b(encode_descriptor(descriptor), digest_size=8).digest(), "little")


def base_of(sequence: int, checksums: Sequence[int]) -> int:
    """The name of a completed gather: 64 bits, never 0, of its number and of what every rank carried in it.

    [Note: Mispaired gathers] When ranks gather different modules of the same class and shape at the same time, their
    headers can look alike. Both then remember the same table of checksums, but under different streams; so when the
    streams meet again their bases differ, and all ranks raise. A mere counter would not tell.
    Test: test_failures.py, two roots in different order.
    """
    text = json.dumps([sequence, *checksums]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") or 1


def encode_descriptor(descriptor: Mapping[str, Any]) -> bytes:
    """The descriptor as JSON with sorted keys."""
    return json.dumps(descriptor, sort_keys=True).encode()


def table_start(fixed_bytes: int, num_sections: int) -> tuple[int, int]:
    """Where the table begins in a payload, and where the sections behind it do."""
    return fixed_bytes, fixed_bytes + num_sections * TABLE_ENTRY_BYTES


def write_table(payload: Bytes, fixed_bytes: int, entries: Sequence[tuple[Coding, int]]) -> int:
    """Writes the table of sections (coding, stored bytes) that already stand behind it in `payload`, uint8.

    Returns the length of the payload: 0 when there is no fixed part and all sections are plain and empty. Then nothing
    travels, not even the table.
    """
    if not fixed_bytes and all(entry == (Coding.PLAIN, 0) for entry in entries):
        return 0
    table, behind = table_start(fixed_bytes, len(entries))
    numbers = [coding << _LENGTH_BITS | num_bytes for coding, num_bytes in entries]
    payload[table:behind] = np.array(numbers, dtype="<u8").view(np.uint8)
    return behind + sum(num_bytes for _, num_bytes in entries)


def read_sections(payload: torch.Tensor, fixed_bytes: int, num_sections: int) -> list[StoredSection]:
    """uint8 [payload_bytes] of one rank -> its sections, as views.

    Raises `CieraDecodeError` unless fixed part, table and sections fill the payload exactly.
    """
    stored = payload.numpy()
    if not len(stored) and not fixed_bytes:
        return [StoredSection(Coding.PLAIN, stored)] * num_sections
    _, start = table_start(fixed_bytes, num_sections)
    if start > len(stored):
        raise CieraDecodeError(f"a payload of {len(stored)} bytes is too short for its {num_sections} table entries")
    table = stored[fixed_bytes:start].copy().view("<u8")
    sections = []
    for entry in table.tolist():
        length = entry & ((1 << _LENGTH_BITS) - 1)
        sections.append(StoredSection(entry >> _LENGTH_BITS, stored[start : start + length]))
        start += length
    if start != len(stored):
        raise CieraDecodeError(f"the sections of a payload of {len(stored)} bytes end at byte {start}")
    return sections
