"""The host build of the kernels against the reference, bit for bit: as it is installed, and compiled again for every kind of
processor that this one is; under sanitizers; with offsets beyond 2**31. And builds that are missing, stale or broken.

Outputs lie between guards, which nothing may touch, at odd offsets, and are full of garbage before.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kernels_reference import (
    BAD_GAPS,
    BF16,
    BOUNDARIES,
    BYTE_TYPES,
    FP16,
    FP32,
    changed_values,
    check_worked_examples,
    forms_of,
    named,
    random_values,
    special_patterns,
    values_of,
)

from fsdp_ciera.kernels import host, reference
from fsdp_ciera.kernels.changes import Among, Changes, Form, Received, Used
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.reference import CHUNK_VALUES

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++17", "-fPIC", "-shared", f"-I{host.FOLDER / 'native'}"]
FORMAT_LIST = list(FORMATS.values())
SIZES = st.one_of(st.integers(0, 5000), st.sampled_from([k * 64 + d for k in (1, 2, 8, 16) for d in (-1, 0, 1)]))
THREADS = st.integers(1, 3)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


# ---- builds


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave", "abm"])
BUILDS: dict[str, tuple[list[str], frozenset[str] | None]] = {  # name: compiler's flags, what the processor must have
    "x86-64": (["-O3", "-DCIERA_NO_CLONES", "-march=x86-64"], frozenset({"sse2"})),  # and without OpenMP
    "x86-64-v3": (["-O3", "-fopenmp", "-DCIERA_NO_CLONES", "-march=x86-64-v3"], V3),
    "x86-64-v4": (["-O3", "-fopenmp", "-DCIERA_NO_CLONES", "-march=x86-64-v4"],
                  V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "sanitizers": (["-O1", "-g", "-fopenmp", "-DCIERA_NO_CLONES", "-fsanitize=address,undefined",
                    "-fno-sanitize-recover=all"], None),
}  # fmt: skip


def can_run(name: str) -> bool:
    """Whether this processor can."""
    needed = BUILDS[name][1]
    return needed is None or needed <= processor_flags()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A folder for each of `BUILDS` that can run here, as `find_build` wants it. All are compiled at the same time."""
    if COMPILER is None:
        pytest.skip("there is no g++")
    digest, running, made = host.source_digest(host.FOLDER), {}, {}
    for name, (flags, _) in BUILDS.items():
        if not can_run(name):
            continue
        made[name] = tmp_path_factory.mktemp(name)
        (made[name] / "native").symlink_to(host.FOLDER / "native")
        sources = sorted(map(str, host.FOLDER.glob("native/*.cpp")))
        command = [COMPILER, *flags, *FLAGS, f'-DCIERA_SOURCE="{digest}"', *sources,
                   "-o", str(made[name] / f"_host{EXTENSION_SUFFIXES[0]}")]  # fmt: skip
        running[name] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for name, process in running.items():
        errors = process.communicate()[1]
        if process.returncode and name == "sanitizers":
            made.pop(name)  # test_under_sanitizers says so
        else:
            assert process.returncode == 0, errors
    yield made


@contextmanager
def use(library: ctypes.CDLL) -> Iterator[None]:
    """`host` calls `library`."""
    with patch.object(host, "_LIBRARY", library), patch.object(host, "_call", host._Caller()):
        yield


COMPILED = [pytest.param(name, marks=pytest.mark.kernels_only) for name in ("x86-64", "x86-64-v3", "x86-64-v4")]


@pytest.fixture(scope="module", params=["installed", *COMPILED])
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    """`host` calls the installed build, whose clone the loader picks, or one that is compiled for a kind of processor."""
    if request.param == "installed":
        if host.WHY_NOT and COMPILER is None:
            pytest.skip(host.WHY_NOT)
        assert not host.WHY_NOT, f"{host.WHY_NOT}: python setup.py build_ext --inplace"
        yield request.param
        return
    if not can_run(request.param):
        pytest.skip(f"this processor is no {request.param}")
    library, why_not = host.find_build(request.getfixturevalue("folders")[request.param])
    assert library is not None, why_not
    assert library._name != (host._LIBRARY and host._LIBRARY._name)
    with use(library):
        yield request.param


# ---- memory


class Guarded:
    """Tensors between guards, at odd offsets. Without guards they are allocations of just their size, for sanitizers."""

    GUARD_BYTES, GARBAGE = 64, 0xA5

    def __init__(self, with_guards: bool = True) -> None:
        self._with_guards = with_guards
        self._buffers: list[tuple[torch.Tensor, int, int]] = []

    def empty(self, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """Full of garbage."""
        num_bytes = num_values * dtype.itemsize
        if not self._with_guards:
            return torch.full((num_bytes,), self.GARBAGE, dtype=torch.uint8).view(dtype)
        start = self.GUARD_BYTES + dtype.itemsize
        buffer = torch.full((start + num_bytes + self.GUARD_BYTES,), self.GARBAGE, dtype=torch.uint8)
        self._buffers.append((buffer, start, start + num_bytes))
        return buffer[start : start + num_bytes].view(dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of one dimension."""
        (num_values,) = shape
        return self.copy(torch.zeros(num_values * dtype.itemsize, dtype=torch.uint8).view(dtype))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor with one dimension."""
        made = self.empty(len(tensor), tensor.dtype)
        made.view(torch.uint8).copy_(tensor.view(torch.uint8))
        return made

    def optional(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """`copy` of what is there."""
        return None if tensor is None else self.copy(tensor)

    def check(self) -> None:
        """No guard was touched."""
        for buffer, start, stop in self._buffers:
            assert (buffer[:start] == self.GARBAGE).all(), "written before the beginning"
            assert (buffer[stop:] == self.GARBAGE).all(), "written behind the end"


class OnThreads:
    """`host` on a number of threads; torch itself, which the reference is made of, stays on one."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            torch.set_num_threads(self._num_threads)
            try:
                return getattr(host, name)(*arguments)
            finally:
                torch.set_num_threads(1)

        return call


@contextmanager
def guarded(num_threads: int, with_guards: bool = True) -> Iterator[tuple[OnThreads, Guarded]]:
    """`host` on so many threads, and memory. Room that it sets aside has guards as well."""
    memory, before = Guarded(with_guards), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with patch.object(host, "empty_tensor", memory.empty), patch.object(host, "zeros_tensor", memory.zeros):
            yield OnThreads(num_threads), memory
    finally:
        torch.set_num_threads(before)
    memory.check()


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bit for bit, in shape and type too."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits_of(one), bits_of(other))


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Floats as integers."""
    return values.view(BYTE_TYPES[values.element_size()]) if values.is_floating_point() else values


# ---- comparisons

Tested: TypeAlias = "tuple[OnThreads, Guarded]"


def compare_planes(tested: Tested, values: torch.Tensor, fmt: FloatFormat) -> None:
    """Split, all planes and some, and merge."""
    kernels, memory = tested
    num_values, own = len(values), memory.copy(values)
    sizes = (num_values, num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits))
    for wanted in ((1, 1, 1), (1, 0, 0), (0, 1, 1)):
        expected = [
            torch.zeros(size, dtype=torch.uint8) if want else None for size, want in zip(sizes, wanted, strict=True)
        ]
        given = [memory.optional(plane) for plane in expected]
        reference.split_planes(values, fmt, *expected)
        kernels.split_planes(own, fmt, *given)
        assert all(same(plane, other) for plane, other in zip(given, expected, strict=True)), wanted
        if all(wanted):
            planes = given
    assert same(own, values)
    exponents, low, top = planes
    assert exponents is not None and low is not None
    out = memory.empty(num_values, fmt.dtype)
    kernels.merge_planes(exponents, low, top if fmt.top_bits else None, fmt, out)
    assert same(out, values)


def compare_hashes(tested: Tested, values: torch.Tensor, fmt: FloatFormat, block_size: int) -> None:
    """Of blocks, the last one short."""
    kernels, memory = tested
    assert same(
        kernels.hash_blocks(memory.copy(values), fmt, block_size), reference.hash_blocks(values, fmt, block_size)
    )


def compare_checksums(tested: Tested, data: torch.Tensor) -> None:
    """Of one row or three."""
    kernels, memory = tested
    for rows in (1, 3):
        row = memory.copy(data).view(1, -1)
        assert same(kernels.checksum(row.expand(rows, -1)), reference.checksum(row.expand(rows, -1)))


def received_of(found: Changes, fmt: FloatFormat | None, form: Form, num_values: int) -> Received:
    """What the receiver has of changes."""
    bits, small_bits = found.changed, None
    if found.small is not None:
        assert bits is not None
        bits, small_bits = (reference.gather_bits(bits, num_values, Among(found.small, flip)) for flip in (True, False))
        if not len(bits) or not len(small_bits):  # see test_bits_of_a_class_may_be_none_at_all
            bits, small_bits = (torch.cat([one, one.new_zeros(1)]) for one in (bits, small_bits))
    return Received(form, bits, small_bits, found.small_moves, found.moves, found.literals)


def compare_applied(tested: Tested, last: torch.Tensor, fmt: FloatFormat | None, received: Received) -> torch.Tensor:
    """-> what both made of it."""
    kernels, memory = tested
    expected, row = last.clone(), memory.copy(last)
    of_reference = reference.apply_changes(expected, fmt, received)
    own = replace(received, **{name: memory.optional(getattr(received, name))
                               for name in ("bits", "small_bits", "small_moves", "moves", "literals")})  # fmt: skip
    assert kernels.apply_changes(row, fmt, own) == of_reference
    assert same(row, expected)
    row, out = memory.copy(last), memory.empty(len(last), last.dtype)
    assert kernels.apply_changes(row, fmt, own, out) == of_reference
    assert same(row, expected) and same(out, expected)
    assert all(
        same(getattr(own, name), getattr(received, name)) for name in ("bits", "small_bits", "moves", "literals")
    )
    return expected


def compare_changes(
    tested: Tested, fresh: torch.Tensor, last: torch.Tensor, fmt: FloatFormat | None, form: Form
) -> None:
    """Both ways."""
    kernels, memory = tested
    own_last, own_fresh = memory.copy(last), memory.copy(fresh)
    expected = reference.find_changes(fresh, last, fmt, form)
    found = kernels.find_changes(own_fresh, own_last, fmt, form)
    for name, value in vars(expected).items():
        got = getattr(found, name)
        assert got == value if isinstance(value, int) else same(got, value), name
    assert same(own_last, last) and same(own_fresh, fresh)
    assert same(compare_applied(tested, last, fmt, received_of(expected, fmt, form, len(last))), fresh)


def compare_exponent_changes(tested: Tested, fresh: torch.Tensor, fmt: FloatFormat, share: float, seed: int) -> None:
    """Against last exponents of which a share differs."""
    kernels, memory = tested
    exponents = torch.empty(len(fresh), dtype=torch.uint8)
    reference.split_planes(fresh, fmt, exponents)
    last = changed_values(exponents, share, seed)
    own_fresh, own_last = memory.copy(fresh), memory.copy(last)
    for everywhere in (False, True):
        bits, moves = kernels.find_exponent_changes(own_fresh, own_last, fmt, everywhere)
        expected = reference.find_changes(exponents, last, None, Form(everywhere=everywhere))
        assert same(bits, expected.changed) and same(moves, expected.moves)
        of_reference = reference.find_exponent_changes(fresh, last, fmt, everywhere)
        assert same(of_reference[0], bits) and same(of_reference[1], moves)
    assert same(own_last, last) and same(own_fresh, fresh)


def compare_bitmaps(tested: Tested, num_values: int, share: float, seed: int) -> None:
    """Bits behind the last value are set in half of the cases: they must not count."""
    kernels, memory = tested
    generator = torch.Generator().manual_seed(seed)
    masks = torch.rand(2, num_values + -num_values % 8, generator=generator) < torch.tensor([[share], [0.5]])
    if seed % 2:
        masks[:, num_values:] = False
    bits, small = (memory.copy(reference.pack_bits(mask.view(torch.uint8), 1)) for mask in masks)
    assert (
        kernels.count_bits(bits, num_values)
        == reference.count_bits(bits, num_values)
        == int(masks[0, :num_values].sum())
    )
    for flip in (False, True):
        among = Among(small, flip)
        assert same(kernels.gather_bits(bits, num_values, among), reference.gather_bits(bits, num_values, among))
        assert same(kernels.gaps_of_bits(bits, num_values, among), reference.gaps_of_bits(bits, num_values, among))
    gaps = kernels.gaps_of_bits(bits, num_values)
    assert same(gaps, reference.gaps_of_bits(bits, num_values))
    for tried in (gaps, torch.cat([gaps, gaps[:1]]), random_values(num_values % 40, None, seed)):
        own = memory.copy(tried)
        for room in (num_values, num_values // 2):
            assert same(kernels.bits_of_gaps(own, room), reference.bits_of_gaps(tried, room))


def damaged(received: Received, fmt: FloatFormat | None, num_values: int, seed: int) -> Received:
    """As many moves as bits and literals as escapes, as callers see to, and bits of any length that mark anything."""
    generator = torch.Generator().manual_seed(seed)

    def bitmap(size: int) -> torch.Tensor:
        num_bytes = 1 + int(torch.randint(packed_bytes(size, 1) + 12, (), generator=generator))
        mask = torch.rand(8 * num_bytes, generator=generator) < float(torch.rand((), generator=generator))
        return reference.pack_bits(mask.view(torch.uint8), 1)

    small_bits = None if received.small_bits is None else bitmap(num_values)
    bits = None if received.bits is None else bitmap(num_values)
    counts = [0 if one is None else reference.count_bits(one, 8 * len(one)) for one in (small_bits, bits)]
    if bits is None:
        counts[1] = num_values
    small_moves, moves = (torch.randint(256, (count,), dtype=torch.uint8, generator=generator) for count in counts)
    form = received.form
    num_literals = int((moves == form.escape).sum() + (small_moves == form.small_escape).sum())
    literals = random_values(num_literals, fmt, seed)
    if fmt is not None:
        literals = literals.view(fmt.int_dtype)
    return Received(form, bits, small_bits, small_moves, moves, literals)


# ---- tests of every build


def test_worked_examples(build: str) -> None:
    check_worked_examples(host)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMAT_LIST), SIZES, THREADS, st.sampled_from([8, 64, 72, 512, 520, 4096]), st.integers(0, 2**32)
)
def test_planes_and_hashes(
    build: str, fmt: FloatFormat, num_values: int, threads: int, block_size: int, seed: int
) -> None:
    values = random_values(num_values, fmt, seed)
    with guarded(threads) as tested:
        compare_planes(tested, values, fmt)
        compare_hashes(tested, values, fmt, block_size)


@settings(max_examples=40, deadline=None)
@given(SIZES, THREADS, st.integers(0, 2**32))
def test_checksums(build: str, num_bytes: int, threads: int, seed: int) -> None:
    with guarded(threads) as tested:
        compare_checksums(tested, random_values(num_bytes, None, seed))


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from([*FORMAT_LIST, None]), SIZES, st.floats(0, 1), THREADS, st.integers(0, 2**32))
def test_changes(
    build: str, data: st.DataObject, fmt: FloatFormat | None, num_values: int, share: float, threads: int, seed: int
) -> None:
    last = random_values(num_values, fmt, seed)
    with guarded(threads) as tested:
        compare_changes(tested, changed_values(last, share, seed), last, fmt, data.draw(forms_of(fmt)))
        if fmt is not None:
            compare_exponent_changes(tested, last, fmt, share, seed)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.floats(0, 1), st.integers(0, 2**32))
@example(5000, 0.002, 0)
def test_bitmaps(build: str, num_values: int, share: float, seed: int) -> None:
    with guarded(1) as tested:
        compare_bitmaps(tested, num_values, share, seed)


@pytest.mark.parametrize(
    ("fmt", "num_values", "threads"),
    [
        (BF16, CHUNK_VALUES - 1, 1),
        (FP16, CHUNK_VALUES, 2),
        (FP32, CHUNK_VALUES + 1, 3),
        (None, CHUNK_VALUES + 70, 2),
        (BF16, 3 * CHUNK_VALUES + 77, 3),
        (FP16, 3 * CHUNK_VALUES + 77, 1),
        (FP32, 2 * CHUNK_VALUES + 13, 2),
    ],
    ids=named,
)
def test_around_a_chunk(build: str, fmt: FloatFormat | None, num_values: int, threads: int) -> None:
    last = random_values(num_values, fmt, threads)
    boundary = BOUNDARIES[fmt][-2:][0]
    sparse = (
        Form(15, boundary=boundary, small_escape=255) if threads % 2 else Form(255, boundary=boundary, small_escape=15)
    )
    with guarded(threads) as tested:
        if fmt is not None:
            compare_planes(tested, last, fmt)
            for block_size in (64, 3000, 2 * CHUNK_VALUES) if threads == 2 else (512,):
                compare_hashes(tested, last, fmt, block_size)
        compare_checksums(tested, last.view(torch.uint8))
        for share, form in ((0.0, Form()), (0.03, sparse), (0.9, Form(15)), (0.9, Form(15, everywhere=True))):
            compare_changes(tested, changed_values(last, share, threads), last, fmt, form)
            if fmt is not None:
                compare_exponent_changes(tested, last, fmt, share, threads)
        compare_bitmaps(tested, num_values, 0.01, threads)
        found = reference.find_changes(changed_values(last, 0.1, 0), last, fmt, sparse)
        compare_applied(
            tested, last, fmt, damaged(received_of(found, fmt, sparse, num_values), fmt, num_values, threads)
        )


@pytest.mark.parametrize("rows", [1, 2])
def test_checksums_of_several_pieces(build: str, rows: int) -> None:
    data = random_values(rows * (24 * CHUNK_VALUES + 21), None, 0).view(rows, -1)
    for threads in (1, 2, 3):
        with guarded(threads) as (kernels, _):
            assert same(kernels.checksum(data), reference.checksum(data))


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=named)
def test_every_16_bit_pattern(build: str, fmt: FloatFormat) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    assert fmt.item_bytes == 2 and len(patterns.unique()) == 1 << 16
    with guarded(2) as tested:
        compare_planes(tested, patterns.view(fmt.dtype), fmt)
        compare_hashes(tested, patterns.view(fmt.dtype), fmt, 64)
        for step in (1, -1, 7, -8, 127, -128, 1 << 14, -(1 << 15)):
            fresh = (patterns + torch.tensor(step, dtype=torch.int16)).view(fmt.dtype)
            form = Form(15 if step % 2 else 255, everywhere=step == -1, boundary=9 if step == 7 else 0)
            compare_changes(tested, fresh, patterns.view(fmt.dtype), fmt, form)
            compare_exponent_changes(tested, fresh, fmt, 0.5, 0)


@pytest.mark.parametrize("fmt", FORMAT_LIST, ids=named)
@pytest.mark.parametrize("form", [Form(15), Form(255), Form(255, everywhere=True), Form(15, boundary=1)], ids=named)
def test_special_values(build: str, fmt: FloatFormat, form: Form) -> None:
    """NaN payloads, both zeros, denormals, infinities: each after each."""
    specials = values_of(special_patterns(fmt), fmt)
    fresh, last = specials.repeat(len(specials)), bits_of(specials).repeat_interleave(len(specials)).view(fmt.dtype)
    with guarded(1) as tested:
        compare_planes(tested, fresh, fmt)
        compare_changes(tested, fresh, last, fmt, form)


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_at_all(build: str, threads: int) -> None:
    with guarded(threads) as tested:
        for fmt in FORMAT_LIST:
            nothing = torch.empty(0, dtype=fmt.dtype)
            compare_planes(tested, nothing, fmt)
            compare_hashes(tested, nothing, fmt, 64)
            for form in (Form(), Form(15, everywhere=True), Form(15, boundary=9)):
                compare_changes(tested, nothing, nothing, fmt, form)
            compare_exponent_changes(tested, nothing, fmt, 0.5, 0)
        compare_checksums(tested, torch.empty(0, dtype=torch.uint8))
        compare_changes(tested, torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), None, Form())
        compare_bitmaps(tested, 0, 0.5, 0)
        assert len(tested[0].checksum(torch.empty(0, 5, dtype=torch.uint8))) == 0


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([*FORMAT_LIST, None]), st.integers(1, 3000), THREADS, st.integers(0, 2**32))
def test_damaged_changes_do_the_same_and_touch_nothing_else(
    build: str, data: st.DataObject, fmt: FloatFormat | None, num_values: int, threads: int, seed: int
) -> None:
    last, form = random_values(num_values, fmt, seed), data.draw(forms_of(fmt))
    found = reference.find_changes(changed_values(last, 0.5, seed), last, fmt, form)
    received = damaged(received_of(found, fmt, form, num_values), fmt, num_values, seed)
    with guarded(threads) as tested:
        compare_applied(tested, last, fmt, received)


def test_bits_behind_a_class_and_too_few_bits(build: str) -> None:
    """By hand: 12 large values and 4 small ones."""
    last = values_of([0x3F80] * 12 + [0] * 4, BF16)
    moves = torch.tensor([2, 2, 2], dtype=torch.uint8)
    bits, small_bits = torch.tensor([1], dtype=torch.uint8), torch.tensor([0b1100_0001], dtype=torch.uint8)
    received = Received(Form(255, boundary=1), bits, small_bits, moves, moves[:1], bits_of(last[:0]))
    with guarded(1) as (kernels, memory):
        row = memory.copy(last)
        assert kernels.apply_changes(row, BF16, received) == Used(4, 1, 1, 0)
        assert same(row, values_of([0x3F81] + [0x3F80] * 11 + [1, 0, 0, 0], BF16))


@pytest.mark.parametrize("which", ["large", "small", "both"])
def test_bits_of_a_class_may_be_none_at_all(build: str, which: str) -> None:
    """A bitmap of no bytes is one of zeros and not a missing one. A damaged payload may hold it."""
    last, none = values_of([0x3F80] * 12 + [0] * 4, BF16), torch.empty(0, dtype=torch.uint8)
    bits = none if which in ("large", "both") else torch.tensor([0b11, 0], dtype=torch.uint8)
    small_bits = none if which in ("small", "both") else torch.tensor([0b11], dtype=torch.uint8)
    moves = torch.full((16,), 2, dtype=torch.uint8)  # more than are asked for, so that nothing outside is read
    received = Received(Form(255, boundary=1), bits, small_bits, moves, moves, bits_of(last[:0]))
    with guarded(1) as (kernels, memory):
        row = memory.copy(last)
        used = kernels.apply_changes(row, BF16, received)
    assert used == Used(4, 2 if len(small_bits) else 0, 2 if len(bits) else 0, 0)
    large, small = (([up] * 2 + [same_as_before] * 2 if len(one) else [same_as_before] * 4)
                    for up, same_as_before, one in ((0x3F81, 0x3F80, bits), (1, 0, small_bits)))  # fmt: skip
    assert same(row, values_of(large + [0x3F80] * 8 + small, BF16))


@pytest.mark.parametrize(("what_is_wrong", "gaps", "num_values"), BAD_GAPS, ids=[one[0] for one in BAD_GAPS])
def test_gaps_that_lead_out_are_refused(build: str, what_is_wrong: str, gaps: list[int], num_values: int) -> None:
    with guarded(1) as (kernels, memory):
        assert kernels.bits_of_gaps(memory.copy(torch.tensor(gaps, dtype=torch.uint8)), num_values) is None


# ---- sanitizers

LAST_WORD = "all compared"


def run_under_sanitizers(folder: str, seeds: int) -> None:
    """In a process of its own: a small set of comparisons, then a read behind the end, which has to be found."""
    library, why_not = host.find_build(Path(folder))
    assert library is not None, why_not
    with use(library):
        for seed in range(seeds):
            fmt = [*FORMAT_LIST, None][seed % 4]
            num_values = [0, 1, 63, 64, 65, 511, 513, 1000, 4999, CHUNK_VALUES + 65][seed % 10]
            last = random_values(num_values, fmt, seed)
            with guarded(1 + seed % 2, with_guards=False) as tested:
                if fmt is not None:
                    compare_planes(tested, last, fmt)
                    compare_hashes(tested, last, fmt, 72)
                compare_checksums(tested, last.view(torch.uint8))
                for boundary in BOUNDARIES[fmt]:
                    form = Form(15 if seed % 3 else 255, boundary=boundary, small_escape=15 if seed % 2 else 255)
                    compare_changes(tested, changed_values(last, seed % 5 / 4, seed), last, fmt, form)
                    found = reference.find_changes(changed_values(last, 0.5, seed), last, fmt, form)
                    received = received_of(found, fmt, form, num_values)
                    compare_applied(tested, last, fmt, damaged(received, fmt, num_values, seed))
                compare_changes(tested, changed_values(last, 0.8, seed), last, fmt, Form(15, everywhere=True))
                compare_bitmaps(tested, num_values, seed % 7 / 6, seed)
        check_worked_examples(host)
        print(LAST_WORD, flush=True)
        bits = torch.zeros(8, dtype=torch.uint8)
        host._call("count_bits", "", bits.data_ptr(), 8 * len(bits) + 64)


@needs_compiler
@pytest.mark.kernels_only
def test_under_sanitizers(folders: dict[str, Path]) -> None:
    if "sanitizers" not in folders:
        pytest.skip("the compiler has no sanitizers")
    assert COMPILER is not None
    preloaded = []
    for name in ("libasan.so", "libstdc++.so"):
        found = subprocess.run(
            [COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout
        preloaded.append(found.strip())
    if not all(Path(one).is_absolute() and Path(one).exists() for one in preloaded):
        pytest.skip(f"no {' or no '.join(preloaded)}")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    code = f"import test_host_build; test_host_build.run_under_sanitizers({str(folders['sanitizers'])!r}, 40)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == LAST_WORD, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-4000:]  # the read at the end


# ---- offsets beyond 2**31

OFFSETS = r"""
#define CIERA_SOURCE ""
#include "host_planes.cpp"
#include "host_changes.cpp"

#include <cassert>
#include <cstdint>
#include <cstdio>
#include <sys/mman.h>
#include <type_traits>
#undef NDEBUG

constexpr i64 kFar = 3ll << 31;  // a multiple of 64; 6.4e9
u8* const kBase = reinterpret_cast<u8*>(1ll << 44);  // never read or written

template <class F>
void check_planes() {
  const Planes<F> at = Planes<F>{kBase, kBase, kBase}.at(kFar);
  assert(at.exponents - kBase == kFar);
  assert(at.low - kBase == kFar * (i64)(sizeof(typename F::Word) - 1));
  assert(at.top - kBase == kFar / 8 * (8 - F::kExponentBits));
  const Planes<F> none = Planes<F>{nullptr, nullptr, nullptr}.at(kFar);
  assert(!none.exponents && !none.low && !none.top);
}

int main() {
  check_planes<bf16>();
  check_planes<fp16>();
  check_planes<fp32>();

  static_assert(sizeof(i64) == 8 && std::is_same<decltype(packed_bytes(1, 1)), i64>::value);
  static_assert(std::is_same<decltype(least(1, 1)), i64>::value);
  assert(packed_bytes(kFar + 1, 3) == 2415919105);
  assert(packed_bytes(kFar + 1, 1) == 805306369);
  assert(least(kFar, kFar + 1) == kFar && least(kFar + 1, kFar) == kFar);

  for (int threads = 1; threads <= 2; threads++) {  // pieces cover all values, and starts are where they should be
    std::atomic<i64> num_pieces{0}, total{0}, last_start{0}, last_count{0};
    for_pieces(kFar + 5, threads, [&](auto piece, auto start, auto count) {
      static_assert(std::is_same<decltype(piece), i64>::value && std::is_same<decltype(start), i64>::value);
      static_assert(std::is_same<decltype(count), i64>::value);
      num_pieces++, total += count;
      assert(start == piece * 131072);
      if (piece == 49152) last_start = start, last_count = count;
    });
    assert(num_pieces == 49153 && total == kFar + 5 && last_start == kFar && last_count == 5);
  }

  u8 bytes[24];  // of a bitmap that would begin far before them
  for (int i = 0; i < 24; i++) bytes[i] = (u8)(37 * i + 11);
  const u8* bitmap = reinterpret_cast<const u8*>(reinterpret_cast<uintptr_t>(bytes) - kFar / 8);
  u64 first, expected;
  memcpy(&first, bytes, 8);
  assert(load_word(bitmap, kFar, kFar + 64) == first);
  assert(load_word(bitmap, kFar, kFar + 5) == (first & 31));
  BitReader reader = {bitmap, kFar / 8 + 24, kFar + 4};
  memcpy(&expected, bytes, 8);
  expected = expected >> 4 | (u64)bytes[8] << 60;
  assert(reader.read(64) == expected && reader.position == kFar + 68);
  BitReader end = {bitmap, kFar / 8 + 1, kFar + 4};
  assert(end.read(64) == (u64)(bytes[0] >> 4) && end.read(64) == 0);
  store_word(0x0102030405060708ull, const_cast<u8*>(bitmap), kFar, kFar + 64);
  assert(bytes[0] == 8 && bytes[7] == 1 && bytes[8] == (u8)(37 * 8 + 11));

  u64 word;
  memcpy(&word, bytes, 8);
  assert(sum_words(bytes, 8, kFar) == mix(word ^ ((kFar + 1) * kGamma)));
  u64 sum0 = 0, sum1 = 0, step = (kFar + 1ull) * 0x9E3779B97F4A7C15ull;
  add_word(word, kFar, sum0, sum1);
  assert(sum0 == mix(word ^ (step + 0x243F6A8885A308D3ull)) && sum1 == mix(word ^ (step + 0x13198A2E03707344ull)));

  // what pieces left at their own places moves up: pages that are not touched take no memory
  const i64 num_bytes = 4 * (kFar + 4);
  void* mapped = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    puts("no mapping");
    return 0;
  }
  u32* array = static_cast<u32*>(mapped);
  array[kFar] = 7, array[kFar + 1] = 8;
  std::vector<Found> found(4, Found{0, 0, 0, 0});
  found[0].num_literals = 1, found[3].num_literals = 2;
  close_up(array, found, 1ll << 31, [](const Found& one) { return one.num_literals; });
  assert(array[0] == 0 && array[1] == 7 && array[2] == 8);
  puts("fine");
  return 0;
}
"""


@needs_compiler
@pytest.mark.kernels_only
def test_offsets_beyond_two_to_the_31(tmp_path: Path) -> None:
    assert COMPILER is not None
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    source.write_text(OFFSETS)
    flags = ["-std=c++17", "-fopenmp", "-DCIERA_NO_CLONES", "-w", f"-I{host.FOLDER / 'native'}"]
    compiled = subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "no mapping" in done.stdout:
        pytest.skip("everything else is fine, but no 24 GiB of addresses are to be had for close_up")
    assert done.stdout == "fine\n"


# ---- builds that do not serve


@needs_compiler
@pytest.mark.kernels_only
def test_a_stale_build_is_found_out(folders: dict[str, Path], tmp_path: Path) -> None:
    made = next(folder for name, folder in folders.items() if name != "sanitizers")
    shutil.copytree(host.FOLDER / "native", tmp_path / "native")
    library_path = shutil.copy(made / f"_host{EXTENSION_SUFFIXES[0]}", tmp_path)
    library, why_not = host.find_build(tmp_path)
    assert library is not None and not why_not
    for pattern in ("*.cpp", "*.cuh", "*.hpp"):
        source = sorted((tmp_path / "native").glob(pattern))[-1]
        text = source.read_text()
        source.write_text(text + "\n")
        assert host.source_digest(tmp_path) != host.source_digest(host.FOLDER)
        assert host.find_build(tmp_path) == (None, f"{Path(library_path).name} was built from other sources")
        source.write_text(text)
        assert host.find_build(tmp_path)[0] is not None


def test_no_build_and_why(tmp_path: Path) -> None:
    library, why_not = host.find_build(tmp_path)
    assert library is None and "could not be compiled" in why_not and "g++" in why_not


def test_a_library_that_cannot_be_loaded_and_why(tmp_path: Path) -> None:
    path = tmp_path / f"_host{EXTENSION_SUFFIXES[0]}"
    path.write_bytes(b"no library")
    library, why_not = host.find_build(tmp_path)
    assert (
        library is None and why_not.startswith(f"{path.name} cannot be loaded: ") and len(why_not) > len(path.name) + 20
    )


@needs_compiler
def test_a_library_without_its_functions_and_why(tmp_path: Path) -> None:
    assert COMPILER is not None
    path, source = tmp_path / f"_host{EXTENSION_SUFFIXES[0]}", tmp_path / "other.cpp"
    source.write_text("int other;\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    library, why_not = host.find_build(tmp_path)
    assert library is None and "cannot be loaded" in why_not and "ciera_source" in why_not
