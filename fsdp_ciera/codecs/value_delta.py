"""`value_delta`: which values changed, and by how many units in the last place. A repeat gather sends nothing.

sender    changed = values != own last ones
          payload = positions | change in ulp, one byte each | exponents and remainders of larger changes
receiver  ValueCache[positions] = moved or replaced;  copy ValueCache
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.entropy import Coding, Section, code_section, decode_section
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.reference import merge_planes, split_planes
from fsdp_ciera.positions import code_positions, decode_positions, is_all

_ESCAPE = 255  # a change that does not fit into a byte: the value itself travels
_MOST_CHANGED = 0.5  # above this share, positions cost more than they save


class ValueDelta(FloatRunCodec):
    """Sends the signed distance to the last value among the numbers of its format, for the values that changed.

    Wire, per value: 0.1 to 2 bits in the first gather after an optimizer step, 0 in the next ones. Memory: the own shard
    and every peer's once more, in the gathered dtype (2 bytes a value of bf16). Exact for every bit pattern: distances
    are taken between bit patterns in the order of the numbers, and wrap around.
    """

    name: ClassVar[str] = "value_delta"
    num_sections: ClassVar[int] = 4

    def __init__(self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> None:
        super().__init__(num_values, dtype, block_size, num_peers)
        self._own: torch.Tensor | None = None  # bits [num_values]
        self._value_cache: torch.Tensor | None = None  # bits [num_peers, num_values]

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Own values and ValueCache."""
        return (num_peers + 1) * num_values * dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """None: where nothing changed, nothing travels."""
        return 0

    def compress(self, values: torch.Tensor, fixed: torch.Tensor) -> Sequence[Section]:
        """Cmp."""
        bits = values.view(self.format.int_dtype)
        last = self._own
        if last is None:
            self._own = bits.clone()
            return Section(Coding.ALL, b""), _empty(), *self._code_literals(bits)
        positions = (bits != last).nonzero().view(-1)
        if len(positions) > _MOST_CHANGED * self.num_values:
            last.copy_(bits)
            return Section(Coding.ALL, b""), _empty(), *self._code_literals(bits)
        fresh = bits[positions]
        zigzag = _zigzag(_ordered(fresh) - _ordered(last[positions]))
        fits = (zigzag >= 0) & (zigzag < _ESCAPE)
        last[positions] = fresh
        symbols = torch.where(fits, zigzag, zigzag.new_tensor(_ESCAPE)).to(torch.uint8)
        return code_positions(positions), code_section(symbols), *self._code_literals(fresh[~fits])

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._value_cache is None:
            shape = (self.num_peers, self.num_values)
            self._value_cache = torch.zeros(shape, dtype=self.format.int_dtype)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        assert self._value_cache is not None
        cache = self._value_cache[first_peer : first_peer + len(sections)]
        for peer, (where, moves, exponents, remainders) in enumerate(sections):
            if is_all(where):
                cache[peer] = self._decode_literals(exponents, remainders, self.num_values)
                continue
            positions = decode_positions(where, self.num_values)
            if not len(positions):
                continue
            symbols = decode_section(moves.coding, moves.data, len(positions))
            fresh = _ordered(_ordered(cache[peer][positions]) + _unzigzag(symbols.to(self.format.int_dtype)))
            literal = symbols == _ESCAPE
            num_literals = int(literal.sum())
            if num_literals:
                fresh[literal] = self._decode_literals(exponents, remainders, num_literals)
            cache[peer][positions] = fresh
        out.view(self.format.int_dtype).copy_(cache)

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._value_cache = None

    def _code_literals(self, bits: torch.Tensor) -> tuple[Section, Section]:
        if not len(bits):
            return _empty(), _empty()
        exponents, remainder = split_planes(bits.view(1, -1).view(self.dtype), self.format)
        return code_section(exponents[0], self.format.exponent_bits), Section(Coding.PLAIN, remainder[0])

    def _decode_literals(self, exponents: StoredSection, remainders: StoredSection, num_values: int) -> torch.Tensor:
        if len(remainders.data) != self.format.remainder_bytes(num_values) or remainders.coding != Coding.PLAIN:
            raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders stand where {num_values} values belong")
        decoded = decode_section(exponents.coding, exponents.data, num_values, self.format.exponent_bits)
        remainder = torch.from_numpy(remainders.data)
        return merge_planes(decoded.view(1, -1), remainder.view(1, -1), self.format)[0].view(self.format.int_dtype)


def _empty() -> Section:
    return Section(Coding.PLAIN, b"")


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Bit patterns of floats <-> integers in the order of the numbers (its own inverse): the lower bits of negatives flip."""
    num_bits = 8 * bits.element_size()
    return bits ^ ((bits >> (num_bits - 1)) & ((1 << (num_bits - 1)) - 1))


def _zigzag(change: torch.Tensor) -> torch.Tensor:
    """0, -1, 1, -2, ... -> 0, 1, 2, 3, ...; wraps, so large changes may come out negative."""
    return (change << 1) ^ (change >> (8 * change.element_size() - 1))


def _unzigzag(symbols: torch.Tensor) -> torch.Tensor:
    """The inverse of `_zigzag` for numbers of a byte."""
    return (symbols >> 1) ^ -(symbols & 1)
