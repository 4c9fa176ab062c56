"""The kernels as readable torch: exact on every device, the yardstick of every faster form.

Each function has its twin in native/*.cuh, with the same worked example.

[Note: Chunks] Temporaries are made a chunk of values at a time. A temporary as large as a shard would be fresh memory from
the operating system in every call, and its page faults cost ten times the arithmetic (benchmarks/codecs.py shows it).
Test: test_kernels_reference.py, lengths around a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp_ciera.kernels.changes import Among, Changes, Form, Received, Used
from fsdp_ciera.kernels.formats import FloatFormat, packed_bytes

HASH_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # two independent streams: the first digits of pi after the point
GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio
MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64's finaliser
CHUNK_VALUES = 1 << 17  # a multiple of 64, so that bits of a chunk begin at a word; docs/wire-format.md names it
GAP_ESCAPE = 255
reads_in_sequence = True
"""See dispatch.Kernels."""


def chunks_of(num_values: int, chunk_values: int = CHUNK_VALUES) -> Iterator[slice]:
    """The stretches of `chunk_values` values, the last one shorter. See [Note: Chunks]."""
    for start in range(0, num_values, chunk_values):
        yield slice(start, min(start + chunk_values, num_values))


# ---- hash and checksum


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
    269157861
    """
    words = (words ^ _shift_right(words, 30)).mul_(_signed(MIX_FACTORS[0]))
    words = (words ^ _shift_right(words, 27)).mul_(_signed(MIX_FACTORS[1]))
    return words ^ _shift_right(words, 31)


def hash_blocks(values: torch.Tensor, fmt: FloatFormat, block_size: int) -> torch.Tensor:
    """128-bit hashes of the exponents of each block of values [n] (paper 3.1, Algorithm 1: Hash) -> int64 [num_blocks, 2].

    `block_size` is a multiple of 8; behind the last value exponents are 0. Eight exponents make one 64-bit word w_j; stream
    s is mix(sum_j mix(w_j xor (seed_s + (j + 1) * gamma)) xor seed_s) with mix = SplitMix64's
    finaliser. A sum and not a chain, so that words may be hashed in parallel and in any order; as mix is a bijection
    that depends on j, a change of one word always changes both streams, and other changes collide with 2**-128.
    Cost: reads the values once, about 20 integer operations per 8 exponents and stream.

    Worked example, one block of eight bf16 values 1.0, -2.0, 0.5, -0.0, 0, 0, 0, 0: exponents 127, 128, 126, 0, ..., so
    w_0 = 0x7e807f, and the hash is 0x6d9c5c8c2291ef39, 0xe55b79bfe0eba6f6.
    """
    num_blocks, num_words = -(-len(values) // block_size), block_size // 8
    steps = torch.arange(1, num_words + 1, dtype=torch.int64, device=values.device) * _signed(GAMMA)
    keys = [steps + _signed(seed) for seed in HASH_SEEDS]
    hashes = torch.empty(num_blocks, 2, dtype=torch.int64, device=values.device)
    for blocks in chunks_of(num_blocks, max(1, CHUNK_VALUES // block_size)):
        part = values[blocks.start * block_size : blocks.stop * block_size]
        exponents = torch.zeros((blocks.stop - blocks.start) * block_size, dtype=torch.uint8, device=values.device)
        split_planes(part, fmt, exponents[: len(part)])
        words = exponents.view(torch.int64).view(-1, num_words)
        for stream, (key, seed) in enumerate(zip(keys, HASH_SEEDS, strict=True)):
            hashes[blocks, stream] = splitmix64(splitmix64(words ^ key).sum(dim=1) ^ _signed(seed))
    return hashes


def checksum(data: torch.Tensor) -> torch.Tensor:
    """64-bit checksums of the rows of `data` (any dtype, [rows, n]) -> int64 [rows].

    With the bytes as 64-bit words w_j (the last zero-padded): mix(sum_j mix(w_j xor (j + 1) * gamma)), sums mod 2**64 and
    mix = SplitMix64's finaliser. A bijection for each place, so that every change of one word is visible, and others
    collide with about 2**-64: words are mixed before they are added, since in a sum of multiples two
    flipped signs cancel. It finds damage; it is no defence against forgery. Cost: one pass, 8 operations a word.

    Worked example: bytes 1, 2, 3, 4 are the one word 0x04030201, and the checksum is 0xf16840c310650e2a.
    """
    rows = data.shape[0]
    raw = data.contiguous().view(torch.uint8).view(rows, -1)
    num_bytes = raw.shape[1]
    total = torch.zeros(rows, dtype=torch.int64, device=data.device)
    numbers = torch.arange(1, min(CHUNK_VALUES, num_bytes // 8 + 1) + 1, dtype=torch.int64, device=data.device)
    for chunk in chunks_of(num_bytes, 8 * CHUNK_VALUES):
        part = raw[:, chunk]
        num_words = -(-part.shape[1] // 8)
        if part.shape[1] % 8 or any(offset % 8 for offset in (part.storage_offset(), part.stride(0))):
            padded = torch.zeros(rows, num_words * 8, dtype=torch.uint8, device=data.device)
            padded[:, : part.shape[1]] = part
            part = padded
        keys = (numbers[:num_words] + chunk.start // 8) * _signed(GAMMA)
        total += splitmix64(part.view(torch.int64) ^ keys).sum(dim=1)
    return splitmix64(total)


# ---- planes


def pack_bits(values: torch.Tensor, width_bits: int) -> torch.Tensor:
    """uint8 [n] of numbers below 2**width_bits -> uint8 [ceil(n * width_bits / 8)], first value lowest.

    Worked example, width 3: values 1, 2, 3, 4 are the bits 100 011 010 001 (last first), so the bytes
    0b11_010_001 = 209 and 0b0000_100_0 = 8.
    """
    padded = torch.zeros(-(-len(values) // 8) * 8, dtype=torch.uint8, device=values.device)
    padded[: len(values)] = values
    shifts = torch.arange(8, device=values.device) * width_bits
    if width_bits == 1:
        return (padded.view(-1, 8) << shifts.to(torch.uint8)).sum(dim=1, dtype=torch.uint8)
    words = (padded.view(-1, 8).to(torch.int64) << shifts).sum(dim=1)  # 8 values in the low 8 * width bits of one word
    packed = words.view(torch.uint8).view(-1, 8)[:, :width_bits]
    return packed.reshape(-1)[: packed_bytes(len(values), width_bits)]


def unpack_bits(packed: torch.Tensor, num_values: int, width_bits: int) -> torch.Tensor:
    """The inverse of `pack_bits`: uint8 [ceil(num_values * width_bits / 8)] -> uint8 [num_values]."""
    shifts = torch.arange(8, device=packed.device) * width_bits
    if width_bits == 1:
        return (packed[:, None] >> shifts.to(torch.uint8)).bitwise_and_(1).view(-1)[:num_values]
    full = torch.zeros(-(-num_values // 8) * width_bits, dtype=torch.uint8, device=packed.device)
    full[: len(packed)] = packed
    words = torch.zeros(-(-num_values // 8), 8, dtype=torch.uint8, device=packed.device)
    words[:, :width_bits] = full.view(-1, width_bits)
    values = (words.view(torch.int64) >> shifts).bitwise_and_((1 << width_bits) - 1)
    return values.view(-1)[:num_values].to(torch.uint8)


def split_planes(
    values: torch.Tensor,
    fmt: FloatFormat,
    exponents: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
) -> None:
    """Values [n] of `fmt.dtype` -> exponents uint8 [n], low uint8 [n * low_bytes], top uint8 [ceil(n * top_bits / 8)].

    Writes what is given (the paper's "split", Algorithm 1).

    Worked example, bf16 1.0, -2.0, 0.5, -0.0 = 0x3F80, 0xC000, 0x3F00, 0x8000: exponents 127, 128, 126, 0; low bytes
    (mantissa << 1 | sign) 0, 1, 0, 1; no top bits.
    """
    bits = values.view(fmt.int_dtype)
    for chunk in chunks_of(len(values)):
        part = bits[chunk]
        if exponents is not None:
            exponents[chunk] = (part >> fmt.mantissa_bits).bitwise_and_((1 << fmt.exponent_bits) - 1)
        if low is None:
            continue
        rotated = (part << 1).bitwise_or_((part >> fmt.sign_bit).bitwise_and_(1))
        if fmt.low_bytes == 1:  # narrowing copies are vectorised, byte strides are not
            low[chunk] = rotated
        else:
            low.view(-1, fmt.low_bytes)[chunk] = rotated.view(torch.uint8).view(-1, fmt.item_bytes)[:, :-1]
        if fmt.top_bits and top is not None:
            numbers = (rotated >> 8 * fmt.low_bytes).bitwise_and_((1 << fmt.top_bits) - 1).to(torch.uint8)
            start = packed_bytes(chunk.start, fmt.top_bits)
            packed = pack_bits(numbers, fmt.top_bits)
            top[start : start + len(packed)] = packed


def merge_planes(
    exponents: torch.Tensor, low: torch.Tensor, top: torch.Tensor | None, fmt: FloatFormat, out: torch.Tensor
) -> None:
    """The inverse of `split_planes` (the paper's "merge") -> `out` [n] of `fmt.dtype`, bit for bit."""
    bits = out.view(fmt.int_dtype)
    for chunk in chunks_of(len(exponents)):
        num_in_chunk = chunk.stop - chunk.start
        if fmt.low_bytes == 1:
            rotated = low[chunk].to(fmt.int_dtype)
        else:
            planes = torch.zeros(num_in_chunk, fmt.item_bytes, dtype=torch.uint8, device=exponents.device)
            planes[:, :-1] = low.view(-1, fmt.low_bytes)[chunk]
            rotated = planes.view(fmt.int_dtype).view(-1)
        rotated |= exponents[chunk].to(fmt.int_dtype) << (8 * fmt.item_bytes - fmt.exponent_bits)
        if fmt.top_bits and top is not None:
            start = packed_bytes(chunk.start, fmt.top_bits)
            numbers = unpack_bits(
                top[start : start + packed_bytes(num_in_chunk, fmt.top_bits)], num_in_chunk, fmt.top_bits
            )
            rotated |= numbers.to(fmt.int_dtype) << 8 * fmt.low_bytes
        bits[chunk] = (rotated >> 1).bitwise_and_((1 << fmt.sign_bit) - 1) | rotated << fmt.sign_bit


# ---- changes


def _integers(words: torch.Tensor) -> torch.Tensor:
    """The bit patterns of values, as integers; a view."""
    return words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[words.element_size()])


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Bit patterns <-> integers in the order of the numbers (its own inverse): the lower bits of negatives flip."""
    bits = 8 * words.element_size() - 1
    return words ^ ((words >> bits) & ((1 << bits) - 1))


def _symbols(fresh: torch.Tensor, last: torch.Tensor, escape: int) -> torch.Tensor:
    """Integers [n] and [n] -> moves uint8 [n]. See changes.py."""
    if fresh.dtype == torch.uint8:
        return fresh - last
    moved = _in_order(fresh) - _in_order(last)
    zigzag = (moved << 1) ^ (moved >> (8 * moved.element_size() - 1))
    return torch.where((zigzag >= 0) & (zigzag < escape), zigzag, escape).to(torch.uint8)


def _moved(last: torch.Tensor, symbols: torch.Tensor) -> torch.Tensor:
    """The inverse; of an escape it is no value worth having."""
    if last.dtype == torch.uint8:
        return last + symbols
    numbers = symbols.to(last.dtype)
    return _in_order(_in_order(last) + ((numbers >> 1) ^ -(numbers & 1)))


def is_small(values: torch.Tensor, fmt: FloatFormat, boundary: int) -> torch.Tensor:
    """Values [n] -> bool [n]: whether the exponent is below `boundary`."""
    exponents = (_integers(values) >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    return exponents < boundary


def find_changes(fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, form: Form) -> Changes:
    """Values [n] against `last` [n]; neither is written. `fmt` is `None` for bytes (exponents).

    Cost: one pass over both. Memory: the result; its moves and literals may be views of room for n.

    Worked example, bf16, escape 15: last 1.0, -2.0, 0.5, 0.0 = 0x3F80, 0xC000, 0x3F00, 0x0000, fresh 0x3F81, 0xC000,
    0x3F00, 0x8001. Changed bits 0b1001. The first went up by 1: move 2; the last from 0 down to the first negative denormal
    (in order, -0.0 is -1 and 0x8001 is -2): move 3. Moves 2, 3; no literals. Had the last become 1.0, its move
    would be 15 and 0x3F80 a literal.
    """
    now, before = _integers(fresh), _integers(last)
    num_values = len(now)
    symbols: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # of large and of small values
    literals = [now[:0]]
    changed, small = (torch.zeros(packed_bytes(num_values, 1), dtype=torch.uint8, device=now.device) for _ in range(2))
    num_small = 0
    for chunk in chunks_of(num_values):
        one, other = now[chunk], before[chunk]
        chosen = torch.ones_like(one, dtype=torch.bool) if form.everywhere else one != other
        is_of_class = [torch.ones_like(chosen)]
        packed = slice(chunk.start // 8, chunk.start // 8 + packed_bytes(len(one), 1))
        changed[packed] = pack_bits(chosen.view(torch.uint8), 1)
        if form.boundary:
            assert fmt is not None
            of_small = is_small(other, fmt, form.boundary)
            small[packed] = pack_bits(of_small.view(torch.uint8), 1)
            num_small += int(of_small.sum())
            is_of_class = [~of_small, of_small]
        for of_class, moves, escape in reversed(
            list(zip(is_of_class, symbols, (form.escape, form.small_escape), strict=False))
        ):
            places = (chosen & of_class).nonzero().view(-1)
            found = _symbols(one[places], other[places], escape)
            moves.append(found)
            if fmt is not None:
                literals.append(one[places][found == escape])
    empty = torch.empty(0, dtype=torch.uint8, device=now.device)
    large_moves, small_moves = (torch.cat(moves) if moves else empty for moves in symbols)
    return Changes(
        None if form.everywhere else changed,
        small if form.boundary else None,
        num_small,
        small_moves,
        large_moves,
        torch.cat(literals),
    )


def find_exponent_changes(
    values: torch.Tensor, last: torch.Tensor, fmt: FloatFormat, everywhere: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Values [n] whose exponents were `last`, uint8 [n] -> which exponents changed, as a bitmap, and their moves, uint8 each.

    With `everywhere` no bitmap, and a move for every value. Cost: one pass over both.

    Worked example, bf16 1.0, -2.0, 0.5, -0.0 with exponents 127, 128, 126, 0, last 127, 127, 126, 2: bits 0b1010, moves 1, 254.
    """
    exponents = torch.empty(len(values), dtype=torch.uint8, device=values.device)
    split_planes(values, fmt, exponents)
    found = find_changes(exponents, last, None, Form(everywhere=everywhere))
    return found.changed, found.moves


def apply_changes(
    values: torch.Tensor, fmt: FloatFormat | None, received: Received, out: torch.Tensor | None = None
) -> Used:
    """The inverse of `find_changes`, on the last values [n], in place; also copies all of them to `out` [n], where given.

    Cost: one pass. See `Received` for what must hold.
    """
    words, form = _integers(values), received.form
    lasts = [0, 0]  # how many bits of each class were read
    used = [0, 0]  # how many moves of each class
    num_literals = 0
    for chunk in chunks_of(len(words)):
        part = words[chunk]
        classes = [(torch.ones_like(part, dtype=torch.bool), received.bits, received.moves, form.escape)]
        if form.boundary:
            assert fmt is not None
            small = is_small(part, fmt, form.boundary)
            classes = [
                (~small, received.bits, received.moves, form.escape),
                (small, received.small_bits, received.small_moves, form.small_escape),
            ]
        fresh = part.clone()
        for number, (of_class, bits, moves, escape) in reversed(list(enumerate(classes))):
            places = of_class.nonzero().view(-1)
            if bits is not None:
                places = places[_bits_between(bits, lasts[number], len(places))]
            lasts[number] += int(of_class.sum())
            symbols = moves[used[number] : used[number] + len(places)]
            used[number] += len(places)
            moved = _moved(part[places], symbols)
            if fmt is not None:
                is_literal = symbols == escape
                count = int(is_literal.sum())
                moved[is_literal] = _integers(received.literals)[num_literals : num_literals + count]
                num_literals += count
            fresh[places] = moved
        words[chunk] = fresh
    if out is not None:
        _integers(out).copy_(words)
    return Used(lasts[1], used[1], used[0], num_literals)


def _bits_between(bits: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """-> bool [count] from bit `first` on; zeros behind the end."""
    start = first // 8
    chosen = unpack_bits(bits[start : (first + count + 7) // 8], 8 * len(bits), 1)[first % 8 :][:count]
    padded = torch.zeros(count, dtype=torch.bool, device=bits.device)
    padded[: len(chosen)] = chosen
    return padded


# ---- bitmaps


def count_bits(bits: torch.Tensor, num_values: int) -> int:
    """uint8 [ceil(num_values / 8)] -> how many of its first `num_values` bits are set."""
    return sum(int(_bits_between(bits, chunk.start, chunk.stop - chunk.start).sum()) for chunk in chunks_of(num_values))


def gather_bits(bits: torch.Tensor, num_values: int, among: Among) -> torch.Tensor:
    """The bits of some of the values, uint8 [ceil(num_values / 8)], side by side -> uint8 [ceil(how many / 8)].

    Worked example: bits 1, 0, 1, 1 among 1, 0, 0, 1 are 1, 1; flipped 0, 1.
    """
    return pack_bits(_bits_among(bits, num_values, among), 1)


def _bits_among(bits: torch.Tensor, num_values: int, among: Among) -> torch.Tensor:
    chosen = unpack_bits(among.small, num_values, 1).view(torch.bool) ^ among.flip
    return unpack_bits(bits, num_values, 1)[chosen]


def gaps_of_bits(bits: torch.Tensor, num_values: int, among: Among | None = None) -> torch.Tensor:
    """The number of clear bits before each set one, uint8 each; a symbol 255 only moves on by 255.

    `bits` is uint8 [ceil(num_values / 8)]; with `among`, only its values count.

    Worked example: bits 2, 3 and 300 of 400 have gaps 2, 0, 296, and 296 = 255 + 41, so the symbols 2, 0, 255, 41.
    """
    mask = unpack_bits(bits, num_values, 1) if among is None else _bits_among(bits, num_values, among)
    positions = mask.nonzero().view(-1)
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    num_escapes = gaps // GAP_ESCAPE
    ends = (num_escapes + 1).cumsum(0) - 1  # where each gap's last symbol stands
    symbols = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), GAP_ESCAPE, dtype=torch.uint8, device=bits.device)
    symbols[ends] = (gaps - num_escapes * GAP_ESCAPE).to(torch.uint8)
    return symbols


def bits_of_gaps(gaps: torch.Tensor, num_values: int) -> torch.Tensor | None:
    """The inverse -> uint8 [ceil(num_values / 8)]; `None` for what are no gaps of `num_values` values."""
    ends_open = len(gaps) > 0 and int(gaps[-1]) == GAP_ESCAPE
    is_last = gaps != GAP_ESCAPE
    positions = (gaps.to(torch.int64) + is_last).cumsum(0)[is_last] - 1
    if ends_open or (len(positions) and int(positions[-1]) >= num_values):
        return None
    mask = torch.zeros(num_values, dtype=torch.uint8, device=gaps.device)
    mask[positions] = 1
    return pack_bits(mask, 1)
