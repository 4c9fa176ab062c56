"""Moves as a section: one byte each, or two a byte where nearly all are below 15.

[Note: Nibbles] Most moves are -1 and 1. Among so few symbols zstd finds matches everywhere, and with them it codes worse than
without (after a step that changes 6 % of SmolLM2-135M: 2.29 bits a move where the entropy is 1.98, in 3.0 ns). Pairs of moves
look like bytes of any other kind and take their entropy (1.98 bits, 0.5 ns).
"""

from __future__ import annotations

import numpy as np

from fsdp_ciera.codecs.sections import Coding, SectionWriter, StoredSection, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.changes import BYTE_ESCAPE
from fsdp_ciera.kernels.memory import Bytes

NIBBLE_ESCAPE = 15
"""The symbol for a literal among moves in nibbles; among moves in bytes it is `BYTE_ESCAPE`."""


def write_moves(sections: SectionWriter, moves: Bytes, escape: int) -> None:
    """Adds the section of moves, uint8 [k] of at most `escape`."""
    if escape == BYTE_ESCAPE:
        sections.code(lambda: [moves], len(moves))
        return
    packed = pack_nibbles(moves)
    sections.code(lambda: [packed], len(packed), plain=Coding.NIBBLES, zstd=Coding.NIBBLES_ZSTD)


def escape_of(section: StoredSection) -> int:
    """The symbol for a literal in a section of moves."""
    return NIBBLE_ESCAPE if section.coding in (Coding.NIBBLES, Coding.NIBBLES_ZSTD) else BYTE_ESCAPE


def read_moves(section: StoredSection, num_moves: int) -> Bytes:
    """Reads a section -> moves uint8 [num_moves]. Raises `CieraDecodeError` unless it holds exactly so many."""
    if escape_of(section) == BYTE_ESCAPE:
        return SymbolReader(section, num_moves).read_all()
    num_bytes = -(-num_moves // 2)
    byte_coding = Coding.PLAIN if section.coding == Coding.NIBBLES else Coding.ZSTD
    moves = unpack_nibbles(SymbolReader(StoredSection(byte_coding, section.data), num_bytes).read_all())
    if moves[num_moves:].any():
        raise CieraDecodeError("half a byte of moves is left over and not 0")
    return moves[:num_moves]


def pack_nibbles(symbols: Bytes) -> Bytes:
    """Packs uint8 [n] below 16 -> uint8 [ceil(n / 2)], first symbol lowest. Cost: three passes."""
    if len(symbols) % 2:
        symbols = np.append(symbols, np.uint8(0))
    pairs = symbols.view("<u2")  # 0000bbbb 0000aaaa
    packed = pairs >> 4
    packed |= pairs
    return packed.astype(np.uint8)


def unpack_nibbles(packed: Bytes) -> Bytes:
    """Unpacks uint8 [n] -> uint8 [2 * n] below 16."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(np.uint8)
