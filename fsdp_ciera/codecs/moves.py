"""Moves as a section: one byte each, or two a byte where nearly all are below 15.

[Note: Nibbles] Most moves are -1 and 1. zstd finds matches everywhere among so few symbols and codes them worse than none
(after a step that changes 6 % of SmolLM2-135M: 2.29 bits a move where the entropy is 1.98, in 3.0 ns), while pairs of moves
look like bytes of any other kind and take their entropy (1.98 bits, 0.5 ns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fsdp_ciera.entropy import Coding, SectionWriter, StoredSection, SymbolReader
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.ops import Bytes, pack_nibbles, unpack_nibbles

BYTE_ESCAPE = 255
NIBBLE_ESCAPE = 15
"""The symbol that says that a literal follows, of moves in bytes and in nibbles."""


def write_moves(sections: SectionWriter, pieces: Callable[[], Iterable[Bytes]], num_moves: int, escape: int) -> None:
    """Adds the section of moves up to `escape`. All pieces but the last must hold an even number of them."""
    if escape == BYTE_ESCAPE:
        sections.code(pieces, num_moves)
        return
    num_bytes = -(-num_moves // 2)
    sections.code(lambda: map(pack_nibbles, pieces()), num_bytes, plain=Coding.NIBBLES, zstd=Coding.NIBBLES_ZSTD)


class MoveReader:
    """Reads moves in order. Methods raise `CieraDecodeError` as those of `SymbolReader`.

    `escape` is the symbol of a literal; no section holds more than `most_moves`.
    """

    def __init__(self, section: StoredSection, most_moves: int) -> None:
        as_bytes = {int(Coding.NIBBLES): Coding.PLAIN, int(Coding.NIBBLES_ZSTD): Coding.ZSTD}
        coding = as_bytes.get(section.coding)
        self._in_nibbles = coding is not None
        self.escape = NIBBLE_ESCAPE if self._in_nibbles else BYTE_ESCAPE
        most_bytes = -(-most_moves // 2) if self._in_nibbles else most_moves
        stored = section if coding is None else StoredSection(coding, section.data)
        self._bytes = SymbolReader(stored, most_symbols=most_bytes)
        self._left_over: Bytes = np.empty(0, np.uint8)

    def read(self, num_moves: int) -> Bytes:
        """The next moves, uint8 [num_moves], valid until the next call."""
        if not self._in_nibbles:
            return self._bytes.read(num_moves)
        num_missing = num_moves - len(self._left_over)
        fresh = unpack_nibbles(self._bytes.read(-(-num_missing // 2)))
        moves = np.concatenate([self._left_over, fresh]) if len(self._left_over) else fresh
        self._left_over = moves[num_moves:].copy()
        return moves[:num_moves]

    def finish(self) -> None:
        """Checks that all moves were read."""
        self._bytes.finish()
        if self._left_over.any():
            raise CieraDecodeError("half a byte of moves is left over and not 0")
