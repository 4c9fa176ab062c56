"""The codecs' kernels as readable torch: exact on every device, the yardstick of every faster form.

All functions are batched over rows (one row per rank), take and return contiguous or strided tensors as said, and do
not wait for a device.

[Note: Chunks] Temporaries are made a chunk of values at a time. A temporary as large as a shard would be fresh memory from
the operating system in every call, and its page faults cost ten times the arithmetic (benchmarks/codecs.py shows it).
Test: test_kernels_reference.py, lengths around a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp_ciera.kernels.formats import FloatFormat, packed_bytes

HASH_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # two independent streams: the first digits of pi after the point
GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio
MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64's finaliser
CHUNK_VALUES = 1 << 17  # a multiple of 8, so that packed bits of a chunk begin at a byte; docs/wire-format.md names it


def chunks_of(num_values: int, chunk_values: int = CHUNK_VALUES) -> Iterator[slice]:
    """The stretches of `chunk_values` values, the last one shorter. See [Note: Chunks]."""
    for start in range(0, num_values, chunk_values):
        yield slice(start, min(start + chunk_values, num_values))


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift: torch has no unsigned 64-bit arithmetic, so the copied sign bits are masked away."""
    return (words >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def splitmix64(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 words (as unsigned). Source: Steele, Lea, Flood, OOPSLA 2014 [paper: 22, 23].

    >>> splitmix64(torch.tensor([0, 1, 2, 3]))[1].item() & 0xFFFFFFFF
    3852341989
    """
    words = (words ^ _shift_right(words, 30)).mul_(_signed(MIX_FACTORS[0]))
    words = (words ^ _shift_right(words, 27)).mul_(_signed(MIX_FACTORS[1]))
    return words ^ _shift_right(words, 31)


def hash_blocks(exponents: torch.Tensor) -> torch.Tensor:
    """128-bit hashes of the exponents of each block (paper 3.1, Algorithm 1: Hash).

    uint8 [num_blocks, block_size] (block_size a multiple of 8) -> int64 [num_blocks, 2]. Eight exponents make one
    64-bit word w_j; stream s is mix(sum_j mix(w_j xor (seed_s + (j + 1) * gamma)) xor seed_s) with mix = SplitMix64's
    finaliser. A sum and not a chain, so that words may be hashed in parallel and in any order; as mix is a bijection
    that depends on j, a change of one word always changes both streams, and other changes collide with 2**-128.
    Cost: reads the block once, about 20 integer operations per 8 exponents and stream.
    """
    num_blocks, block_size = exponents.shape
    num_words = block_size // 8
    words = exponents.contiguous().view(torch.int64)
    steps = torch.arange(1, num_words + 1, dtype=torch.int64, device=exponents.device) * _signed(GAMMA)
    hashes = torch.empty(num_blocks, 2, dtype=torch.int64, device=exponents.device)
    for stream, seed in enumerate(HASH_SEEDS):
        keys = steps + _signed(seed)
        for chunk in chunks_of(num_blocks, max(1, CHUNK_VALUES // num_words)):
            hashes[chunk, stream] = splitmix64(splitmix64(words[chunk] ^ keys).sum(dim=1) ^ _signed(seed))
    return hashes


def pack_bits(values: torch.Tensor, width_bits: int) -> torch.Tensor:
    """uint8 [rows, n] of numbers below 2**width_bits -> uint8 [rows, ceil(n * width_bits / 8)], first value lowest.

    Worked example, width 3: values 1, 2, 3, 4 are the bits 100 011 010 001 (last first), so the bytes
    0b11_010_001 = 209 and 0b0000_100_0 = 8.
    """
    rows, num_values = values.shape
    padded = torch.zeros(rows, -(-num_values // 8) * 8, dtype=torch.int64, device=values.device)
    padded[:, :num_values] = values
    shifts = torch.arange(8, dtype=torch.int64, device=values.device) * width_bits
    words = (padded.view(rows, -1, 8) << shifts).sum(dim=2)  # 8 values in the low 8 * width bits of one word
    packed = words.view(torch.uint8).view(rows, -1, 8)[:, :, :width_bits]
    return packed.reshape(rows, -1)[:, : packed_bytes(num_values, width_bits)]


def unpack_bits(packed: torch.Tensor, num_values: int, width_bits: int) -> torch.Tensor:
    """The inverse of `pack_bits`: uint8 [rows, ceil(num_values * width_bits / 8)] -> uint8 [rows, num_values]."""
    rows = packed.shape[0]
    num_words = -(-num_values // 8)
    full = torch.zeros(rows, num_words * width_bits, dtype=torch.uint8, device=packed.device)
    full[:, : packed.shape[1]] = packed
    words = torch.zeros(rows, num_words, 8, dtype=torch.uint8, device=packed.device)
    words[:, :, :width_bits] = full.view(rows, num_words, width_bits)
    shifts = torch.arange(8, dtype=torch.int64, device=packed.device) * width_bits
    values = (words.view(torch.int64) >> shifts).bitwise_and_((1 << width_bits) - 1)
    return values.view(rows, -1)[:, :num_values].to(torch.uint8)


def split_planes(
    values: torch.Tensor, fmt: FloatFormat, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, n] of `fmt.dtype` -> (exponents uint8 [rows, n], remainder uint8 [rows, remainder_bytes(n)]).

    Writes into the two tensors of `out` (rows may be strided) when they are given.

    Worked example, bf16 1.0, -2.0, 0.5, -0.0 = 0x3F80, 0xC000, 0x3F00, 0x8000: exponents 127, 128, 126, 0; remainder
    (mantissa << 1 | sign) 0, 1, 0, 1. The paper's "split" (Algorithm 1).
    """
    rows, num_values = values.shape
    bits = values.contiguous().view(fmt.int_dtype)
    exponents, remainder = out or (
        torch.empty(rows, width, dtype=torch.uint8, device=values.device)
        for width in (num_values, fmt.remainder_bytes(num_values))
    )
    sign_bit = 8 * fmt.item_bytes - 1
    for chunk in chunks_of(num_values):
        part = bits[:, chunk]
        rotated = (part << 1).bitwise_or_((part >> sign_bit).bitwise_and_(1))
        if fmt.remainder_is_low_byte:  # bf16: narrowing copies are vectorised, byte strides are not
            exponents[:, chunk] = part >> 7
            remainder[:, chunk] = rotated
            continue
        planes = rotated.view(torch.uint8).view(rows, -1, fmt.item_bytes)
        low, top = fmt.remainder_slices(num_values, chunk)
        remainder[:, low] = planes[:, :, :-1].reshape(rows, -1)
        exponents[:, chunk] = planes[:, :, -1] >> fmt.top_bits
        if fmt.top_bits:
            remainder[:, top] = pack_bits(planes[:, :, -1] & ((1 << fmt.top_bits) - 1), fmt.top_bits)
    return exponents, remainder


def merge_planes(
    exponents: torch.Tensor, remainder: torch.Tensor, fmt: FloatFormat, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The inverse of `split_planes` (the paper's "merge"): -> values [rows, n] of `fmt.dtype`, bit for bit.

    Writes into `out` [rows, n] (rows may be strided) when it is given.
    """
    rows, num_values = exponents.shape
    if out is None:
        out = torch.empty(rows, num_values, dtype=fmt.dtype, device=exponents.device)
    bits = out.view(fmt.int_dtype)
    sign_bit = 8 * fmt.item_bytes - 1
    for chunk in chunks_of(num_values):
        if fmt.remainder_is_low_byte:
            merged = remainder[:, chunk].to(torch.int16)
            sign = merged << 15
            merged = merged.bitwise_right_shift_(1).bitwise_or_(sign)
            bits[:, chunk] = merged.bitwise_or_(exponents[:, chunk].to(torch.int16).bitwise_left_shift_(7))
            continue
        num_in_chunk = chunk.stop - chunk.start
        planes = torch.empty(rows, num_in_chunk, fmt.item_bytes, dtype=torch.uint8, device=exponents.device)
        low, top = fmt.remainder_slices(num_values, chunk)
        planes[:, :, :-1] = remainder[:, low].reshape(rows, num_in_chunk, -1)
        planes[:, :, -1] = exponents[:, chunk] << fmt.top_bits
        if fmt.top_bits:
            planes[:, :, -1] |= unpack_bits(remainder[:, top], num_in_chunk, fmt.top_bits)
        rotated = planes.view(fmt.int_dtype).view(rows, num_in_chunk)
        bits[:, chunk] = ((rotated >> 1) & ((1 << sign_bit) - 1)) | (rotated << sign_bit)
    return out


def checksum(data: torch.Tensor) -> torch.Tensor:
    """64-bit checksums of the rows of `data` (any dtype, [rows, n]) -> int64 [rows].

    With the bytes as 64-bit words w_j (the last zero-padded): sum_j w_j * (2j + 1) mod 2**64, through SplitMix64. Odd
    factors make every change of one word visible, different ones make swaps visible. It finds damage; it is no defence
    against forgery. Cost: one pass.
    """
    rows = data.shape[0]
    raw = data.contiguous().view(torch.uint8).view(rows, -1)
    num_bytes = raw.shape[1]
    total = torch.zeros(rows, dtype=torch.int64, device=data.device)
    odd = torch.arange(1, 2 * min(CHUNK_VALUES, num_bytes // 8 + 1), 2, dtype=torch.int64, device=data.device)
    for chunk in chunks_of(num_bytes, 8 * CHUNK_VALUES):
        part = raw[:, chunk]
        num_words = -(-part.shape[1] // 8)
        if part.shape[1] % 8 or any(offset % 8 for offset in (part.storage_offset(), part.stride(0))):
            padded = torch.zeros(rows, num_words * 8, dtype=torch.uint8, device=data.device)
            padded[:, : part.shape[1]] = part
            part = padded
        total += (part.view(torch.int64) * (odd[:num_words] + chunk.start // 4)).sum(dim=1)
    return splitmix64(total)
