"""Moves as a section: one byte each, or two a byte where nearly all are below 15.

[Note: Nibbles] Most moves are -1 and 1. zstd finds matches everywhere among so few symbols and codes them worse than none
(after a step that changes 6 % of SmolLM2-135M: 2.29 bits a move where the entropy is 1.98, in 3.0 ns), while pairs of moves
look like bytes of any other kind and take their entropy (1.98 bits, 0.5 ns).
"""

from __future__ import annotations

import numpy as np

from fsdp_ciera.codecs.sections import Coding, SectionWriter, StoredSection, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.changes import BYTE_ESCAPE
from fsdp_ciera.kernels.memory import Bytes

NIBBLE_ESCAPE = 15
"""The symbol that says that a literal follows, of moves in nibbles; of moves in bytes it is `BYTE_ESCAPE`."""


def write_moves(sections: SectionWriter, moves: Bytes, escape: int) -> None:
    """Adds the section of moves uint8 [k] up to `escape`."""
    if escape == BYTE_ESCAPE:
        sections.code(lambda: [moves], len(moves))
        return
    packed = pack_nibbles(moves)
    sections.code(lambda: [packed], len(packed), plain=Coding.NIBBLES, zstd=Coding.NIBBLES_ZSTD)


def escape_of(section: StoredSection) -> int:
    """The symbol of a literal in a section of moves."""
    return NIBBLE_ESCAPE if section.coding in (Coding.NIBBLES, Coding.NIBBLES_ZSTD) else BYTE_ESCAPE


def read_moves(section: StoredSection, num_moves: int) -> Bytes:
    """-> moves uint8 [num_moves]. Raises `CieraDecodeError` unless the section holds exactly so many."""
    if escape_of(section) == BYTE_ESCAPE:
        return SymbolReader(section, num_moves).read_all()
    num_bytes = -(-num_moves // 2)
    as_bytes = Coding.PLAIN if section.coding == Coding.NIBBLES else Coding.ZSTD
    moves = unpack_nibbles(SymbolReader(StoredSection(as_bytes, section.data), num_bytes).read_all())
    if moves[num_moves:].any():
        raise CieraDecodeError("half a byte of moves is left over and not 0")
    return moves[:num_moves]


def pack_nibbles(symbols: Bytes) -> Bytes:
    """uint8 [n] below 16 -> uint8 [ceil(n / 2)], first symbol lowest. Cost: three passes."""
    if len(symbols) % 2:
        symbols = np.append(symbols, np.uint8(0))
    pairs = symbols.view("<u2")  # 0000bbbb 0000aaaa
    spare = pairs >> 4
    spare |= pairs
    return spare.astype(np.uint8)


def unpack_nibbles(packed: Bytes) -> Bytes:
    """uint8 [n] -> uint8 [2 * n] below 16."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(np.uint8)
