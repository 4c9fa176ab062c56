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
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import emulator.machine
from emulator import EmulatorError, KernelCoverage, Machine, Module, OutOfBounds, ParseError, UnknownOpcode, mutants
from emulator.batch import Batch
from emulator.datatypes import Array as Numbers
from emulator.races import Conflict, RaceShadow
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat
from fsdp_ciera.kernels.launch import PTX_FILE
from kernel_cases import (
    CTA_VALUES,
    CTA_WARPS,
    FLOATS,
    THREADS,
    Array,
    Case,
    all_cases,
    hash_case,
    merge_case,
    mixed,
    some_values,
    split_case,
    take_case,
)

PTX_TEXT = PTX_FILE.read_text()
KERNELS = re.findall(r"\.entry\s+(\w+)", PTX_TEXT)
SEEDS = range(4)
FIRST_ADDRESS, ADDRESS_STEP = 1 << 44, 1 << 34  # every buffer lies more than 2**32 bytes from the next
MUTANTS_PER_KERNEL = int(os.environ.get("FSDP_CIERA_MUTANTS", "4"))


@cache
def shipped_module() -> Module:
    return Module(PTX_TEXT)


@cache
def cases_of() -> dict[str, list[Case]]:
    """By kernel; those of several kernels are the `pipelines`."""
    found = defaultdict(list)
    for case in all_cases():
        found[case.kernels[0] if len(case.kernels) == 1 else "pipelines"].append(case)
    return found


class Unordered(RaceShadow):
    """Of memory in which races are no matter: stores of one size and one value. PTX defines what such a race gives (memory
    consistency model, "Conflict and Data-races": of uniform size)."""

    def check(self, kind: str, clocks: Any, positions: Numbers, size: int, threads: Numbers) -> Conflict | None:
        return None


class Interpreter:
    """An executor. Buffers have exact bounds, wherever they begin."""

    def __init__(
        self, module: Module, seed: int | None = None, check_races: bool = True, max_steps: int = 1_000_000
    ) -> None:
        self.machine = Machine(module, seed=seed, check_races=check_races, measure_traffic=False, max_steps=max_steps)
        self.next_address = FIRST_ADDRESS
        self.buffers: dict[int, npt.NDArray[np.uint8]] = {}

    def upload(self, array: Array, misalignment: int = 0) -> int:
        return self._map(np.frombuffer(array.tobytes(), np.uint8).copy(), misalignment)

    def alloc(self, num_bytes: int, misalignment: int = 0) -> int:
        address = self._map(np.full(num_bytes, 0xCD, np.uint8), misalignment)
        self.machine.memory.region_at(address).state[:] = 0
        return address

    def flag(self) -> int:
        address = self.upload(np.zeros(1, np.uint32))
        self.machine.memory.region_at(address).race_shadow = lambda: Unordered(16)  # type: ignore[method-assign]
        return address

    def _map(self, array: npt.NDArray[np.uint8], misalignment: int) -> int:
        address = self.next_address + misalignment
        self.next_address += ADDRESS_STEP
        self.machine.map_host(array, address)
        self.buffers[address] = array
        return address

    def launch(self, kernel: str, grid: tuple[int, int], *args: int) -> None:
        self.machine.launch(kernel, grid, THREADS, *args)

    def download(self, address: int, dtype: npt.DTypeLike, count: int) -> Array:
        return self.machine.download(address, dtype, count)

    def untouched(self, address: int, num_bytes: int) -> bool:
        return not self.machine.written(address, num_bytes).any()


def run(case: Case, interpreter: Interpreter) -> None:
    try:
        case.run(interpreter)
    except (EmulatorError, AssertionError) as error:
        error.add_note(f"in case {case.name}")
        raise


# ---- all cases, and what they cover

COVERAGE: dict[str, KernelCoverage] = {}
RAN: set[str] = set()


def run_once(group: str) -> None:
    """Runs the cases of a kernel, and counts what they cover. Patterns of 16 bits are too many to look for races too."""
    if group in RAN:
        return
    RAN.add(group)
    if not COVERAGE:
        COVERAGE.update(Machine(shipped_module()).coverage)
    for case in cases_of()[group]:
        interpreter = Interpreter(shipped_module(), check_races=not case.name.endswith("-all"))
        interpreter.machine.coverage = COVERAGE
        run(case, interpreter)


@pytest.mark.parametrize("group", [*KERNELS, "pipelines"])
def test_results_are_the_references(group: str) -> None:
    run_once(group)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_schedule_matters(kernel: str) -> None:
    for case in quick_cases(kernel):
        for seed in SEEDS:
            run(case, Interpreter(shipped_module(), seed))


def quick_cases(kernel: str) -> list[Case]:
    return [case for case in cases_of()[kernel] if case.quick]


# Branches that cannot go both ways, by kernel. The first value of a tile is always there where the tile is: `i < left` of
# i = 0 is asked once for each scalar load or store. What nvcc makes of the loop of `checksum`, four rounds at a time, asks
# in the first three for a tail that only the last round can have.
MOST_ONE_SIDED = {
    "split_bf16": 2, "merge_bf16": 2, "take_blocks_bf16": 1, "compact_bf16": 3, "apply_bf16": 2,
    "split_fp16": 3, "merge_fp16": 3, "take_blocks_fp16": 1, "compact_fp16": 3, "apply_fp16": 2,
    "split_fp32": 4, "merge_fp32": 4, "take_blocks_fp32": 1, "compact_fp32": 3, "apply_fp32": 2,
    "compact_byte": 3, "apply_byte": 2, "checksum": 12,
}  # fmt: skip
# The 64-bit division in checksum, for rows of more than 2**35 bytes; test_positions_beyond_32_bits runs it.
MOST_MISSED = {"checksum": 2}


def test_coverage() -> None:
    """Every instruction runs, every branch goes both ways, but for those above."""
    for group in (*KERNELS, "pipelines"):
        run_once(group)
    executed, total = (sum(getattr(c, name) for c in COVERAGE.values()) for name in ("executed", "total"))
    one_sided = sum(len(c.one_sided) for c in COVERAGE.values())
    branches = sum(i.opcode == "bra" and i.guard is not None for c in COVERAGE.values() for i in c.instructions)
    print(f"\n{executed} of {total} instructions ran, {branches - one_sided} of {branches} branches went both ways")
    for kernel, coverage in COVERAGE.items():
        assert len(coverage.missed) <= MOST_MISSED.get(kernel, 0), [(i.line, i.text) for i in coverage.missed]
        one_sided_here = [(i.line, i.text) for i in coverage.one_sided]
        assert len(one_sided_here) <= MOST_ONE_SIDED.get(kernel, 0), (kernel, one_sided_here)
    assert one_sided < 0.06 * branches


@pytest.mark.parametrize("family", ["split", "merge", "hash", "take_blocks"])
@pytest.mark.parametrize("fmt", [fmt for fmt in FLOATS if not fmt.top_bits], ids=lambda fmt: fmt.name)
def test_aligned_buffers_are_accessed_in_vectors(family: str, fmt: FloatFormat) -> None:
    """Results would be the same without. fp16 has packed bits, which are read and written by bytes."""
    values = some_values(fmt, CTA_VALUES)
    runs = {
        "split": split_case(fmt, values),
        "merge": merge_case(fmt, values),
        "hash": hash_case(fmt, values, 512),
        "take_blocks": take_case(fmt, values, 512, 1.0),
    }
    interpreter = Interpreter(shipped_module())
    runs[family](interpreter)
    coverage = interpreter.machine.coverage[f"{family}_{fmt.name}"]
    ran = [i for i, count in zip(coverage.instructions, coverage.executions, strict=True) if count]
    accesses = [i for i in ran if "global" in i.modifiers and i.modifiers[-1] != "u64"]  # 64 bits: hashes and ranks
    assert accesses and not [i.text for i in accesses if not {"v2", "v4"} & {*i.modifiers}]


# ---- positions beyond 32 bits

FAR_CTAS = (1 << 21) + 5  # with 2048 values each, and blocks of 64 and more
FAR_VALUES, FAR_BLOCKS = FAR_CTAS * CTA_VALUES, FAR_CTAS * CTA_WARPS
FAR_PLACES = (1 << 33) + 7  # of moves, literals and blocks of exponents


class FarInterpreter(Interpreter):
    """Launches with block numbers from FAR_CTAS on, as the last part of a launch that begins at 0: counts are larger by what
    comes before, and pointers are where a buffer would begin whose last part is ours. Only that part is there."""

    def launch(self, kernel: str, grid: tuple[int, int], *args: int) -> None:
        family, _, form = kernel.rpartition("_") if kernel.rpartition("_")[2] in FORM_BYTES else (kernel, "", "byte")
        moved, contents = far_arguments(family, form, list(args))
        if family == "count_escapes":  # which reads the entry before its own too
            before = self.upload(np.concatenate([[0], self.buffers[args[2]].view(np.int64)]))
            moved[2] += before + 8 - args[2]
            contents = {before: FAR_PLACES}
        shifted = [(self.buffers[address].view(np.int64), by) for address, by in contents.items()]
        for numbers, by in shifted:
            numbers[numbers >= 0] += by
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(emulator.machine, "Batch", FarBatch)
                super().launch(kernel, grid, *moved)
        finally:
            for numbers, by in shifted:
                numbers[numbers >= 0] -= by


class FarBatch(Batch):
    """CTAs that take themselves for later ones of a larger grid."""

    far_ctas = FAR_CTAS

    def _special_registers(self, in_cta: Numbers) -> dict[str, Numbers]:
        numbers = super()._special_registers(in_cta)
        for name in ("%ctaid.x", "%nctaid.x"):
            numbers[name] = numbers[name] + np.uint32(self.far_ctas)
        return numbers


FORM_BYTES = {**{fmt.name: fmt.item_bytes for fmt in FORMATS.values()}, "byte": 1}
TOP_BITS = {**{fmt.name: fmt.top_bits for fmt in FORMATS.values()}, "byte": 0}


def far_arguments(family: str, form: str, args: list[int]) -> tuple[list[int], dict[int, int]]:
    """-> what the far launch gets, and which arrays of offsets or ranks are larger, by how much."""
    item, top = FORM_BYTES[form], TOP_BITS[form]
    values, bits, ctas, places = -FAR_VALUES, -FAR_VALUES // 8, -8 * FAR_CTAS, -FAR_PLACES
    contents: dict[int, int] = {}
    if family == "split":
        steps = [values * item, FAR_VALUES, values, values * (item - 1), bits * top]
    elif family == "merge":
        steps = [values, 0, values * (item - 1), bits * top, 0, FAR_VALUES, values * item, 0]
    elif family == "hash":
        in_blocks = FAR_BLOCKS * args[2]
        steps = [-in_blocks * item, in_blocks, 0, -16 * FAR_BLOCKS]
    elif family == "take_blocks":
        in_blocks = FAR_BLOCKS * args[2]
        steps = [-in_blocks * item, in_blocks, 0, -8 * FAR_BLOCKS, places * args[2]]
        contents = {args[3]: FAR_PLACES}
    elif family == "put_blocks":
        steps = [places * args[2], FAR_PLACES * args[2], 0, -8 * FAR_BLOCKS, FAR_BLOCKS, -FAR_BLOCKS * args[2]]
        contents = {args[3]: FAR_PLACES}
    elif family == "scan":
        steps = [values * item, values * item, FAR_VALUES, 0, bits, ctas, ctas]
    elif family == "compact":
        steps = [values * item, values * item, FAR_VALUES, 0, bits, ctas, ctas, places, places * item]
        contents = {args[5]: FAR_PLACES, args[6]: FAR_PLACES}
    elif family == "apply":
        steps = [values * item, FAR_VALUES, 0, bits, ctas, ctas, places, FAR_PLACES, places * item, FAR_PLACES,
                 values * item, 0]  # fmt: skip
        contents = {args[4]: FAR_PLACES, args[5]: FAR_PLACES}
    elif family == "count_changes":
        steps = [bits, FAR_VALUES, ctas]
    elif family == "count_escapes":
        steps = [places, FAR_PLACES, -8 * FAR_BLOCKS, FAR_BLOCKS, 0, -8 * FAR_BLOCKS]
    else:
        assert family == "finish_checksums"
        steps = [ctas * THREADS, FAR_CTAS * THREADS]
    is_count = {"split": (1,), "merge": (5,), "apply": (7, 9)}.get(family, ())  # which may be 0; a pointer of 0 is none
    return [
        a + step if a or n in is_count else 0 for n, (a, step) in enumerate(zip(args, steps, strict=True))
    ], contents


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "checksum"])
def test_positions_beyond_32_bits(kernel: str) -> None:
    for case in quick_cases(kernel):
        if "no-offsets" not in case.name and "no-literals" not in case.name:
            run(case, FarInterpreter(shipped_module()))


def test_checksums_of_rows_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words from number 2**34 on: they are mixed with others, so this is no shifted case."""
    monkeypatch.setattr(FarBatch, "far_ctas", first := 1 << 26)
    monkeypatch.setattr(emulator.machine, "Batch", FarBatch)
    data = np.random.default_rng(0).integers(0, 256, 8 * (THREADS + 77) - 3, np.uint8)
    interpreter, before = Interpreter(shipped_module()), first * THREADS
    interpreter.machine.coverage = COVERAGE or interpreter.machine.coverage
    bytes_, sums = interpreter.upload(data), interpreter.upload(np.zeros(1, np.uint64))
    interpreter.launch("checksum", (2, 1), bytes_ - 8 * before, 0, 8 * before + len(data), sums)
    words = np.pad(data, (0, -len(data) % 8)).view(np.uint64).tolist()
    expected = sum(mixed(word, before + j) for j, word in enumerate(words)) % (1 << 64)
    assert interpreter.download(sums, np.uint64, 1).tolist() == [expected]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: no kernel with a fault can be compiled")
def test_positions_of_32_bits_are_noticed(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent / "kernels" / "native"
    for file in source.glob("*.cu*"):
        text = file.read_text()
        right, wrong = "start = tile * kTile", "start = (i64)(u32)(tile * kTile)"
        assert file.suffix != ".cu" or right in text
        (tmp_path / file.name).write_text(text.replace(right, wrong))
    command = ["nvcc", "-ptx", "-arch=compute_80", "-std=c++17", "kernels.cu", "-o", "kernels.ptx"]
    subprocess.run(command, check=True, cwd=tmp_path)
    module = Module((tmp_path / "kernels.ptx").read_text())
    for kernel in ("split_bf16", "merge_fp16", "scan_fp32", "apply_byte"):
        case = quick_cases(kernel)[0]
        run(case, Interpreter(module))
        with pytest.raises(OutOfBounds):
            run(case, FarInterpreter(module))


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
    for case in quick_cases(kernel):
        try:
            case.run(Interpreter(module, max_steps=20_000))
        except (EmulatorError, AssertionError):
            return True
    return False


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
