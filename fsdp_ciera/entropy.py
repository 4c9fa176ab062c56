"""Entropy coding of one section on CPU: zstd, or plain where that is smaller."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import zstandard

from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.formats import packed_bytes
from fsdp_ciera.kernels.reference import pack_bits, unpack_bits

if TYPE_CHECKING:
    import numpy as np

_ZSTD_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    window_log=17,
    target_length=0,
    write_content_size=True,
)
"""Exponents hold no matches worth having, only skewed counts: the least search that zstd offers leaves them to Huffman.
On SmolLM2-135M that is 2.67 bits an exponent, as much as their entropy, where level 1 needs 2.93 (docs/measured.md)."""
_SMALLEST_TO_CODE_BYTES = 48  # below it a zstd frame's header eats the gain


class Coding(IntEnum):
    """How a section's symbols are stored (docs/wire-format.md)."""

    PLAIN = 0  # one byte a symbol
    ZSTD = 1  # one zstd frame of one byte a symbol
    PACKED = 2  # `symbol_bits` bits a symbol, first symbol lowest
    ALL = 3  # nothing stored: of a list of positions, every one


@dataclass(frozen=True)
class Section:
    """A coded run of symbols, as it travels."""

    coding: Coding
    data: torch.Tensor | bytes

    @property
    def num_bytes(self) -> int:
        """Stored bytes."""
        return self.data.numel() if isinstance(self.data, torch.Tensor) else len(self.data)


def code_section(symbols: torch.Tensor, symbol_bits: int = 8) -> Section:
    """uint8 [n] of symbols below 2**symbol_bits -> the smallest of plain, packed and zstd.

    Cost: one zstd pass over n bytes on the calling core.
    """
    num_symbols = symbols.numel()
    plain_bytes = packed_bytes(num_symbols, symbol_bits)
    if num_symbols >= _SMALLEST_TO_CODE_BYTES:
        compressor = zstandard.ZstdCompressor(compression_params=_ZSTD_PARAMETERS)
        frame = compressor.compress(symbols.contiguous().numpy().data)
        if len(frame) < plain_bytes:
            return Section(Coding.ZSTD, frame)
    if symbol_bits < 8:
        return Section(Coding.PACKED, pack_bits(symbols.view(1, -1), symbol_bits).view(-1))
    return Section(Coding.PLAIN, symbols)


def decode_section(coding: int, data: np.ndarray[Any, Any], num_symbols: int, symbol_bits: int = 8) -> torch.Tensor:
    """The inverse of `code_section`: stored bytes -> uint8 [num_symbols].

    Raises `CieraDecodeError` when the bytes are not a section of that many symbols.
    """
    if coding == Coding.PACKED and symbol_bits < 8:
        if len(data) != packed_bytes(num_symbols, symbol_bits):
            raise CieraDecodeError(f"a section of {num_symbols} symbols of {symbol_bits} bits has {len(data)} bytes")
        return unpack_bits(torch.from_numpy(data).view(1, -1), num_symbols, symbol_bits).view(-1)
    symbols = decode_symbols(coding, data, most_symbols=num_symbols)
    if len(symbols) != num_symbols:
        raise CieraDecodeError(f"a section holds {len(symbols)} symbols where {num_symbols} belong")
    check_width(symbols, symbol_bits)
    return symbols


def check_width(symbols: torch.Tensor, symbol_bits: int) -> None:
    """Raises `CieraDecodeError` when a uint8 symbol is not below 2**symbol_bits."""
    if symbol_bits < 8 and symbols.numel() and int(symbols.max()) >> symbol_bits:
        raise CieraDecodeError(f"a symbol does not fit into {symbol_bits} bits")


def decode_symbols(coding: int, data: np.ndarray[Any, Any], most_symbols: int) -> torch.Tensor:
    """A plain or zstd section that tells its own length: stored bytes -> uint8 [at most most_symbols].

    Raises `CieraDecodeError` when the bytes are no such section.
    """
    if coding == Coding.ZSTD:
        try:
            announced = zstandard.get_frame_parameters(data.data).content_size
            if announced > most_symbols:  # looked at first: a damaged size must not make us allocate it
                raise CieraDecodeError(f"a zstd section announces {announced} symbols where {most_symbols} may be")
            raw = zstandard.ZstdDecompressor().decompress(data.data)
        except zstandard.ZstdError as error:
            raise CieraDecodeError(f"a zstd section of {len(data)} bytes is damaged: {error}") from error
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    if coding != Coding.PLAIN:
        raise CieraDecodeError(f"section coding {coding} does not belong here; 0 (plain) and 1 (zstd) do")
    if len(data) > most_symbols:
        raise CieraDecodeError(f"a plain section of {len(data)} symbols stands where {most_symbols} may be")
    return torch.from_numpy(data)
