"""The shipped PTX, executed in the interpreter (emulator) and compared bit for bit with the torch reference.

Every case of kernel_cases.py runs with the interpreter's checks: bounds of every buffer on both sides, alignment, reads of
what was never written, results not written, read-only loads of written data, data races. Then: other schedules; positions
beyond 2**32; how much of the file ran; how many small changes of the file the cases notice.

What this does not show is in docs/kernels.md.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import emulator.machine
from emulator import EmulatorError, KernelCoverage, Machine, Module, OutOfBounds, ParseError, UnknownOpcode, mutants
from emulator.batch import Batch
from emulator.datatypes import Array as Numbers
from fsdp_ciera.kernels import cuda
from fsdp_ciera.kernels import launch as launching
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat
from fsdp_ciera.kernels.launch import PTX_FILE, Argument
from fsdp_ciera.kernels.reference import splitmix64
from fsdp_ciera.kernels.tiles import CTA_VALUES, FAR, GROUP_BLOCKS
from kernel_cases import (
    FLOATS,
    THREADS,
    Case,
    Unit,
    all_cases,
    hash_case,
    merge_case,
    mixed,
    nibbles_case,
    receive_case,
    run_case,
    scan_case,
    scan_symbols_case,
    split_case,
    symbol_values,
    whole,
    words_of,
)
from places import NATIVE

PTX_TEXT = PTX_FILE.read_text()
KERNELS = re.findall(r"\.entry\s+(\w+)", PTX_TEXT)
SEEDS = range(4)
FIRST_ADDRESS, ADDRESS_STEP = 1 << 44, 1 << 36  # every buffer lies more than 2**32 bytes from the next
MUTANTS_PER_KERNEL = int(os.environ.get("FSDP_CIERA_MUTANTS", "4"))

Bytes = npt.NDArray[np.uint8]


@cache
def shipped_module() -> Module:
    return Module(PTX_TEXT)


@cache
def cases_of() -> dict[str, list[Case]]:
    """By the kernel that comes first."""
    found = defaultdict(list)
    for case in all_cases():
        for kernel in case.kernels:
            found[kernel].append(case)
    return found


class Interpreter:
    """An executor, and what stands in for the loaded kernels. Buffers have exact bounds, wherever they begin; what a launch
    gets from elsewhere (sums that torch made) is there while it runs."""

    pattern = 0xCD

    def __init__(
        self, module: Module, seed: int | None = None, check_races: bool = True, max_steps: int = 1_000_000
    ) -> None:
        self.machine = Machine(module, seed=seed, check_races=check_races, measure_traffic=False, max_steps=max_steps)
        self.next_address = FIRST_ADDRESS
        self.buffers: list[tuple[Bytes, int]] = []
        """Memory of this process, and where the machine has it."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launching, "kernel_module", lambda device: self)
            patch.setattr(cuda, "_room", self._room)
            yield

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.alloc(int(np.prod(shape)) * dtype.itemsize).view(dtype).view(shape)

    def upload(self, data: torch.Tensor, misalignment: int = 0) -> torch.Tensor:
        array = words_of(data).numpy().view(np.uint8).copy()
        self._map(array, misalignment)
        return torch.from_numpy(array).view(data.dtype)

    def alloc(self, num_bytes: int, misalignment: int = 0) -> torch.Tensor:
        array = np.full(num_bytes, self.pattern, np.uint8)
        self.machine.memory.region_at(self._map(array, misalignment)).state[:] = 0
        return torch.from_numpy(array)

    def _map(self, array: Bytes, misalignment: int) -> int:
        address = self.next_address + misalignment
        self.next_address += ADDRESS_STEP
        self.machine.map_host(array, address)
        self.buffers.append((array, address))
        return address

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return words_of(tensor.contiguous()).clone().view(tensor.dtype)

    def written(self, room: torch.Tensor) -> torch.Tensor | None:
        found = self._find(room)
        return None if found is None else torch.from_numpy(self.machine.written(found, room.nbytes))

    def _find(self, tensor: torch.Tensor) -> int | None:
        """Where the machine has it; `None` for what was neither uploaded nor allocated."""
        for array, address in self.buffers:
            start = tensor.data_ptr() - array.ctypes.data
            if array.size and 0 <= start < array.size:
                return address + start
        return None

    def launch(self, name: str, grid: tuple[int, int], num_threads: int, *args: Argument, device: torch.device) -> None:
        """As KernelModule.launch."""
        if not all(grid):
            return
        borrowed: dict[int, torch.Tensor] = {}
        values = []
        for arg in args:
            address = arg if isinstance(arg, int) else self._find(arg) if arg.numel() else 0
            if address is None:
                assert isinstance(arg, torch.Tensor) and arg.is_contiguous()
                address = self._map(words_of(arg).view(-1).view(torch.uint8).numpy(), 0)
                borrowed[address] = arg
            values.append(address)
        try:
            self.run(name, grid, values)
        finally:
            for address in borrowed:
                self.machine.release(address)
                self.buffers.pop()

    def run(self, name: str, grid: tuple[int, int], values: list[int]) -> None:
        self.machine.launch(name, grid, THREADS, *values)

    def bytes_at(self, address: int) -> Bytes:
        """From there to the end of the buffer."""
        for array, first in self.buffers:
            if first <= address < first + array.size:
                return array[address - first :]
        raise AssertionError(f"no buffer at {address:#x}")


# ---- all cases, and what they cover

COVERAGE: dict[str, KernelCoverage] = {}
RAN: set[str] = set()


def run_once(kernel: str) -> None:
    """Runs the cases of a kernel, and counts what they cover. Patterns of 16 bits are too many to look for races too."""
    if not COVERAGE:
        COVERAGE.update(Machine(shipped_module()).coverage)
    for case in cases_of()[kernel]:
        if case.name not in RAN:
            RAN.add(case.name)
            interpreter = Interpreter(shipped_module(), check_races=not case.name.endswith("-all"))
            interpreter.machine.coverage = COVERAGE
            run_case(case, interpreter)


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_are_the_references(kernel: str) -> None:
    assert cases_of()[kernel]
    run_once(kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_schedule_matters(kernel: str) -> None:
    for case in quick_cases(kernel):
        for seed in SEEDS if "damaged" not in case.name else SEEDS[:1]:
            run_case(case, Interpreter(shipped_module(), seed))


def quick_cases(kernel: str) -> list[Case]:
    return [case for case in cases_of()[kernel] if case.quick]


# Branches that cannot go both ways, by kernel. The first value of an octet is always there where the octet is: `i < left` of
# i = 0 is asked once for each scalar load or store. A group of blocks has a first byte of bits, and warps have numbers
# below 64.
# What nvcc makes of the loop of `checksum`, four rounds at a time, asks in the first three for a tail that only the last
# round can have.
MOST_ONE_SIDED = {
    **{f"pack_{kind}_{fmt.name}": 2 for kind in ("values", "exponents") for fmt in FLOATS},
    **{f"apply_values_{fmt.name}": 2 for fmt in FLOATS},
    **{f"merge_symbols_{fmt.name}": 1 for fmt in FLOATS},
    "apply_exponents": 2, "put_blocks": 2, "copy_out_16": 1, "copy_out_32": 1, "checksum": 12,
}  # fmt: skip
# The 64-bit division in checksum, for rows of more than 2**35 bytes; test_positions_beyond_32_bits runs it.
MOST_MISSED = {"checksum": 2}


def test_coverage() -> None:
    """Every instruction runs, every branch goes both ways, but for those above."""
    for kernel in KERNELS:
        run_once(kernel)
    executed, total = (sum(getattr(c, name) for c in COVERAGE.values()) for name in ("executed", "total"))
    one_sided = sum(len(c.one_sided) for c in COVERAGE.values())
    branches = sum(i.opcode == "bra" and i.guard is not None for c in COVERAGE.values() for i in c.instructions)
    print(f"\n{executed} of {total} instructions ran, {branches - one_sided} of {branches} branches went both ways")
    for kernel, coverage in COVERAGE.items():
        assert len(coverage.missed) <= MOST_MISSED.get(kernel, 0), [(i.line, i.text) for i in coverage.missed]
        one_sided_here = [(i.line, i.text) for i in coverage.one_sided]
        assert len(one_sided_here) <= MOST_ONE_SIDED.get(kernel, 0), (kernel, one_sided_here)
    assert one_sided < 0.06 * branches


def near_values(fmt: FloatFormat) -> torch.Tensor:
    """Without an escape."""
    return symbol_values(fmt, CTA_VALUES, most_below=FAR - 1)


VECTORS = {
    "split": (lambda fmt: split_case(Unit(fmt, whole(CTA_VALUES))), {}),
    "merge_rows": (lambda fmt: merge_case(Unit(fmt, whole(CTA_VALUES)), 1), {"s32": 1}),
    "hash_blocks": (lambda fmt: hash_case(Unit(fmt, whole(CTA_VALUES), block_size=512), False), {"u8": 1}),
    "scan_values": (lambda fmt: scan_case(Unit(fmt, whole(CTA_VALUES)), "values"), {"u8": 1}),
    "scan_symbols": (lambda fmt: scan_symbols_case(Unit(fmt, whole(CTA_VALUES))), {"u8": 1}),
    "put_nibbles": (lambda fmt: nibbles_case(Unit(fmt, whole(CTA_VALUES))), {"u8": 1, "s32": 1}),
    "merge_symbols": (
        lambda fmt: receive_case(Unit(fmt, whole(CTA_VALUES), shards=(near_values(fmt),) * 2), "symbols", 0, gap=5),
        {"s32": 5, "u8": 1},
    ),
}
"""By family: a case with aligned buffers, and how many accesses there are to single numbers of a type (row_ok, changed, bits,
tops, offsets, eight nibbles). 64 bits do not count: tables, hashes, counts."""


@pytest.mark.parametrize("family", VECTORS)
@pytest.mark.parametrize("fmt", [fmt for fmt in FLOATS if not fmt.top_bits], ids=lambda fmt: fmt.name)
def test_aligned_buffers_are_accessed_in_vectors(family: str, fmt: FloatFormat) -> None:
    """Results would be the same without. fp16 has packed bits, which are read and written by bytes."""
    make_case, singles = VECTORS[family]
    kernel = f"{family}_{fmt.name}"
    interpreter = Interpreter(shipped_module())
    run_case(Case(family, (kernel,), make_case(fmt)), interpreter)
    coverage = interpreter.machine.coverage[kernel]
    ran = [i for i, count in zip(coverage.instructions, coverage.executions, strict=True) if count]
    accesses = [i for i in ran if "global" in i.modifiers and i.modifiers[-1] != "u64"]
    single = [i for i in accesses if not {"v2", "v4"} & {*i.modifiers}]
    assert len(accesses) > len(single), [i.text for i in accesses]
    assert Counter(i.modifiers[-1].replace("u32", "s32") for i in single) == singles, [i.text for i in single]


# ---- positions beyond 32 bits

FAR_CTAS = (1 << 29) + 4  # tables of 32 and 24 bytes a CTA, 256 bytes of bits, 12 bytes of offsets
FAR_FLAT, FAR_STATE, FAR_PLANE = (1 << 33) + 8, (1 << 33) + (1 << 32) + 8, (1 << 34) + 1024
FAR_COUNT = (1 << 32) - (1 << 20)  # of level 2, moves, literals: offsets have 32 bits
FAR_EXPONENTS = 1 << 34  # bytes
FAR_ROW = 1 << 33  # values or bytes between rows, and more
FAR_BASE, FAR_STEP = 1 << 48, 1 << 43  # of buffers that are in pieces
FAR_PAYLOAD = 1 << 37

ROOM = "arena capacity section_table num_sections arena_at sections_at first_section"
PAYLOADS = "payloads payload_stride payload_bytes own row_ok table_at sections_at first_section"
SENDER = "fresh last tiles num_tiles escape bits"
PARAMETERS = {
    "scan_values": f"{SENDER} counts",
    "scan_exponents": f"{SENDER} counts",
    "pack_values": f"{SENDER} up_to {ROOM}",
    "pack_exponents": f"{SENDER} up_to {ROOM}",
    "apply_values": f"{PAYLOADS} tiles num_tiles num_plane_values escape rows rows_stride damage",
    "apply_exponents": f"{PAYLOADS} tiles num_tiles num_plane_values rows rows_stride damage",
    "split": "rows rows_stride own tiles num_tiles num_plane_values num_state_values low top exponents exponents_stride",
    "merge_rows": "exponents exponents_stride payloads payload_stride own row_ok low_at top_at tiles out out_stride",
    "copy_out": "rows rows_stride own tiles out out_stride",
    "hash_blocks": "values blocks num_blocks block_size last_hashes hashes changed",
    "pack_blocks": f"values blocks num_blocks block_size changed ranks {ROOM}",
    "put_blocks": f"{PAYLOADS} num_blocks block_size rows rows_stride damage",
    "scan_symbols": "values tiles tops counts",
    "pack_symbols": f"values tiles num_tiles tops up_to {ROOM}",
    "put_nibbles": "values tiles num_tiles num_plane_values tops nibbles",
    "merge_symbols": f"{PAYLOADS} low_at top_at nibbles_at tiles num_tiles out out_stride damage",
    "check_heads": "heads heads_stride num_ranks own name decoded_checksums row_ok damage",
    "finish_checksums": "sums num_rows",
}
ITEM_BYTES = {**{fmt.name: fmt.item_bytes for fmt in FORMATS.values()}, "16": 2, "32": 4}


def family_of(kernel: str) -> tuple[str, str]:
    """apply_values_bf16 -> apply_values, bf16."""
    family, _, form = kernel.rpartition("_")
    return (family, form) if form in ITEM_BYTES else (kernel, "")


class FarBatch(Batch):
    """CTAs that take themselves for later ones of a larger grid."""

    far_ctas = FAR_CTAS

    def _special_registers(self, in_cta: Numbers) -> dict[str, Numbers]:
        numbers = super()._special_registers(in_cta)
        for name in ("%ctaid.x", "%nctaid.x"):
            numbers[name] = numbers[name] + np.uint32(self.far_ctas)
        return numbers


class FarInterpreter(Interpreter):
    """Launches as the last part of much larger ones: CTAs have numbers from FAR_CTAS on, tables say that values are far behind
    the beginning, rows are far from each other, sections are long and counts large. Of all this only our part is there, and
    pointers are where the whole would begin."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.far_address = FAR_BASE

    def run(self, name: str, grid: tuple[int, int], values: list[int]) -> None:
        family, form = family_of(name)
        far = FarLaunch(self, family, form, dict(zip(PARAMETERS[family].split(), values, strict=True)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emulator.machine, "Batch", FarBatch)
            try:
                far.spread()
                super().run(name, grid, list(far.args.values()))
            finally:
                far.gather()


class FarLaunch:
    """Arguments of one launch, by name, on their way to be far ones. `gather` undoes what it changed in memory."""

    def __init__(self, interpreter: FarInterpreter, family: str, form: str, args: dict[str, int]) -> None:
        self.interpreter, self.family, self.args = interpreter, family, args
        self.fmt = next((fmt for fmt in FLOATS if fmt.name == form), FLOATS[0])
        self.item = ITEM_BYTES.get(form, 1)
        self.undo: list[Callable[[], None]] = []

    def spread(self) -> None:
        getattr(self, f"_{self.family}")()

    def gather(self) -> None:
        while self.undo:
            self.undo.pop()()

    # what is far

    def _back(self, name: str, by: int) -> None:
        """The pointer to something of which only what is `by` bytes behind the beginning is there."""
        if self.args[name]:
            self.args[name] -= by

    def _more(self, name: str, by: int) -> None:
        self.args[name] += by

    def _add(self, numbers: npt.NDArray[Any], by: int) -> None:
        """Larger contents."""
        numbers += numbers.dtype.type(by)

        def undo() -> None:
            numbers[...] -= numbers.dtype.type(by)

        self.undo.append(undo)

    def _numbers(self, name: str, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        return self.interpreter.bytes_at(self.args[name]).view(dtype)

    def _far_tiles(self) -> None:
        table = self._numbers("tiles").reshape(-1, 4)
        for column, by in enumerate((FAR_FLAT, FAR_STATE, FAR_PLANE)):
            self._add(table[:, column], by)
        self._back("tiles", 32 * FAR_CTAS)

    def _far_blocks(self, per_cta: int) -> None:
        self._add(self._numbers("blocks").reshape(-1, 2)[:, 0], FAR_FLAT)
        self._back("blocks", 16 * per_cta * FAR_CTAS)
        self._more("num_blocks", per_cta * FAR_CTAS)
        self._back("values", FAR_FLAT * self.item)

    def _in_pieces(self, name: str, pieces: list[tuple[int, int, int]]) -> None:
        """A buffer of which pieces (first byte, end, far first byte) are apart from each other."""
        memory, address = self.interpreter.machine.memory, self.args[name]
        whole_region = memory.region_at(address)
        base = self.interpreter.far_address
        self.interpreter.far_address += FAR_STEP
        memory._set([region for region in memory.regions if region is not whole_region])
        assert whole_region.host is not None
        parts = []
        for first, end, far in pieces:
            if first == end:
                continue
            memory.map_host(whole_region.host[first:end], base + far)
            part = memory.region_at(base + far)
            old = slice(whole_region.lead + first, whole_region.lead + end)
            new = slice(part.lead, part.lead + end - first)
            part.state[new] = whole_region.state[old]
            parts.append((part, old, new))
        self.args[name] = base

        def undo() -> None:
            for part, old, new in parts:
                whole_region.state[old] = part.state[new]
            gone = [part for part, _, _ in parts]
            kept = [region for region in memory.regions if not any(region is one for one in gone)]
            memory._set(sorted([*kept, whole_region], key=lambda region: (region.start, region.num_bytes)))

        self.undo.append(undo)

    def _far_rows(self, name: str, item: int) -> None:
        """Rows far from each other; `name`_stride says how far, in values of `item` bytes."""
        stride = self.args[f"{name}_stride"]
        size = len(self._numbers(name, np.uint8))
        starts = range(0, size, stride * item)
        far_stride = stride + FAR_ROW
        self._in_pieces(
            name, [(at, min(at + stride * item, size), row * far_stride * item) for row, at in enumerate(starts)]
        )
        self.args[f"{name}_stride"] = far_stride

    def _far_table(
        self, entries: npt.NDArray[np.int64], shifts: list[int], sections_at: int
    ) -> list[tuple[int, int, int]]:
        """Makes the unit's sections longer by `shifts`, unless they are empty. -> (first byte, end, far first byte of what is
        there) of every section of the payload."""
        first, mask = self.args["first_section"], (1 << 56) - 1
        saved = entries.copy()
        old_end = new_end = sections_at
        pieces = []
        is_empty = self._is_empty(entries, sections_at)
        for number, entry in enumerate(saved.tolist()):
            start, far = -(-old_end // 16) * 16, -(-new_end // 16) * 16
            of_unit = first <= number < first + len(shifts) and not is_empty
            shift = shifts[number - first] if of_unit else 0
            old_end = entry & mask
            new_end = far + shift + old_end - start
            pieces.append((start, old_end, far + shift))
            entries[number] = entry & ~mask | new_end

        def undo() -> None:
            entries[...] = saved

        self.undo.append(undo)
        return pieces

    def _is_empty(self, entries: npt.NDArray[np.int64], sections_at: int) -> bool:
        """Whether the unit's sections are: the first one says it."""
        first, mask = self.args["first_section"], (1 << 56) - 1
        before = int(entries[first - 1]) & mask if first else sections_at
        return int(entries[first]) & mask == -(-before // 16) * 16

    def _far_room(self, shifts: list[int], offsets: int, count: int, by: int) -> None:
        """The arena of a sender. offsets: the section of them, in whose first `count` columns of three (or one) are larger."""
        at, first = self.args["arena_at"], self.args["first_section"]
        if self._is_empty(self._numbers("section_table"), self.args["sections_at"]):
            return
        arena = self._numbers("arena", np.uint8)
        pieces = self._far_table(self._numbers("section_table"), shifts, self.args["sections_at"])
        start, end, _ = pieces[first + offsets]
        has_room = self.args["capacity"] >= pieces[-1][1] - at
        written = arena[start - at : end - at].view(np.uint32).reshape(-1, 3 if len(shifts) > 3 else 1)[:, :count]
        self._in_pieces("arena", [(a - at, b - at, far - at) for a, b, far in pieces])
        if has_room:
            self.args["capacity"] = FAR_PAYLOAD

            def undo() -> None:
                written[...] -= np.uint32(by)

            self.undo.append(undo)

    def _far_payloads(self, shifts: list[int], offsets: int, count: int, by: int) -> None:
        """What a receiver gets: every payload in pieces."""
        first, table_at, stride = (self.args[name] for name in ("first_section", "table_at", "payload_stride"))
        memory = self._numbers("payloads", np.uint8)
        num_entries = first + len(shifts) + 1
        pieces = []
        for row, start in enumerate(range(0, len(memory), stride)):
            payload = memory[start : start + stride]
            entries = payload[table_at : table_at + 8 * num_entries].view(np.int64)
            is_empty = self._is_empty(entries, self.args["sections_at"])
            of_row = self._far_table(entries, shifts, self.args["sections_at"])
            here, end, _ = of_row[first + offsets]
            if not is_empty:
                numbers = payload[here:end].view(np.uint32).reshape(-1, 3 if len(shifts) > 3 else 1)
                self._add(numbers[:, :count], by)
            fixed = (0, self.args["sections_at"], 0)
            pieces += [(start + a, start + b, row * FAR_PAYLOAD + far) for a, b, far in (fixed, *of_row)]
        self._in_pieces("payloads", pieces)
        self.args["payload_stride"] = self.args["payload_bytes"] = FAR_PAYLOAD

    # kernels

    def _sender(self, state_item: int) -> None:
        self._far_tiles()
        self._more("num_tiles", FAR_CTAS)
        self._back("fresh", FAR_FLAT * self.item)
        self._back("last", FAR_STATE * state_item)
        self._back("bits", 256 * FAR_CTAS)

    def _scan(self, state_item: int) -> None:
        row = 8 * (self.args["num_tiles"] + 1)
        self._sender(state_item)
        far_row = 8 * (self.args["num_tiles"] + 1)
        self._in_pieces("counts", [(k * row + 8, (k + 1) * row, k * far_row + 8 + 8 * FAR_CTAS) for k in range(3)])

    def _pack(self, state_item: int, num_counts: int) -> None:
        self._sender(state_item)
        up_to = self._numbers("up_to").reshape(-1, 3)
        if up_to[-1, 1]:  # where nothing changed it must say so
            self._add(up_to[:, :num_counts], FAR_COUNT)
        self._back("up_to", 24 * FAR_CTAS)
        self._far_room(self._change_shifts(num_counts), 0, num_counts, FAR_COUNT)

    def _change_shifts(self, num_counts: int) -> list[int]:
        return [12 * FAR_CTAS, FAR_PLANE // 64, FAR_COUNT, FAR_COUNT, FAR_COUNT * self.item][: num_counts + 2]

    def _apply(self, num_counts: int) -> None:
        self._far_tiles()
        self._more("num_tiles", FAR_CTAS)
        self._more("num_plane_values", FAR_PLANE)
        self._far_payloads(self._change_shifts(num_counts), 0, num_counts, FAR_COUNT)
        self._far_rows("rows", self.item)
        self._back("rows", FAR_STATE * self.item)

    def _scan_values(self) -> None:
        self._scan(self.item)

    def _scan_exponents(self) -> None:
        self._scan(1)

    def _pack_values(self) -> None:
        self._pack(self.item, 3)

    def _pack_exponents(self) -> None:
        self._pack(1, 2)

    def _apply_values(self) -> None:
        self._apply(3)

    def _apply_exponents(self) -> None:
        self._apply(2)

    def _split(self) -> None:
        self._far_tiles()
        self._more("num_tiles", FAR_CTAS)
        self._more("num_plane_values", FAR_PLANE)
        self._more("num_state_values", FAR_STATE)
        for name, item in (("rows", self.item), ("exponents", 1)):
            if self.args[f"{name}_stride"]:
                self._far_rows(name, item)
        self._back("rows", FAR_FLAT * self.item)
        self._back("exponents", FAR_STATE)
        self._back("low", FAR_PLANE * self.fmt.low_bytes)
        self._back("top", FAR_PLANE // 8 * self.fmt.top_bits)

    def _merge_rows(self) -> None:
        self._far_tiles()
        self._more("low_at", -FAR_PLANE * self.fmt.low_bytes)
        self._more("top_at", -FAR_PLANE // 8 * self.fmt.top_bits)
        self.args["payloads_stride"] = self.args["payload_stride"]
        self._far_rows("payloads", 1)
        self.args["payload_stride"] = self.args.pop("payloads_stride")
        self._far_rows("exponents", 1)
        self._far_rows("out", self.item)
        self._back("exponents", FAR_STATE)
        self._back("out", FAR_FLAT * self.item)

    def _copy_out(self) -> None:
        self._far_tiles()
        self._far_rows("rows", self.item)
        self._far_rows("out", self.item)
        self._back("rows", FAR_STATE * self.item)
        self._back("out", FAR_FLAT * self.item)

    def _hash_blocks(self) -> None:
        per_cta = THREADS // 32
        self._far_blocks(per_cta)
        for name, num_bytes in (("last_hashes", 16), ("hashes", 16), ("changed", 1)):
            self._back(name, num_bytes * per_cta * FAR_CTAS)

    def _pack_blocks(self) -> None:
        by = FAR_EXPONENTS // self.args["block_size"] // 16 * 16
        self._far_blocks(GROUP_BLOCKS)
        self._back("changed", GROUP_BLOCKS * FAR_CTAS)
        if int(self._numbers("ranks")[-1]):  # where nothing changed it must say so
            self._add(self._numbers("ranks"), by)
        self._back("ranks", 8 * GROUP_BLOCKS * FAR_CTAS)
        self._far_room([8 * FAR_CTAS, 4 * FAR_CTAS, by * self.args["block_size"]], 1, 1, by)

    def _put_blocks(self) -> None:
        block_size = self.args["block_size"]
        by = FAR_EXPONENTS // block_size // 16 * 16
        self._more("num_blocks", GROUP_BLOCKS * FAR_CTAS)
        self._far_payloads([8 * FAR_CTAS, 4 * FAR_CTAS, by * block_size], 1, 1, by)
        self._far_rows("rows", 1)
        self._back("rows", GROUP_BLOCKS * FAR_CTAS * block_size)

    def _symbol_sender(self) -> None:
        self._far_tiles()
        self._back("values", FAR_FLAT * self.item)
        self._back("tops", FAR_CTAS)

    def _scan_symbols(self) -> None:
        self._symbol_sender()
        self._back("counts", 8 * FAR_CTAS)

    def _pack_symbols(self) -> None:
        self._symbol_sender()
        self._more("num_tiles", FAR_CTAS)
        self._add(self._numbers("up_to"), FAR_COUNT)
        self._back("up_to", 8 * FAR_CTAS)
        self._far_room([4 * FAR_CTAS, FAR_CTAS, FAR_COUNT], 0, 1, FAR_COUNT)

    def _put_nibbles(self) -> None:
        self._symbol_sender()
        self._more("num_tiles", FAR_CTAS)
        self._more("num_plane_values", FAR_PLANE)
        self._back("nibbles", FAR_PLANE // 2)

    def _merge_symbols(self) -> None:
        self._far_tiles()
        self._more("num_tiles", FAR_CTAS)
        self._more("low_at", -FAR_PLANE * self.fmt.low_bytes)
        self._more("top_at", -FAR_PLANE // 8 * self.fmt.top_bits)
        self._more("nibbles_at", -FAR_PLANE // 2)
        self._far_payloads([4 * FAR_CTAS, FAR_CTAS, FAR_COUNT], 0, 1, FAR_COUNT)
        self._far_rows("out", self.item)
        self._back("out", FAR_FLAT * self.item)

    def _check_heads(self) -> None:
        ranks = THREADS * FAR_CTAS
        self._more("num_ranks", ranks)
        self._more("own", ranks)
        self._back("heads", ranks * self.args["heads_stride"])
        self._back("decoded_checksums", 8 * ranks)
        self._back("row_ok", 4 * ranks)

    def _finish_checksums(self) -> None:
        self._more("num_rows", THREADS * FAR_CTAS)
        self._back("sums", 8 * THREADS * FAR_CTAS)


def far_cases(kernel: str) -> list[Case]:
    """Quick ones of one launch. Damage is what it is in the first CTA, which is not there."""
    return [case for case in quick_cases(kernel) if len(case.kernels) == 1 and "damaged" not in case.name]


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS if kernel not in ("checksum", "finish_checksums", "write_head")]
)
def test_positions_beyond_32_bits(kernel: str) -> None:
    entry = launching.KernelModule(PTX_FILE.read_bytes()).entries[kernel]
    assert len(entry) == len(PARAMETERS[family_of(kernel)[0]].split())
    assert far_cases(kernel)
    for case in far_cases(kernel):
        run_case(case, FarInterpreter(shipped_module()))


def test_checksums_of_rows_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words from number 2**34 on: they are mixed with others, so this is no shifted case. Then rows that far apart, and more
    rows than that."""
    monkeypatch.setattr(FarBatch, "far_ctas", first := 1 << 26)
    monkeypatch.setattr(emulator.machine, "Batch", FarBatch)
    data = np.random.default_rng(0).integers(0, 256, 8 * (THREADS + 77) - 3, np.uint8)
    interpreter, before = Interpreter(shipped_module()), first * THREADS
    interpreter.machine.coverage = COVERAGE or interpreter.machine.coverage
    sums = interpreter.upload(torch.zeros(2, dtype=torch.int64))
    rows = [interpreter._find(interpreter.upload(torch.from_numpy(data ^ row))) for row in range(2)]
    assert rows[0] is not None and rows[1] is not None and interpreter._find(sums) is not None
    sums_at = int(interpreter._find(sums) or 0)
    interpreter.run("checksum", (2, 2), [rows[0] - 8 * before, rows[1] - rows[0], 8 * before + len(data), sums_at])
    for row, found in enumerate(sums.tolist()):
        words = np.pad(data ^ row, (0, -len(data) % 8)).view(np.uint64).tolist()
        expected = sum(mixed(word, before + j) for j, word in enumerate(words)) % (1 << 64)
        assert found % (1 << 64) == expected
    numbers = interpreter.upload(torch.arange(300))
    numbers_at = int(interpreter._find(numbers) or 0)
    interpreter.run("finish_checksums", (2, 1), [numbers_at - 8 * before, before + 300])
    assert torch.equal(numbers, splitmix64(torch.arange(300)))


# (file, text in it, a position of 32 bits in its place, kernels whose cases must notice)
NARROW = [
    ("cuda_changes.cuh", "fresh + tile.start", "fresh + (u32)tile.start", "scan_values_bf16 pack_exponents_bf16"),
    ("cuda_changes.cuh", "[(i64)blockIdx.x * kThreads", "[blockIdx.x * kThreads", "scan_values_bf16 pack_values_bf16"),
    ("cuda_changes.cuh", "before_tile[1] +", "(int)before_tile[1] +", "pack_values_bf16 pack_exponents_bf16"),
    (
        "cuda_changes.cuh",
        "from[1] + (u64)moves_before",
        "(int)(from[1] + moves_before)",
        "apply_values_bf16 apply_exponents",
    ),
    ("cuda_changes.cuh", "row += tile.state", "row += (u32)tile.state", "apply_values_bf16 apply_exponents"),
    ("cuda_planes.cuh", "out + tile.start", "out + (u32)tile.start", "merge_rows_bf16 copy_out_32"),
    ("cuda_planes.cuh", "low + (tile.plane + first)", "low + (u32)(tile.plane + first)", "split_bf16 merge_rows_bf16"),
    ("cuda_blocks.cuh", "= (i64)blockIdx.x * kGroup", "= blockIdx.x * kGroup", "pack_blocks_bf16 put_blocks"),
    ("cuda_blocks.cuh", "block.start + 8 * word", "(u32)(block.start + 8 * word)", "hash_blocks_bf16"),
    ("cuda_symbols.cuh", "before_tile + sum_before", "(int)before_tile + sum_before", "pack_symbols_bf16"),
    ("cuda_symbols.cuh", "from + (u64)escapes_before", "(int)(from + escapes_before)", "merge_symbols_bf16"),
    ("cuda_symbols.cuh", "nibbles + (tile.plane", "nibbles + (u32)(tile.plane", "put_nibbles_bf16 merge_symbols_bf16"),
    ("payloads.cuh", "(1ull << 56) - 1", "(1ull << 32) - 1", "pack_values_bf16 apply_exponents put_blocks"),
    (
        "kernels.cu",
        "payloads + rank * payload_stride",
        "payloads + (u32)(rank * payload_stride)",
        "merge_rows_bf16 put_blocks",
    ),
    ("kernels.cu", "rows + rank * rows_stride", "rows + (u32)(rank * rows_stride)", "apply_values_bf16 copy_out_16"),
    ("cuda_heads.cuh", "rank = (i64)blockIdx.x * kThreads", "rank = blockIdx.x * kThreads", "check_heads"),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: no kernel with a fault can be compiled")
@pytest.mark.parametrize(("file", "right", "wrong", "kernels"), NARROW, ids=[f"{one[0]}-{one[1]}" for one in NARROW])
def test_positions_of_32_bits_are_noticed(tmp_path: Path, file: str, right: str, wrong: str, kernels: str) -> None:
    for path in NATIVE.glob("*.cu*"):
        text = path.read_text()
        if path.name == file:
            assert right in text, f"{file} has changed: narrow it anew at {right}"
            text = text.replace(right, wrong)
        (tmp_path / path.name).write_text(re.sub(r"(?m)^CIERA_FORMAT_KERNELS\((fp16|fp32)\)", "", text))
    command = ["nvcc", "-ptx", "-arch=compute_80", "-std=c++17", "kernels.cu", "-o", "kernels.ptx"]
    subprocess.run(command, check=True, cwd=tmp_path)
    module = Module((tmp_path / "kernels.ptx").read_text())
    for kernel in kernels.split():
        case = far_cases(kernel)[0]
        run_case(case, Interpreter(module))
        with pytest.raises((OutOfBounds, AssertionError)):
            run_case(case, FarInterpreter(module))


# ---- mutants


def text_of(kernel: str) -> str:
    """PTX of this kernel alone."""
    header, *entries = re.split(r"(?m)^(?=\.visible \.entry)", PTX_TEXT)
    return header + next(entry for entry in entries if f".entry {kernel}(" in entry)


def living_mutants(kernel: str, seed: int) -> Iterator[tuple[Any, Module]]:
    """Mutants in random order, without those that are no PTX, and without an xor for an or: these kernels put bits together
    that never meet."""
    text = text_of(kernel)
    found = [mutant for mutant in mutants(text) if not ("or.b" in mutant.before and "xor.b" in mutant.after)]
    random.Random(f"{kernel} {seed}").shuffle(found)
    for mutant in found:
        try:
            yield mutant, Module(mutant.apply(text))
        except (ParseError, UnknownOpcode):
            continue


def is_noticed(module: Module, kernel: str) -> bool:
    """The kernels that a case launches before or behind this one are the shipped ones."""
    for case in quick_cases(kernel):
        try:
            run_case(case, WithMutant(module, kernel))
        except (EmulatorError, AssertionError):
            return True
    return False


class WithMutant(Interpreter):
    """Runs one kernel of another module."""

    def __init__(self, module: Module, kernel: str) -> None:
        super().__init__(shipped_module(), max_steps=20_000)
        self.mutant, self.kernel = module, kernel

    def run(self, name: str, grid: tuple[int, int], values: list[int]) -> None:
        if name != self.kernel:
            super().run(name, grid, values)
            return
        shipped = self.machine
        self.machine = Machine(self.mutant, measure_traffic=False, max_steps=20_000)
        self.machine.memory = shipped.memory
        try:
            super().run(name, grid, values)
        finally:
            self.machine = shipped


def test_mutants_are_noticed() -> None:
    """Of a few small changes to each kernel (FSDP_CIERA_MUTANTS: how many) most have to make a quick case fail. Those that
    do not are mostly the same function: an or of bits that never meet as an xor, a bound that is never met."""
    noticed: Counter[bool] = Counter()
    for kernel in KERNELS:
        for (mutant, module), _ in zip(living_mutants(kernel, 0), range(MUTANTS_PER_KERNEL), strict=False):
            found = is_noticed(module, kernel)
            noticed[found] += 1
            if not found:
                print(
                    f"\n{kernel}:{mutant.line}: {mutant.before.strip()} -> {mutant.after.strip() or '(removed)'}",
                    end="",
                )
    score = noticed[True] / noticed.total()
    print(f"\n{noticed[True]} of {noticed.total()} mutants noticed, {100 * score:.0f} %")
    assert score >= 0.8
