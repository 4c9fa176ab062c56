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
On exponents of SmolLM2-135M that is 2.66 bits a value where level 1 needs 2.92 (their entropy is 2.61), and 2.5 times as
fast."""
_SMALLEST_TO_CODE_BYTES = 48  # below it a zstd frame's header eats the gain


class Coding(IntEnum):
    """How a section's symbols are stored (docs/wire-format.md)."""

    PLAIN = 0  # one byte a symbol
    ZSTD = 1  # one zstd frame of one byte a symbol
    PACKED = 2  # `symbol_bits` bits a symbol, first symbol lowest


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
    if coding == Coding.ZSTD:
        try:
            frame = data.data
            announced = zstandard.get_frame_parameters(frame).content_size
            if announced != num_symbols:  # looked at first: a damaged size must not make us allocate it
                raise CieraDecodeError(f"a zstd section announces {announced} symbols where {num_symbols} belong")
            raw = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise CieraDecodeError(f"a zstd section of {len(data)} bytes is damaged: {error}") from error
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    width_bits = {Coding.PLAIN: 8, Coding.PACKED: symbol_bits}.get(Coding(coding)) if coding in (0, 2) else None
    if width_bits is None:
        raise CieraDecodeError(f"section coding {coding} is unknown; this version knows {[c.value for c in Coding]}")
    if len(data) != packed_bytes(num_symbols, width_bits):
        raise CieraDecodeError(f"a section of {num_symbols} symbols of {width_bits} bits has {len(data)} bytes")
    stored = torch.from_numpy(data)
    return stored if width_bits == 8 else unpack_bits(stored.view(1, -1), num_symbols, width_bits).view(-1)
