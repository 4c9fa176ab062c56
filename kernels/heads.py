"""What a payload looks like, and what can be wrong with one.

    head | table | fixed parts of all units | section 0 | section 1 | ...

The head has 32 bytes (`HEAD`). The table has one u64 a section: its coding in the top 8 bits, and in the lower 56 its end, in
bytes from the beginning of the payload. A section begins where the one before it ends, rounded up to `ALIGNMENT`; the first
one at a place that follows from the layout, as do the lengths of the fixed parts. All numbers are little-endian.

Worked example: three sections of 10, 0 and 5 bytes, the first one at 64, with alignment 16. They begin at 64, 80 and 80, and
the table says that they end at 74, 80 and 85.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np

HEAD = np.dtype(
    [
        ("name", "<u8"),  # of the gather, the same on all ranks
        ("checksum", "<u8"),  # of the decoded bytes of the rank's shard
        ("payload_bytes", "<u8"),  # of the payload, head and all, without padding
        ("magic", "<u4"),
        ("wire_version", "<u2"),
        ("alignment", "<u2"),
    ]
)
HEAD_BYTES = 32
assert HEAD.itemsize == HEAD_BYTES

MAGIC = int.from_bytes(b"CIER", "little")
WIRE_VERSION = 5
ALIGNMENT = 16
"""Of the payloads that CUDA kernels write and read. Those of the CPU have 1."""

BROKEN_PROMISE, FAILED = 0, 1
"""Names that no gather has: the rank's shard is not what it announced; the rank could not encode."""
FIRST_NAME = 2
"""The lowest that a gather may have."""

TABLE_ENTRY_BYTES = 8
CODING_SHIFT = 56
TILES = 9
"""Coding of the sections that the tile kernels write: plain, with offsets where a tile must be decoded by itself."""


class Damage(IntFlag):
    """What the kernels found wrong with a gather's payloads: bits that they set in an int32 on the device."""

    DAMAGED = 1
    OTHER_GATHER = 2
    BROKEN_PROMISE = 4
    FAILED = 8
    WRONG_VALUES = 16
    FOREIGN = 32


DAMAGE_MEANINGS: dict[Damage, str] = {
    Damage.DAMAGED: "parts of a payload do not fit together: it was damaged on its way, or by its sender",
    Damage.OTHER_GATHER: "a payload belongs to another gather: the ranks run their modules in different order",
    Damage.BROKEN_PROMISE: "a rank's shard changed after the ranks had agreed on what it would send",
    Damage.FAILED: "a rank could not encode its shard",
    Damage.WRONG_VALUES: "the checksum of a decoded shard is not the one that its rank sent",
    Damage.FOREIGN: "a payload was not written by this version of fsdp_ciera on the same kind of device",
}


def meanings_of(damage: int) -> list[str]:
    """A sentence for each bit that is set.

    >>> meanings_of(Damage.FAILED)
    ['a rank could not encode its shard']
    """
    return [meaning for bit, meaning in DAMAGE_MEANINGS.items() if damage & bit]
