"""Packed numbers of a few bits, on the host: what `reference.pack_bits` and `unpack_bits` do, eight values in a word."""

from __future__ import annotations

import numpy as np

from fsdp_ciera.kernels.formats import packed_bytes
from fsdp_ciera.kernels.memory import Bytes


def pack_bits(values: Bytes, width_bits: int) -> Bytes:
    """uint8 [..., n] below 2**width_bits -> uint8 [..., ceil(n * width_bits / 8)], first value lowest.

    Cost: a few passes over n bytes.
    """
    if width_bits == 1:
        return np.packbits(values, axis=-1, bitorder="little")
    num_values = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-num_values // 8) * 8), np.uint8)
    padded[..., :num_values] = values
    words = padded.view("<u8")
    for field_bits in (8, 16, 32):  # two fields become one, their gaps close
        low = _fields(field_bits, 2 * field_bits)
        words = (words & low) | ((words & ~low) >> _word(field_bits - width_bits * field_bits // 8))
    packed = words.view(np.uint8).reshape(*words.shape, 8)[..., :width_bits]
    return packed.reshape(*values.shape[:-1], -1)[..., : packed_bytes(num_values, width_bits)]


def unpack_bits(packed: Bytes, num_values: int, width_bits: int) -> Bytes:
    """The inverse of `pack_bits`: uint8 [..., ceil(num_values * width_bits / 8)] -> uint8 [..., num_values]."""
    if width_bits == 1:
        return np.unpackbits(packed, axis=-1, count=num_values, bitorder="little")
    num_words = -(-num_values // 8)
    full = np.zeros((*packed.shape[:-1], num_words * width_bits), np.uint8)
    full[..., : packed.shape[-1]] = packed
    spread = np.zeros((*packed.shape[:-1], num_words, 8), np.uint8)
    spread[..., :width_bits] = full.reshape(*packed.shape[:-1], num_words, width_bits)
    words = spread.view("<u8")
    for field_bits in (32, 16, 8):  # one field becomes two
        used_bits = width_bits * field_bits // 8
        low = _fields(used_bits, 2 * field_bits)
        words = (words & low) | ((words & (low << _word(used_bits))) << _word(field_bits - used_bits))
    return words.view(np.uint8).reshape(*packed.shape[:-1], -1)[..., :num_values]


def _word(number: int) -> np.uint64:
    return np.uint64(number)


def _fields(used_bits: int, field_bits: int) -> np.uint64:
    """A word of fields of `field_bits` bits, with the lowest `used_bits` of each set."""
    return np.uint64(sum(((1 << used_bits) - 1) << start for start in range(0, 64, field_bits)))


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
