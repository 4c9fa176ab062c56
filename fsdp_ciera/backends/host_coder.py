"""`HostCoder`: the parts of payloads on CPU. zstd codes what is skewed; changes take the smallest of several forms.

values      boundary, positions and moves of small values (or three empty sections), positions, moves, literals' remainders and
            exponents; see [Note: Small values change more] in codecs/survey.py
exponents   positions and moves, or all exponents
blocks      which blocks changed, and their exponents
symbols     all exponents

A unit is one run here, and peers are decoded one after the other, since every section is read in sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.codecs.base import Unit
from fsdp_ciera.codecs.moves import escape_of, read_moves, write_moves
from fsdp_ciera.codecs.planes import SPLIT_VALUES, merge, split, split_remainder
from fsdp_ciera.codecs.positions import most_position_bytes, read_positions, write_positions
from fsdp_ciera.codecs.sections import Coding, SectionWriter, StoredSection, SymbolReader, check_width
from fsdp_ciera.codecs.survey import ValueForm, choose_exponent_form, choose_value_form
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.kernels.changes import Among, Form, Received, Used
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.memory import Bytes, empty_tensor, zeros_tensor
from fsdp_ciera.kernels.reference import CHUNK_VALUES, chunks_of, pack_bits, unpack_bits

Bools: TypeAlias = npt.NDArray[np.bool_]
NUM_SECTIONS = {"raw": 0, "entropy": 1, "exponent_block": 2, "exponent_delta": 2, "value_delta": 7}
"""The number of sections of a run, by codec."""
_SMALL_SECTIONS = 3  # boundary, positions and moves of small values; empty where all values are taken together


@dataclass(frozen=True)
class PeerParts:
    """The parts of one peer's payload for one unit."""

    rank: int
    """The peer's row in an output."""
    peer: int
    """The peer's row in the state: the number of peers before it."""
    fixed: torch.Tensor
    """uint8 [fixed bytes of the codec]."""
    sections: Sequence[StoredSection]


class HostCoder:
    """See `fsdp_ciera.codecs.base.UnitCoder`. Raises `CieraDecodeError` at once where a payload is damaged."""

    def __init__(self, unit: Unit) -> None:
        assert len(unit.stretches) == 1, "on CPU every run is a unit of its own"
        self.unit = unit
        start, num_values = unit.stretches[0]
        self._in_shard = slice(start, start + num_values)
        self._num_values = num_values
        self._num_blocks = -(-num_values // unit.block_size)
        self._chunk_blocks = max(1, CHUNK_VALUES // unit.block_size)

    @property
    def _format(self) -> FloatFormat:
        return FORMATS[self.unit.dtype]

    @property
    def plane_bytes(self) -> int:
        """Bytes of the sign+mantissa of all values."""
        return self._format.remainder_bytes(self._num_values)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the values as they are."""
        return self._num_values * self.unit.item_bytes

    def num_sections(self, codec: str) -> int:
        """The number of sections that the codec of that name writes here. See the top of this file."""
        return NUM_SECTIONS[codec]

    def most_section_bytes(self, codec: str) -> int:
        """Bytes of the largest possible sections; for `value_delta`, with every value a literal beside two lists of moves."""
        symbols, positions = self._num_values, most_position_bytes(self._num_values)
        if codec == "raw":
            return 0
        if codec == "value_delta":
            return 1 + positions + 1 + symbols + self.plane_bytes + symbols
        return {"entropy": 0, "exponent_block": packed_bytes(self._num_blocks, 1), "exponent_delta": positions}[
            codec
        ] + symbols

    # the fixed part

    def fill_raw(self, values: torch.Tensor, fixed: torch.Tensor) -> None:
        """Copies the values."""
        fixed.copy_(values[self._in_shard].view(torch.uint8))

    def fill_plane(self, values: torch.Tensor, fixed: torch.Tensor, exponents: torch.Tensor | None = None) -> None:
        """Writes the sign+mantissa plane in one pass."""
        split_remainder(values[self._in_shard], self._format, fixed, exponents)

    # state

    def exponent_rows(self, num_rows: int, in_blocks: bool = False) -> torch.Tensor:
        """Makes zeros, which take no memory until they are touched."""
        length = self._num_blocks * self.unit.block_size if in_blocks else self._num_values
        return zeros_tensor((num_rows, length), torch.uint8)

    def value_rows(self) -> torch.Tensor:
        """Makes zeros, which take no memory until they are touched."""
        return zeros_tensor((self.unit.world_size, self._num_values), self.unit.dtype)

    def take_exponents(self, output: torch.Tensor, exponents: torch.Tensor) -> None:
        """Takes all peers' exponents in one pass over their values."""
        for rank, row in self._peers(exponents):
            self.take_own_exponents(output[rank], row)

    def take_own_exponents(self, values: torch.Tensor, exponents: torch.Tensor) -> None:
        """Takes this rank's exponents in one pass over its shard."""
        kernels_of(values).split_planes(values[self._in_shard], self._format, exponents[: self._num_values])

    def take_values(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies all ranks' values out of an output."""
        _integers(rows).copy_(_integers(output[:, self._in_shard]))

    def keep_own_values(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies this rank's values into its row."""
        _integers(rows[self.unit.rank]).copy_(_integers(values[self._in_shard]))

    # symbols

    @property
    def symbol_plane_bytes(self) -> int:
        """Bytes of the plane alone: no part of the exponents has a known size."""
        return self.plane_bytes

    def fill_symbols(self, values: torch.Tensor, fixed: torch.Tensor) -> None:
        """Writes the plane alone."""
        self.fill_plane(values, fixed)

    def write_symbols(self, values: torch.Tensor, sections: SectionWriter) -> None:
        """Adds one section of all exponents."""
        run = values[self._in_shard]

        def exponents() -> Iterator[Bytes]:
            return (part.numpy() for _, part in split(run, self._format))

        sections.code(exponents, self._num_values, self._format.exponent_bits)

    def merge_symbols(self, received: Sequence[PeerParts], output: torch.Tensor) -> None:
        """Decodes and merges exponents piece by piece, while they are in the processor's cache."""
        for parts in received:
            [section], row = parts.sections, output[parts.rank, self._in_shard]
            reader = SymbolReader(section, self._num_values, symbol_bits=self._format.exponent_bits)
            for chunk in chunks_of(self._num_values):
                symbols = torch.from_numpy(reader.read(chunk.stop - chunk.start))
                merge(symbols, parts.fixed, self._format, self._num_values, chunk, row[chunk])
            reader.finish()

    def merge(self, exponents: torch.Tensor, received: Sequence[PeerParts], output: torch.Tensor) -> None:
        """Merges exponents and planes in one pass a peer."""
        whole = slice(0, self._num_values)
        for parts in received:
            row = output[parts.rank, self._in_shard]
            merge(exponents[parts.peer, whole], parts.fixed, self._format, self._num_values, whole, row)

    # blocks

    def hash_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Hashes the exponents of each block in one pass."""
        return kernels_of(values).hash_blocks(values[self._in_shard], self._format, self.unit.block_size)

    def write_blocks(
        self, values: torch.Tensor, hashes: torch.Tensor, last: torch.Tensor | None, sections: SectionWriter
    ) -> tuple[int, int]:
        """Adds the sections of bitmap and exponents. Both are empty where no block changed."""
        run, block_size = values[self._in_shard], self.unit.block_size
        changed = np.ones(self._num_blocks, np.bool_) if last is None else (last != hashes).any(dim=1).numpy()
        num_changed = int(np.count_nonzero(changed))
        if num_changed:
            bits = sections.reserve(packed_bytes(self._num_blocks, 1))
            bits[:] = pack_bits(torch.from_numpy(changed.view(np.uint8)), 1).numpy()
        else:
            sections.empty()

        def symbols() -> Iterator[Bytes]:
            num_blocks = max(1, SPLIT_VALUES // block_size)
            for chunk, exponents in split(run, self._format, chunk_values=num_blocks * block_size):
                first = chunk.start // block_size
                chosen = changed[first : first + num_blocks]
                if chosen.any():
                    yield _of_blocks(exponents.numpy(), chosen, block_size)

        sections.code(symbols, self._num_symbols(changed), self._format.exponent_bits)
        return self._num_blocks, self._num_blocks - num_changed

    def read_blocks(self, received: Sequence[PeerParts], exponents: torch.Tensor) -> None:
        """Replaces the exponents of changed blocks; those behind the last value of the last block are 0."""
        for parts in received:
            bitmap, section = parts.sections
            changed = np.zeros(self._num_blocks, np.bool_)
            if len(bitmap.data) or bitmap.coding != Coding.PLAIN:
                if bitmap.coding != Coding.PLAIN or len(bitmap.data) != packed_bytes(self._num_blocks, 1):
                    raise CieraDecodeError(f"{len(bitmap.data)} bytes are no bitmap of {self._num_blocks} blocks")
                bits = unpack_bits(torch.from_numpy(bitmap.data), self._num_blocks, 1)
                changed = bits.numpy().view(np.bool_)
            self._put_blocks(exponents[parts.peer].numpy(), changed, section)

    def _put_blocks(self, row: Bytes, changed: Bools, section: StoredSection) -> None:
        """Replaces changed blocks of one peer's exponents, uint8 [num_blocks * block_size]; `changed` [num_blocks]."""
        reader = SymbolReader(section, self._num_symbols(changed), symbol_bits=self._format.exponent_bits)
        block_size, in_blocks = self.unit.block_size, row.reshape(self._num_blocks, self.unit.block_size)
        for blocks in chunks_of(self._num_blocks, self._chunk_blocks) if reader.num_symbols else ():
            chosen = changed[blocks]
            num_chosen = int(np.count_nonzero(chosen))
            if num_chosen == len(chosen):
                stop = min(blocks.stop * block_size, self._num_values)
                reader.read_into(row[blocks.start * block_size : stop])
            elif num_chosen:
                num_symbols = min(num_chosen * block_size, reader.num_left)
                fresh = reader.read(num_symbols)
                if num_symbols % block_size:
                    fresh = np.concatenate([fresh, np.zeros(block_size - num_symbols % block_size, np.uint8)])
                in_blocks[blocks][chosen] = fresh.reshape(num_chosen, block_size)
        reader.finish()

    def _num_symbols(self, changed: Bools) -> int:
        """The number of exponents in the changed blocks; the last block may be short."""
        num_changed = int(np.count_nonzero(changed))
        short = self._num_blocks * self.unit.block_size - self._num_values
        return num_changed * self.unit.block_size - (short if num_changed and changed[-1] else 0)

    # changes of exponents

    def write_exponent_changes(self, values: torch.Tensor, last: torch.Tensor | None, sections: SectionWriter) -> None:
        """Adds positions and moves; or no positions and a move for every exponent; or all exponents as they are."""
        run, kernels = values[self._in_shard], kernels_of(values)
        form = Coding.ALL if last is None else choose_exponent_form(run, last, self._format)
        if form == Coding.ALL:
            sections.empty(form)
            self.write_symbols(values, sections)
            return
        assert last is not None
        if form == Coding.DENSE:

            def moves() -> Iterator[Bytes]:
                for chunk in chunks_of(self._num_values):
                    _, symbols = kernels.find_exponent_changes(run[chunk], last[chunk], self._format, everywhere=True)
                    yield symbols.numpy()

            sections.empty(form)
            sections.code(moves, self._num_values)
            return
        bits, symbols = kernels.find_exponent_changes(run, last, self._format)
        assert bits is not None
        write_positions(sections, bits, self._num_values, len(symbols))
        sections.code(lambda: [symbols.numpy()], len(symbols))

    def read_exponent_changes(self, received: Sequence[PeerParts], exponents: torch.Tensor) -> None:
        """Changes the peers' exponents in place."""
        for parts in received:
            (positions, symbols), row = parts.sections, exponents[parts.peer]
            if positions.coding in (Coding.ALL, Coding.DENSE):
                self._replace_exponents(row.numpy(), positions, symbols)
            else:
                self._change_exponents(row, positions, symbols)

    def _replace_exponents(self, row: Bytes, positions: StoredSection, symbols: StoredSection) -> None:
        """Reads all exponents of one peer, as they are or as a move for each."""
        positions.check_empty()
        is_all = positions.coding == Coding.ALL
        reader = SymbolReader(symbols, self._num_values, symbol_bits=self._format.exponent_bits if is_all else 8)
        for chunk in chunks_of(self._num_values):
            if is_all:
                reader.read_into(row[chunk])
            else:
                row[chunk] += reader.read(chunk.stop - chunk.start)
                check_width(row[chunk], self._format.exponent_bits)
        reader.finish()

    def _change_exponents(self, row: torch.Tensor, positions: StoredSection, symbols: StoredSection) -> None:
        bits, num_changed = read_positions(positions, self._num_values)
        moves = torch.from_numpy(SymbolReader(symbols, num_changed).read_all())
        if num_changed:
            no_symbols = moves[:0]
            kernels_of(row).apply_changes(row, None, Received(Form(), bits, None, no_symbols, moves, no_symbols))
            check_width(row.numpy(), self._format.exponent_bits)

    # changes of values

    def write_value_changes(
        self, values: torch.Tensor, rows: torch.Tensor | None, is_flat: bool, sections: SectionWriter
    ) -> None:
        """Adds positions, moves and literals of changed values; or a move for every value; or every value as a literal."""
        run, last = values[self._in_shard], self._own_row(rows, is_flat)
        form = ValueForm(Coding.ALL) if last is None else choose_value_form(run, last, self._format)
        if form.coding == Coding.PLAIN:
            assert last is not None
            self._write_sparse(run, last, form, sections)
            return
        for _ in range(_SMALL_SECTIONS):
            sections.empty()
        sections.empty(form.coding)
        if form.coding == Coding.ALL:
            sections.empty()
            self._write_literals(sections, run)
            return
        assert last is not None
        changes = kernels_of(run).find_changes(run, last, self._format, Form(form.escape, everywhere=True))
        write_moves(sections, changes.moves.numpy(), form.escape)
        self._write_literals(sections, changes.literals.view(self.unit.dtype))

    def _own_row(self, rows: torch.Tensor | None, is_flat: bool) -> torch.Tensor | None:
        if rows is None:
            return None
        return rows[self.unit.rank, self._in_shard] if is_flat else rows[self.unit.rank]

    def _write_sparse(self, run: torch.Tensor, last: torch.Tensor, form: ValueForm, sections: SectionWriter) -> None:
        """Adds positions, moves and literals. Costs one pass over values and last values."""
        num_values = self._num_values
        changes = kernels_of(run).find_changes(
            run, last, self._format, Form(form.escape, boundary=form.boundary, small_escape=form.small_escape)
        )
        bits, small = changes.changed, changes.small
        assert bits is not None
        if small is None:
            for _ in range(_SMALL_SECTIONS):
                sections.empty()
            write_positions(sections, bits, num_values, len(changes.moves))
        else:
            sections.reserve(1)[:] = form.boundary
            write_positions(
                sections, bits, num_values, len(changes.small_moves), Among(small, flip=False), changes.num_small
            )
            write_moves(sections, changes.small_moves.numpy(), form.small_escape)
            num_large = num_values - changes.num_small
            write_positions(sections, bits, num_values, len(changes.moves), Among(small, flip=True), num_large)
        write_moves(sections, changes.moves.numpy(), form.escape)
        self._write_literals(sections, changes.literals.view(self.unit.dtype))

    def _write_literals(self, sections: SectionWriter, values: torch.Tensor) -> None:
        """Adds the sections of the literals' remainders, plain, and of their exponents."""
        plane = torch.from_numpy(sections.reserve(self._format.remainder_bytes(len(values))))

        def exponents() -> Iterator[Bytes]:
            return (part.numpy() for _, part in split(values, self._format, plane))

        sections.code(exponents, len(values), self._format.exponent_bits)

    def read_value_changes(self, received: Sequence[PeerParts], rows: torch.Tensor, is_flat: bool) -> None:
        """Changes the peers' values in place."""
        for parts in received:
            row = rows[parts.rank, self._in_shard] if is_flat else rows[parts.rank]
            positions, moves, remainders, exponents = parts.sections[_SMALL_SECTIONS:]
            if all(section.coding == Coding.PLAIN and not len(section.data) for section in parts.sections):
                continue
            if positions.coding == Coding.ALL:
                for section in (*parts.sections[:_SMALL_SECTIONS], moves):
                    section.check_nothing()
                positions.check_empty()
                self._read_literals(remainders, exponents, row)
            else:
                self._move(row, parts.sections)

    def _read_literals(self, remainders: StoredSection, exponents: StoredSection, out: torch.Tensor) -> None:
        """Fills `out` [n]. Raises `CieraDecodeError` unless the sections hold n literals."""
        fmt = self._format
        if remainders.coding != Coding.PLAIN or len(remainders.data) != fmt.remainder_bytes(len(out)):
            raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders stand where {len(out)} values belong")
        reader = SymbolReader(exponents, len(out), symbol_bits=fmt.exponent_bits)
        plane = torch.from_numpy(remainders.data)
        for chunk in chunks_of(len(out)):
            symbols = torch.from_numpy(reader.read(chunk.stop - chunk.start))
            merge(symbols, plane, fmt, len(out), chunk, out[chunk])
        reader.finish()

    def _all_literals(self, remainders: StoredSection, exponents: StoredSection) -> torch.Tensor:
        """Reads all literals that the sections hold."""
        num_literals = self._format.num_values_of(len(remainders.data))
        if num_literals is None or num_literals > self._num_values:
            raise CieraDecodeError(f"{len(remainders.data)} bytes of remainders belong to no number of literals")
        literals = empty_tensor(num_literals, self.unit.dtype)
        self._read_literals(remainders, exponents, literals)
        return literals

    def _move(self, row: torch.Tensor, sections: Sequence[StoredSection]) -> None:
        """Applies moves and literals to the values of one peer."""
        boundary, small_positions, small_symbols, positions, symbols, remainders, exponents = sections
        fmt, num_values = self._format, self._num_values
        small_bits, small_moves = None, np.empty(0, np.uint8)
        if len(boundary.data):
            small_bits, num_small_moves = read_positions(small_positions, num_values, num_values_is_most=True)
            small_moves = read_moves(small_symbols, num_small_moves)
        else:
            for section in (boundary, small_positions, small_symbols):
                section.check_nothing()
        bits, num_moves = None, num_values
        if positions.coding == Coding.DENSE:
            boundary.check_nothing()
            positions.check_empty()
        else:
            bits, num_moves = read_positions(positions, num_values, num_values_is_most=small_bits is not None)
        moves = read_moves(symbols, num_moves)
        form = Form(
            escape_of(symbols),
            everywhere=bits is None,
            boundary=0 if small_bits is None else _boundary_of(boundary, fmt),
            small_escape=escape_of(small_symbols),
        )
        literals = self._all_literals(remainders, exponents)
        num_escapes = np.count_nonzero(moves == form.escape) + np.count_nonzero(small_moves == form.small_escape)
        if num_escapes != len(literals):
            raise CieraDecodeError(f"moves ask for {num_escapes} literals, and there are {len(literals)}")
        changes = Received(form, bits, small_bits, torch.from_numpy(small_moves), torch.from_numpy(moves), literals)
        used = kernels_of(row).apply_changes(row, fmt, changes)
        if used != Used(used.num_small, len(small_moves), len(moves), len(literals)):
            raise CieraDecodeError(f"changes lie behind the last of {used.num_small} small values, or of the others")
        for section, class_size in ((small_positions, used.num_small), (positions, num_values - used.num_small)):
            if small_bits is not None:
                _check_bitmap_size(section, class_size)

    def copy_values(self, rows: torch.Tensor, output: torch.Tensor, is_flat: bool) -> None:
        """Copies the peers' rows into an output, one copy a peer."""
        for rank in range(self.unit.world_size):
            if rank != self.unit.rank:
                row = rows[rank, self._in_shard] if is_flat else rows[rank]
                _integers(output[rank, self._in_shard]).copy_(_integers(row))

    # raw

    def read_raw(self, received: Sequence[PeerParts], output: torch.Tensor) -> None:
        """Copies the peers' values as bytes, since payloads are not aligned."""
        for parts in received:
            output[parts.rank, self._in_shard].view(torch.uint8).copy_(parts.fixed)

    def _peers(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each peer's rank, with its row of a state."""
        for peer, row in enumerate(rows):
            yield peer + (peer >= self.unit.rank), row


def _of_blocks(exponents: Bytes, chosen: Bools, block_size: int) -> Bytes:
    """Selects from exponents [n], of which the last block may be short, those of the chosen blocks."""
    if chosen.all():
        return exponents
    num_whole = len(exponents) // block_size
    whole = exponents[: num_whole * block_size].reshape(num_whole, block_size)
    selected = whole.compress(chosen[:num_whole], axis=0).reshape(-1)  # several times as fast as whole[chosen]
    return np.concatenate([selected, exponents[num_whole * block_size :]]) if chosen[num_whole:].any() else selected


def _boundary_of(section: StoredSection, fmt: FloatFormat) -> int:
    if section.coding != Coding.PLAIN or len(section.data) != 1 or not 0 < section.data[0] < 1 << fmt.exponent_bits:
        raise CieraDecodeError(f"a section of {len(section.data)} bytes is no exponent between small and large values")
    return int(section.data[0])


def _check_bitmap_size(section: StoredSection, num_values: int) -> None:
    """Checks the bitmap of a class of `num_values` values. The number is known only once all values were looked at; gaps that
    lead out of the class are found by then."""
    if section.coding == Coding.BITMAP and len(section.data) != packed_bytes(num_values, 1):
        raise CieraDecodeError(f"a bitmap of {len(section.data)} bytes stands where {num_values} values belong")


def _integers(values: torch.Tensor) -> torch.Tensor:
    """Views floats as integers to copy them: copies of floats may quiet signalling NaNs on some devices."""
    return values.view(FORMATS[values.dtype].int_dtype)
