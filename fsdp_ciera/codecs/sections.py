"""Sections on CPU: symbols of up to 8 bits as a payload stores them, with zstd or, where that is smaller, uncoded.

    SectionWriter    writes sections one behind the other into a buffer
    SymbolReader     reads the symbols of a received section, piece by piece

[Note: In pieces] Both take symbols piece by piece, so that exponents go from the split into the coder, and from the coder into
the merge, while they are in the processor's cache. Neither makes a plane as large as a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
import zstandard

from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.formats import packed_bytes
from fsdp_ciera.kernels.memory import Bytes
from fsdp_ciera.kernels.reference import CHUNK_VALUES, pack_bits, unpack_bits

_ZSTD_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    window_log=17,
    target_length=0,
    write_content_size=True,
)
"""Exponents hold no useful matches, only skewed counts: the least search that zstd offers leaves them to Huffman coding.
On SmolLM2-135M that takes 2.67 bits an exponent, as much as their entropy, where level 1 takes 2.93 (docs/measured.md)."""
_SMALLEST_TO_CODE_BYTES = 48  # below it a zstd frame's header eats the gain
_MOST_WINDOW_BYTES = 1 << 23  # what a frame may make us allocate; ours need 128 KiB


class Coding(IntEnum):
    """How a section's symbols are stored (docs/wire-format.md)."""

    PLAIN = 0  # one byte a symbol
    ZSTD = 1  # one zstd frame of one byte a symbol
    PACKED = 2  # `symbol_bits` bits a symbol, first symbol lowest
    ALL = 3  # nothing stored; of positions: every value travels as it is
    BITMAP = 4  # of positions: one bit a value
    BITMAP_ZSTD = 5  # one zstd frame of that
    DENSE = 6  # nothing stored; of positions: every value has a change, 0 where there is none
    NIBBLES = 7  # of moves: two a byte, the first one lowest
    NIBBLES_ZSTD = 8  # one zstd frame of that


class StoredSection(NamedTuple):
    """A received section: its coding number and its bytes (uint8 array, a view into the receive buffer)."""

    coding: int
    data: Bytes

    def check_empty(self) -> None:
        """Raises `CieraDecodeError` when the section has any bytes."""
        if len(self.data):
            raise CieraDecodeError(f"a section of coding {self.coding} has {len(self.data)} bytes where none belong")

    def check_nothing(self) -> None:
        """Raises `CieraDecodeError` unless the section is plain and empty."""
        if self.coding != Coding.PLAIN:
            raise CieraDecodeError(f"a section of coding {self.coding} stands where none belongs")
        self.check_empty()


class Form(NamedTuple):
    """One way to store a section: its bytes, and their codings uncoded and as a zstd frame."""

    data: Bytes
    plain: Coding = Coding.PLAIN
    zstd: Coding = Coding.ZSTD


class SectionWriter:
    """Writes sections into `room`, uint8 [enough for the largest sections that the codecs can make]."""

    def __init__(self, room: Bytes) -> None:
        self._room = room
        self.num_bytes = 0
        self.entries: list[tuple[Coding, int]] = []
        """Coding and stored bytes of each section so far."""

    def written(self, most_of_room: int) -> Bytes:
        """Returns all sections side by side: a view of the room, or a copy if they take less than 1 / `most_of_room` of it."""
        written = self._room[: self.num_bytes]
        return written if most_of_room * self.num_bytes > len(self._room) else written.copy()

    def empty(self, coding: Coding = Coding.PLAIN) -> None:
        """Adds a section without bytes."""
        self.entries.append((coding, 0))

    def reserve(self, num_bytes: int) -> Bytes:
        """Adds a plain section of `num_bytes` bytes, for the caller to fill."""
        return self._take(Coding.PLAIN, num_bytes)

    def code(
        self,
        pieces: Callable[[], Iterable[Bytes]],
        num_symbols: int,
        symbol_bits: int = 8,
        plain: Coding = Coding.PLAIN,
        zstd: Coding = Coding.ZSTD,
    ) -> None:
        """Adds a section of `num_symbols` symbols below 2**symbol_bits: the smallest of plain, packed and zstd.

        `plain` and `zstd` are the codings of the first and the last. `pieces` is called for the symbols, and again where zstd
        does not make them smaller. Cost: one zstd pass.
        """
        if not num_symbols:
            self.empty()
            return
        uncoded_bytes = packed_bytes(num_symbols, symbol_bits)
        if num_symbols >= _SMALLEST_TO_CODE_BYTES:
            start = self.num_bytes
            frame_bytes = _compress(pieces(), num_symbols, self._room[start : start + uncoded_bytes - 1])
            if frame_bytes is not None:
                self._take(zstd, frame_bytes)
                return
        if symbol_bits < 8:
            symbols = np.concatenate([piece.copy() for piece in pieces()])
            self._take(Coding.PACKED, uncoded_bytes)[:] = pack_bits(torch.from_numpy(symbols), symbol_bits).numpy()
            return
        into, position = self._take(plain, num_symbols), 0
        for piece in pieces():
            into[position : position + len(piece)] = piece
            position += len(piece)

    def code_smallest(self, forms: Sequence[Form]) -> None:
        """Adds a section in the smallest of several forms, each uncoded or as a zstd frame. Cost: one zstd pass a form."""
        stored = [(len(form.data), form.plain, form.data) for form in forms]
        for form in forms:
            if len(form.data) >= _SMALLEST_TO_CODE_BYTES:
                frame = np.empty(len(form.data) - 1, np.uint8)
                frame_bytes = _compress([form.data], len(form.data), frame)
                if frame_bytes is not None:
                    stored.append((frame_bytes, form.zstd, frame[:frame_bytes]))
        num_bytes, coding, data = min(stored, key=lambda choice: choice[0])
        self._take(coding, num_bytes)[:] = data

    def _take(self, coding: Coding, num_bytes: int) -> Bytes:
        start, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        assert self.num_bytes <= len(self._room), "a codec made larger sections than it announced"
        self.entries.append((coding, num_bytes))
        return self._room[start : self.num_bytes]


def _compress(pieces: Iterable[Bytes], num_symbols: int, into: Bytes) -> int | None:
    """Writes one zstd frame of all pieces into `into`. Returns its number of bytes, or `None` where it does not fit."""
    compressor = zstandard.ZstdCompressor(compression_params=_ZSTD_PARAMETERS).compressobj(size=num_symbols)
    position = 0
    for frame in _frames(compressor, pieces):
        if position + len(frame) > len(into):
            return None
        into[position : position + len(frame)] = np.frombuffer(frame, np.uint8)
        position += len(frame)
    return position


def _frames(compressor: zstandard.ZstdCompressionObj, pieces: Iterable[Bytes]) -> Iterator[bytes]:
    for piece in pieces:
        symbols = np.ascontiguousarray(piece)
        for start in range(0, len(symbols), CHUNK_VALUES):
            yield compressor.compress(symbols[start : start + CHUNK_VALUES].data)
    yield compressor.flush()


class SymbolReader:
    """Reads a section's symbols in order. All methods raise `CieraDecodeError` when the bytes are damaged.

    Pass `num_symbols` where it is known beforehand. Otherwise the section says it, and it may be at most `most_symbols`. That
    is checked first, since a damaged size must not make us allocate it.
    """

    def __init__(
        self, section: StoredSection, num_symbols: int | None = None, most_symbols: int = 0, symbol_bits: int = 8
    ) -> None:
        coding, data = section
        self._symbol_bits = symbol_bits
        self._scratch: Bytes = np.empty(0, np.uint8)
        self._plain: Bytes | None = None
        self._position = 0
        if coding == Coding.ZSTD:
            try:
                self.num_symbols = zstandard.get_frame_parameters(data.data).content_size
                decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES)
                self._frame = decompressor.stream_reader(data.data, read_across_frames=True)
            except zstandard.ZstdError as error:
                raise CieraDecodeError(f"a zstd section of {len(data)} bytes is damaged: {error}") from error
        elif coding == Coding.PACKED and symbol_bits < 8 and num_symbols is not None:
            if len(data) != packed_bytes(num_symbols, symbol_bits):
                raise CieraDecodeError(
                    f"a section of {num_symbols} symbols of {symbol_bits} bits has {len(data)} bytes"
                )
            self._plain = unpack_bits(torch.from_numpy(data), num_symbols, symbol_bits).numpy()
            self.num_symbols = num_symbols
        elif coding == Coding.PLAIN:
            self._plain = data
            self.num_symbols = len(data)
        else:
            raise CieraDecodeError(f"section coding {coding} does not belong here")
        if num_symbols is not None and self.num_symbols != num_symbols:
            raise CieraDecodeError(f"a section holds {self.num_symbols} symbols where {num_symbols} belong")
        if num_symbols is None and self.num_symbols > most_symbols:
            raise CieraDecodeError(f"a section holds {self.num_symbols} symbols where at most {most_symbols} may be")

    @property
    def num_left(self) -> int:
        """The number of symbols not read yet."""
        return self.num_symbols - self._position

    def read(self, num_symbols: int) -> Bytes:
        """Reads the next `num_symbols` symbols, which are valid until the next call."""
        if self._plain is not None:
            self._advance(num_symbols)
            symbols = self._plain[self._position - num_symbols : self._position]
            self._check(symbols)
            return symbols
        if len(self._scratch) < num_symbols:
            self._scratch = np.empty(min(num_symbols, self.num_left), np.uint8)
        return self.read_into(self._scratch[:num_symbols], num_symbols)

    def read_into(self, out: Bytes, num_symbols: int | None = None) -> Bytes:
        """Fills `out` (contiguous) with the next symbols and returns it."""
        self._advance(len(out) if num_symbols is None else num_symbols)
        if self._plain is not None:
            out[:] = self._plain[self._position - len(out) : self._position]
        else:
            self._inflate(out)
        self._check(out)
        return out

    def read_all(self) -> Bytes:
        """Reads all symbols that are left, and checks that nothing stands behind them."""
        symbols = self.read_into(np.empty(self.num_left, np.uint8))
        self.finish()
        return symbols

    def finish(self) -> None:
        """Checks that all symbols were read and that nothing stands behind them."""
        if self.num_left:
            raise CieraDecodeError(f"a section holds {self.num_left} symbols too many of {self.num_symbols}")
        if self._plain is None:
            try:
                surplus = self._frame.read(1)
            except zstandard.ZstdError as error:
                raise CieraDecodeError(f"a zstd section does not end where it should: {error}") from error
            if surplus:
                raise CieraDecodeError("a zstd section holds more than it announces")

    def _advance(self, num_symbols: int) -> None:
        if num_symbols > self.num_left:
            raise CieraDecodeError(
                f"a section of {self.num_symbols} symbols holds {num_symbols - self.num_left} too few"
            )
        self._position += num_symbols

    def _inflate(self, out: Bytes) -> None:
        position = 0
        while position < len(out):
            try:
                num_read = self._frame.readinto(out[position:].data)
            except zstandard.ZstdError as error:
                raise CieraDecodeError(f"a zstd section is damaged: {error}") from error
            if not num_read:
                raise CieraDecodeError(f"a zstd section of {self.num_symbols} symbols ends too early")
            position += num_read

    def _check(self, symbols: Bytes) -> None:
        check_width(symbols, self._symbol_bits)


def check_width(symbols: Bytes, symbol_bits: int) -> None:
    """Raises `CieraDecodeError` when a symbol is not below 2**symbol_bits."""
    if symbol_bits < 8 and len(symbols) and int(symbols.max()) >> symbol_bits:
        raise CieraDecodeError(f"a symbol does not fit into {symbol_bits} bits")


def entropy_bits(symbols: Bytes) -> float:
    """Bits that an order-0 code takes for a symbol of uint8 [n]; 0 where n is 0. Cost: a few nanoseconds a symbol, so take a
    sample."""
    if not len(symbols):
        return 0.0
    counts = np.bincount(symbols, minlength=256)
    shares = counts[counts > 0] / len(symbols)
    return float(-(shares * np.log2(shares)).sum())
