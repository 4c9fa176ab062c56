"""`value_delta`: which values changed, and by how many units in the last place. A repeat gather sends nothing.

sender    changed = values != own last ones
          payload = positions | changes in ulp, a byte or half a byte each | sign+mantissa and exponents of larger changes
          (positions and changes apart for small and large values, see [Note: Small values change more] in survey.py)
receiver  ValueCache[positions] = moved or replaced;  copy ValueCache (nothing to copy where the output is the cache)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch

from fsdp_ciera.codecs.base import FloatRunCodec, StoredSection
from fsdp_ciera.codecs.moves import escape_of, read_moves, write_moves
from fsdp_ciera.codecs.planes import merge, split
from fsdp_ciera.codecs.positions import most_position_bytes, read_positions, write_positions
from fsdp_ciera.codecs.sections import Coding, SectionWriter, SymbolReader
from fsdp_ciera.codecs.survey import ValueForm, choose_value_form
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.changes import Among, Form, Received, Used
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.memory import Bytes, zeros_tensor
from fsdp_ciera.kernels.reference import chunks_of

_SMALL_SECTIONS = 3  # boundary, positions and moves of small values; empty when all values are taken together


class ValueDelta(FloatRunCodec):
    """Sends the signed distance to the last value among the numbers of its format, for the values that changed.

    Wire, per value: 0.1 to 2 bits in the first gather after an optimizer step, 0 in the next ones. Memory: the own shard
    and every peer's once more, in the gathered dtype (2 bytes a value of bf16). Exact for every bit pattern: distances
    are taken between bit patterns in the order of the numbers, and wrap around. A distance too large for
    its symbol travels as the value itself, a *literal*.
    """

    name: ClassVar[str] = "value_delta"
    num_sections: ClassVar[int] = 7
    can_decode_in_place: ClassVar[bool] = True

    def __init__(self, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> None:
        super().__init__(num_values, dtype, block_size, num_peers)
        self._own: torch.Tensor | None = None  # [num_values]
        self._value_cache: torch.Tensor | None = None  # [num_peers, num_values]

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Own values and ValueCache."""
        return (num_peers + 1) * num_values * dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """None: where nothing changed, nothing travels."""
        return 0

    @property
    def most_section_bytes(self) -> int:
        """The boundary, two lists of positions and moves, at most a byte a move, and every value as a literal."""
        literal_bytes = self.format.remainder_bytes(self.num_values) + self.num_values
        return 1 + most_position_bytes(self.num_values) + 1 + self.num_values + literal_bytes

    def compress(self, values: torch.Tensor, fixed: torch.Tensor, sections: SectionWriter) -> None:
        """Cmp."""
        if self._own is None:
            self._own = zeros_tensor((self.num_values,), self.dtype)
            form = ValueForm(Coding.ALL)
        else:
            form = choose_value_form(values, self._own, self.format)
        if form.coding == Coding.PLAIN:
            self._compress_sparse(values, self._own, form, sections)
            return
        for _ in range(_SMALL_SECTIONS):
            sections.empty()
        sections.empty(form.coding)
        if form.coding == Coding.DENSE:
            everywhere = Form(form.escape, everywhere=True)
            found = kernels_of(values).find_changes(values, self._own, self.format, everywhere)
            write_moves(sections, found.moves.numpy(), form.escape)
            write_literals(sections, found.literals.view(self.dtype), self.format)
        else:
            sections.empty()
            write_literals(sections, values, self.format)
            _copy(values, self._own)

    def _compress_sparse(
        self, values: torch.Tensor, own: torch.Tensor, form: ValueForm, sections: SectionWriter
    ) -> None:
        """Positions, moves and literals of the values that changed; one pass over values and own."""
        num_values = self.num_values
        found = kernels_of(values).find_changes(
            values, own, self.format, Form(form.escape, boundary=form.boundary, small_escape=form.small_escape)
        )
        bits, small = found.changed, found.small
        assert bits is not None
        if small is None:
            for _ in range(_SMALL_SECTIONS):
                sections.empty()
            write_positions(sections, bits, num_values, len(found.moves))
        else:
            sections.reserve(1)[:] = form.boundary
            write_positions(
                sections, bits, num_values, len(found.small_moves), Among(small, flip=False), found.num_small
            )
            write_moves(sections, found.small_moves.numpy(), form.small_escape)
            num_large = num_values - found.num_small
            write_positions(sections, bits, num_values, len(found.moves), Among(small, flip=True), num_large)
        write_moves(sections, found.moves.numpy(), form.escape)
        write_literals(sections, found.literals.view(self.dtype), self.format)

    def prepare(self) -> None:
        """PreDecmp: the cache, on first use."""
        if self._value_cache is None and not self.is_in_place:
            self._value_cache = zeros_tensor((self.num_peers, self.num_values), self.dtype)

    def decompress(
        self, first_peer: int, fixed: torch.Tensor, sections: Sequence[Sequence[StoredSection]], out: torch.Tensor
    ) -> None:
        """Decmp."""
        caches = out
        if not self.is_in_place:
            assert self._value_cache is not None
            caches = self._value_cache[first_peer : first_peer + len(sections)]
        for row, received, into in zip(caches, sections, out, strict=True):
            where, *_, remainders, exponents = received[_SMALL_SECTIONS:]
            if all(one.coding == Coding.PLAIN and not len(one.data) for one in received):
                self._hand_on(row, into)
            elif where.coding == Coding.ALL:
                for one in received[:_SMALL_SECTIONS]:
                    one.check_nothing()
                where.check_empty()
                received[_SMALL_SECTIONS + 1].check_nothing()
                read_literals(remainders, exponents, self.format, row)
                self._hand_on(row, into)
            else:
                self._move(row, received, into)

    def _hand_on(self, row: torch.Tensor, out: torch.Tensor) -> None:
        if not self.is_in_place:
            _copy(row, out)

    def _move(self, row: torch.Tensor, received: Sequence[StoredSection], out: torch.Tensor) -> None:
        """Applies moves and literals to the values of one peer [num_values], and copies all to `out` unless that is `row`."""
        boundary, where_small, what_small, where, what, remainders, exponents = received
        fmt, num_values = self.format, self.num_values
        small_bits, small_moves = None, np.empty(0, np.uint8)
        if len(boundary.data):
            small_bits, num_small_moves = read_positions(where_small, num_values, num_values_is_most=True)
            small_moves = read_moves(what_small, num_small_moves)
        else:
            for one in (boundary, where_small, what_small):
                one.check_nothing()
        bits, num_moves = None, num_values
        if where.coding == Coding.DENSE:
            boundary.check_nothing()
            where.check_empty()
        else:
            bits, num_moves = read_positions(where, num_values, num_values_is_most=small_bits is not None)
        moves = read_moves(what, num_moves)
        form = Form(
            escape_of(what),
            everywhere=bits is None,
            boundary=0 if small_bits is None else _boundary_of(boundary, fmt),
            small_escape=escape_of(what_small),
        )
        literals = _all_literals(remainders, exponents, fmt, num_values)
        num_escapes = np.count_nonzero(moves == form.escape) + np.count_nonzero(small_moves == form.small_escape)
        if num_escapes != len(literals):
            raise CieraDecodeError(f"moves ask for {num_escapes} literals, and there are {len(literals)}")
        changes = Received(form, bits, small_bits, torch.from_numpy(small_moves), torch.from_numpy(moves), literals)
        used = kernels_of(row).apply_changes(row, fmt, changes, None if self.is_in_place else out)
        if used != Used(used.num_small, len(small_moves), len(moves), len(literals)):
            raise CieraDecodeError(f"changes lie behind the last of {used.num_small} small values, or of the others")
        for section, size in ((where_small, used.num_small), (where, num_values - used.num_small)):
            if small_bits is not None:
                _check_bitmap_size(section, size)

    def forget(self) -> None:
        """Empties both caches."""
        self._own = self._value_cache = None


def _boundary_of(section: StoredSection, fmt: FloatFormat) -> int:
    if section.coding != Coding.PLAIN or len(section.data) != 1 or not 0 < section.data[0] < 1 << fmt.exponent_bits:
        raise CieraDecodeError(f"a section of {len(section.data)} bytes is no exponent between small and large values")
    return int(section.data[0])


def _check_bitmap_size(section: StoredSection, num_values: int) -> None:
    """How many values a class has is known only once they were looked at; gaps that lead out of it are found by then."""
    if section.coding == Coding.BITMAP and len(section.data) != packed_bytes(num_values, 1):
        raise CieraDecodeError(f"a bitmap of {len(section.data)} bytes stands where {num_values} values belong")


def write_literals(sections: SectionWriter, values: torch.Tensor, fmt: FloatFormat) -> None:
    """Two sections of values [n]: their remainders, plain, and their exponents."""
    plane = torch.from_numpy(sections.reserve(fmt.remainder_bytes(len(values))))

    def exponents() -> Iterator[Bytes]:
        return (part.numpy() for _, part in split(values, fmt, plane))

    sections.code(exponents, len(values), fmt.exponent_bits)


def read_literals(remainders: StoredSection, exponents: StoredSection, fmt: FloatFormat, out: torch.Tensor) -> None:
    """The inverse: fills `out` [n]. Raises `CieraDecodeError` unless the sections hold n literals."""
    if remainders.coding != Coding.PLAIN or len(remainders.data) != fmt.remainder_bytes(len(out)):
        raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders stand where {len(out)} values belong")
    reader = SymbolReader(exponents, len(out), symbol_bits=fmt.exponent_bits)
    plane = torch.from_numpy(remainders.data)
    for chunk in chunks_of(len(out)):
        merge(torch.from_numpy(reader.read(chunk.stop - chunk.start)), plane, fmt, len(out), chunk, out[chunk])
    reader.finish()


def _all_literals(remainders: StoredSection, exponents: StoredSection, fmt: FloatFormat, most: int) -> torch.Tensor:
    """As many literals as there are, [at most `most`]."""
    count = fmt.num_values_of(len(remainders.data))
    if count is None or count > most:
        raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders belong to no number of literals")
    literals = torch.empty(count, dtype=fmt.dtype)
    read_literals(remainders, exponents, fmt, literals)
    return literals


def _copy(values: torch.Tensor, out: torch.Tensor) -> None:
    """As integers: copies of floats may quiet signalling NaNs on some devices."""
    integers = FORMATS[values.dtype].int_dtype
    out.view(integers).copy_(values.view(integers))
