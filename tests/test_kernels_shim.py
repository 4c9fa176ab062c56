"""The CUDA kernels' source, compiled by g++ with a shim (shim/shim.h) and run on the CPU, under sanitizers.

    plain     fibres, schedules by seed: results bit for bit, uninitialised shared memory, writes around buffers
    address   the same with AddressSanitizer and UndefinedBehaviorSanitizer
    thread    an OS thread for each CUDA thread, with ThreadSanitizer

Each of them also has to report the faults that `PLANTS` puts into a copy of the source. What this does not show: races
between CTAs, which run one after another here, and what nvcc and ptxas make of the source.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp_ciera.kernels import reference
from fsdp_ciera.kernels.changes import Changes, Form
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes

SHIM = Path(__file__).parent / "shim"
SOURCE = Path(__file__).parent.parent / "kernels" / "native"
GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on PATH: the kernels cannot be compiled for the CPU")

TILE, WARP, CTA = 8, 256, 2048  # values
NUM_WARPS = CTA // WARP
SIZES = [1, 7, 8, 9, WARP - 1, WARP, WARP + 1, CTA - 1, CTA, CTA + 1, 2 * CTA + 5]
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread", "-DSHIM_THREADS", "-pthread"],
}
SEEDS = {"plain": range(4), "address": range(2), "thread": [1]}
UNTOUCHED = 0xEE  # what buffers for results are filled with
FLOATS = list(FORMATS.values())
VALUES: list[FloatFormat | None] = [*FLOATS, None]  # None: bytes

Launch = Callable[[], None]


def name_of(fmt: FloatFormat | None) -> str:
    """What a format is called in the names of kernels."""
    return fmt.name if fmt else "byte"


# ---- builds and launches


class KernelFault(Exception):
    """A launch ended the driver; the message is what the driver or its sanitizer wrote."""


class Shim:
    """One build of the kernels, as a process that launches them on request (shim/driver.cpp)."""

    def __init__(self, build: str, command: list[str], fault: str = "") -> None:
        self.build = build
        self.seeds = SEEDS[build]
        self._command = command
        self._environment = {
            **os.environ,
            "SHIM_PLANTED": fault,
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TSAN_OPTIONS": "halt_on_error=1",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)

    def launch(
        self, name: str, num_ctas: int, *args: torch.Tensor | int | None, num_rows: int = 1, seed: int = 0
    ) -> None:
        """Runs kernel `name`, which changes the contiguous tensors among its arguments in place. `None` is a null pointer.

        Buffers lie at multiples of 16 bytes with seed 0, and anywhere that suits their dtype with others.
        """
        shifts = random.Random(f"{seed} {sum(arg.numel() for arg in args if isinstance(arg, torch.Tensor))}")
        request = [
            struct.pack("<I", len(name)),
            name.encode(),
            struct.pack("<QIII", seed, num_ctas, num_rows, len(args)),
        ]
        outputs = []
        for arg in args:
            if arg is None:
                request.append(b"\2")
            elif isinstance(arg, int):
                request.append(struct.pack("<BQ", 0, arg))
            else:
                raw = raw_bytes(arg)
                offset = shifts.choice([0, 1, 2, 3, 4, 8]) * arg.element_size() % 16 if seed else 0
                request += [struct.pack("<BIQ", 1, offset, len(raw)), raw.tobytes()]
                outputs.append(raw)
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"".join(request))
            process.stdin.flush()
        answer = process.stdout.read(sum(map(len, outputs)))
        if len(answer) < sum(map(len, outputs)):
            raise KernelFault(self._last_words())
        for raw in outputs:
            raw[:], answer = np.frombuffer(answer[: len(raw)], dtype=np.uint8), answer[len(raw) :]

    def close(self) -> None:
        """Ends the process; it must have had nothing to say."""
        if self._process is not None:
            words = self._last_words()
            assert not words, words
        self._messages.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._messages.seek(0)
        self._messages.truncate()
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env=self._environment,
        )

    def _last_words(self) -> str:
        """Waits for the end of the process -> what it wrote, and its status where that is not 0."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        status = process.wait(timeout=60)
        self._messages.seek(0)
        words = self._messages.read().decode(errors="replace")
        # AddressSanitizer says so wherever there are fibres; the shim tells it of each switch between them
        words = re.sub(r"==\d+==WARNING: ASan doesn't fully support makecontext/swapcontext.*\n", "", words)
        return words + (f"status {status}" if status else "")


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def compile_driver(build: str, source: Path, program: Path) -> list[str]:
    """Compiles the driver with the kernels in `source` -> the command that runs it. Cost: 4 to 10 seconds."""
    assert GXX is not None
    command = [GXX, "-std=c++17", "-O1", "-g1", "-fno-strict-aliasing", "-DCIERA_SHIM"]
    command += [*SANITIZERS[build], f"-I{source}", f"-I{SHIM}", "-o", str(program), str(SHIM / "driver.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [str(program)]


class Builds:
    """All builds, compiled in the background: of the source as it is, and of a copy with `PLANTS` in it."""

    def __init__(self, folder: Path) -> None:
        planted = folder / "planted"
        shutil.copytree(SOURCE, planted)
        for file, old, new in PLANTS:
            text = (planted / file).read_text()
            assert text.count(old) == 1, f"{file} has changed: plant the fault anew in {old}"
            (planted / file).write_text(text.replace(old, new))
        self._pool = ThreadPoolExecutor(2)
        self._commands: dict[tuple[str, bool], Future[list[str]]] = {
            (build, is_planted): self._pool.submit(
                compile_driver, build, planted if is_planted else SOURCE, folder / f"{build}{int(is_planted)}"
            )
            for is_planted in (False, True)
            for build in SANITIZERS
        }

    def command(self, build: str, is_planted: bool = False) -> list[str]:
        """What runs a build. Waits until it is compiled; skips the test where the machine cannot run it."""
        command = self._commands[build, is_planted].result()
        if build != "thread":
            return command
        # the kernel may place memory where ThreadSanitizer cannot have it, unless it is told not to randomise
        attempts = [command, ["setarch", "-R", *command]] if shutil.which("setarch") else [command]
        for attempt in attempts:
            tried = subprocess.run([*attempt, "--list"], capture_output=True, text=True)
            if tried.returncode == 0:
                return attempt
        pytest.skip(f"ThreadSanitizer does not start here: {tried.stderr.strip()}")

    def close(self) -> None:
        """Compiles no more."""
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    """Compiled once for all tests."""
    builds = Builds(tmp_path_factory.mktemp("shim"))
    yield builds
    builds.close()


@pytest.fixture(scope="module")
def run(builds: Builds) -> Iterator[Callable[[str], Shim]]:
    """Build -> its process with the source as it is, one for all tests."""
    shims: dict[str, Shim] = {}

    def run(build: str) -> Shim:
        if build not in shims:
            shims[build] = Shim(build, builds.command(build))
        return shims[build]

    yield run
    for shim in shims.values():
        shim.close()


@pytest.fixture(params=["plain", "address"])
def shim(request: pytest.FixtureRequest, run: Callable[[str], Shim]) -> Shim:
    """The builds that run everything."""
    return run(request.param)


# ---- data


def ctas(num_values: int) -> int:
    """How many CTAs handle so many values."""
    return -(-num_values // CTA)


def patterns(fmt: FloatFormat | None, num_values: int, seed: int) -> torch.Tensor:
    """Random bit patterns [num_values], as integers."""
    generator = torch.Generator().manual_seed(seed)
    item_bytes = fmt.item_bytes if fmt else 1
    raw = torch.randint(256, (num_values * item_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(fmt.int_dtype) if fmt else raw


def changed_patterns(last: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """`last`, of which about `share` changed: half of those by little, the others to anything."""
    generator = torch.Generator().manual_seed(seed + 1000)
    fresh = last.clone()
    dice = torch.rand(len(last), generator=generator)
    near = torch.randint(-4, 5, (len(last),), generator=generator).to(last.dtype)
    moved = dice < share / 2
    fresh[moved] += near[moved]
    replaced = (dice >= share / 2) & (dice < share)
    anything = torch.randint(0, 1 << 62, (len(last),), generator=generator).to(last.dtype)
    fresh[replaced] = anything[replaced]
    return fresh


def room(num_values: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Memory for results that a kernel has not touched yet."""
    return torch.full((num_values * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8).view(dtype)


def sums_by_cta(counts: torch.Tensor) -> torch.Tensor:
    """Counts [n] of values -> int64, for each CTA their sum."""
    padded = torch.zeros(ctas(len(counts)) * CTA, dtype=torch.int64)
    padded[: len(counts)] = counts
    return padded.view(-1, CTA).sum(dim=1)


# ---- every kernel against the reference


def check_split(shim: Shim, fmt: FloatFormat, num_values: int, seed: int) -> None:
    values = patterns(fmt, num_values, seed)
    sizes = [num_values, num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits)]
    expected = [room(size) for size in sizes]
    reference.split_planes(values.view(fmt.dtype), fmt, *expected)
    for wanted in ([True, True, True], [seed % 2 == 0, seed % 2 == 1, False]):
        wanted[2] &= fmt.top_bits > 0
        planes = [room(size) if is_wanted else None for size, is_wanted in zip(sizes, wanted, strict=True)]
        shim.launch(f"split_{fmt.name}", ctas(num_values), values, num_values, *planes, seed=seed)
        for plane, expect in zip(planes, expected, strict=True):
            assert plane is None or torch.equal(plane, expect)


def check_merge(shim: Shim, fmt: FloatFormat, num_values: int, num_rows: int, seed: int) -> None:
    strides = (num_values + seed, fmt.remainder_bytes(num_values) + 3 * seed, num_values + 2 * seed)
    exponents_stride, planes_stride, out_stride = strides
    num_low, num_top = num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits)
    exponents = torch.zeros(num_rows, exponents_stride, dtype=torch.uint8)
    planes = torch.zeros(num_rows, planes_stride, dtype=torch.uint8)
    expected = room(num_rows * out_stride, fmt.int_dtype).view(num_rows, out_stride)
    for row in range(num_rows):
        values = patterns(fmt, num_values, seed + row)
        expected[row, :num_values] = values
        low, top = planes[row, :num_low], planes[row, num_low : num_low + num_top]
        reference.split_planes(values.view(fmt.dtype), fmt, exponents[row, :num_values], low, top)
    out = room((num_rows - 1) * out_stride + num_values, fmt.int_dtype)
    shim.launch(
        f"merge_{fmt.name}",
        ctas(num_values),
        exponents.view(-1)[: (num_rows - 1) * exponents_stride + num_values],
        exponents_stride,
        planes.view(-1)[: (num_rows - 1) * planes_stride + num_low],
        planes.view(-1)[num_low : (num_rows - 1) * planes_stride + num_low + num_top] if num_top else None,
        planes_stride,
        num_values,
        out,
        out_stride,
        num_rows=num_rows,
        seed=seed,
    )
    assert torch.equal(out, expected.view(-1)[: len(out)])


def check_hash(shim: Shim, fmt: FloatFormat, num_values: int, block_size: int, seed: int) -> None:
    values = patterns(fmt, num_values, seed)
    expected = reference.hash_blocks(values.view(fmt.dtype), fmt, block_size)
    hashes = room(expected.numel(), torch.int64)
    num_ctas = -(-len(expected) // NUM_WARPS)
    shim.launch(f"hash_{fmt.name}", num_ctas, values, num_values, block_size, hashes, seed=seed)
    assert torch.equal(hashes, expected.view(-1))


def check_blocks(shim: Shim, fmt: FloatFormat, num_values: int, block_size: int, seed: int) -> None:
    values = patterns(fmt, num_values, seed)
    num_blocks = -(-num_values // block_size)
    exponents = torch.zeros(num_blocks * block_size, dtype=torch.uint8)
    reference.split_planes(values.view(fmt.dtype), fmt, exponents[:num_values])
    is_taken = torch.rand(num_blocks, generator=torch.Generator().manual_seed(seed)) < 0.6
    is_taken[-1] = seed % 2 == 0  # the last block may be short
    ranks = torch.where(is_taken, is_taken.cumsum(0) - 1, -1)
    num_ctas = -(-num_blocks // NUM_WARPS)

    num_missing = num_blocks * block_size - num_values if is_taken[-1] else 0
    num_taken = int(is_taken.sum()) * block_size - num_missing
    taken = room(num_taken)
    shim.launch(f"take_blocks_{fmt.name}", num_ctas, values, num_values, block_size, ranks, taken, seed=seed)
    assert torch.equal(taken, exponents.view(-1, block_size)[is_taken].view(-1)[:num_taken])

    cache = room(num_blocks * block_size)
    expected = torch.where(is_taken[:, None], exponents.view(-1, block_size), UNTOUCHED).view(-1)
    shim.launch("put_blocks", num_ctas, taken, num_taken, block_size, ranks, num_blocks, cache, seed=seed)
    assert torch.equal(cache, expected)


def check_checksum(shim: Shim, num_bytes: int, num_rows: int, num_ctas: int, seed: int) -> None:
    stride = num_bytes + 5 * seed
    rows = patterns(None, num_rows * stride, seed)
    sums = torch.zeros(num_rows, dtype=torch.int64)
    sent = rows[: (num_rows - 1) * stride + num_bytes]
    shim.launch("checksum", num_ctas, sent, stride, num_bytes, sums, num_rows=num_rows, seed=seed)
    shim.launch("finish_checksums", -(-num_rows // WARP), sums, num_rows, seed=seed)
    assert torch.equal(sums, reference.checksum(rows.view(num_rows, stride)[:, :num_bytes]))


def check_changes(shim: Shim, fmt: FloatFormat | None, num_values: int, escape: int, share: float, seed: int) -> None:
    """What the sender launches, then what the receiver does."""
    last = patterns(fmt, num_values, seed)
    fresh = changed_patterns(last, share, seed)
    expected = reference.find_changes(fresh.clone(), last.clone(), fmt, Form(escape))
    changes_up_to, literals_up_to = send_changes(shim, fmt, fresh, last, escape, expected, seed)
    assert expected.changed is not None
    bitmap = expected.changed.clone()
    if num_values % 8:
        bitmap[-1] |= 0xFF << num_values % 8 & 0xFF  # bits behind the last value do not count
    counted_changes, counted_literals = count(shim, bitmap, num_values, expected.moves, escape, seed)
    assert torch.equal(counted_changes, changes_up_to)
    assert fmt is None or torch.equal(counted_literals, literals_up_to)
    for out in (room(num_values, last.dtype), None):
        values = last.clone()
        damage = apply(shim, fmt, values, escape, bitmap, expected.moves, expected.literals, out, seed)
        assert not damage
        assert torch.equal(values, fresh)
        assert out is None or torch.equal(out, fresh)


def send_changes(
    shim: Shim,
    fmt: FloatFormat | None,
    fresh: torch.Tensor,
    last: torch.Tensor,
    escape: int,
    expected: Changes,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """scan -> cumsum -> compact, compared -> changes_up_to, literals_up_to."""
    num_values, name = len(fresh), name_of(fmt)
    bitmap = room(packed_bytes(num_values, 1))
    num_changed, num_literals = room(ctas(num_values), torch.int64), room(ctas(num_values), torch.int64)
    shim.launch(
        f"scan_{name}", ctas(num_values), fresh, last, num_values, escape, bitmap, num_changed, num_literals, seed=seed
    )
    assert expected.changed is not None
    assert torch.equal(bitmap, expected.changed)
    is_changed = fresh != last
    is_literal = torch.zeros_like(is_changed)
    if fmt is not None:
        is_literal[is_changed] = expected.moves == escape
    assert torch.equal(num_changed, sums_by_cta(is_changed))
    assert torch.equal(num_literals, sums_by_cta(is_literal))

    changes_up_to, literals_up_to = num_changed.cumsum(0), num_literals.cumsum(0)
    moves, literals = room(int(changes_up_to[-1])), room(int(literals_up_to[-1]), fresh.dtype)
    updated = last.clone()
    shim.launch(
        f"compact_{name}",
        ctas(num_values),
        fresh,
        updated,
        num_values,
        escape,
        bitmap,
        changes_up_to,
        literals_up_to,
        moves,
        literals,
        seed=seed,
    )
    assert torch.equal(moves, expected.moves)
    assert torch.equal(literals, expected.literals)
    assert torch.equal(updated, fresh)
    return changes_up_to, literals_up_to


def count(
    shim: Shim, bitmap: torch.Tensor, num_values: int, moves: torch.Tensor, escape: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """count_changes -> cumsum -> count_escapes -> cumsum."""
    num_ctas = ctas(num_values)
    num_changed, num_literals = room(num_ctas, torch.int64), room(num_ctas, torch.int64)
    shim.launch("count_changes", num_ctas, bitmap, num_values, num_changed, seed=seed)
    up_to = num_changed.cumsum(0)
    num_groups = -(-num_ctas // NUM_WARPS)
    shim.launch("count_escapes", num_groups, moves, len(moves), up_to, num_ctas, escape, num_literals, seed=seed)
    return up_to, num_literals.cumsum(0)


def apply(
    shim: Shim,
    fmt: FloatFormat | None,
    values: torch.Tensor,
    escape: int,
    bitmap: torch.Tensor,
    moves: torch.Tensor,
    literals: torch.Tensor,
    out: torch.Tensor | None,
    seed: int,
) -> bool:
    """What a receiver launches, in place on `values` -> whether the kernel found damage."""
    changes_up_to, literals_up_to = count(shim, bitmap, len(values), moves, escape, seed)
    damage = torch.zeros(1, dtype=torch.int32)
    shim.launch(
        f"apply_{name_of(fmt)}",
        ctas(len(values)),
        values,
        len(values),
        escape,
        bitmap,
        changes_up_to,
        literals_up_to if fmt else None,
        moves,
        len(moves),
        literals if fmt else None,
        len(literals) if fmt else 0,
        out,
        damage,
        seed=seed,
    )
    assert damage.item() in (0, 1)
    return bool(damage.item())


@pytest.mark.parametrize("fmt", FLOATS, ids=name_of)
def test_split(shim: Shim, fmt: FloatFormat) -> None:
    for num_values in SIZES:
        for seed in shim.seeds:
            check_split(shim, fmt, num_values, seed)


@pytest.mark.parametrize("fmt", FLOATS, ids=name_of)
def test_merge_of_rows(shim: Shim, fmt: FloatFormat) -> None:
    for num_values in SIZES:
        for seed in shim.seeds:
            check_merge(shim, fmt, num_values, 1 if num_values > CTA else 3, seed)


@pytest.mark.parametrize("fmt", FLOATS, ids=name_of)
def test_hash(shim: Shim, fmt: FloatFormat) -> None:
    for num_values, block_size in [(1, 64), (64, 64), (65, 8), (8 * 64 + 1, 64), (2 * 512 - 7, 512), (1500, 264)]:
        for seed in shim.seeds:
            check_hash(shim, fmt, num_values, block_size, seed)


@pytest.mark.parametrize("fmt", FLOATS, ids=name_of)
def test_take_and_put_blocks(shim: Shim, fmt: FloatFormat) -> None:
    for num_values, block_size in [(1, 64), (64, 64), (9 * 64 + 13, 64), (17 * 8 - 3, 8), (1200, 512), (1500, 264)]:
        for seed in shim.seeds:
            check_blocks(shim, fmt, num_values, block_size, seed)


def test_checksum_of_rows(shim: Shim) -> None:
    for num_bytes, num_rows, num_ctas in [(1, 1, 1), (7, 3, 1), (8, 2, 1), (2049, 3, 2), (4100, 2, 1), (8 * 700, 1, 2)]:
        for seed in shim.seeds:
            check_checksum(shim, num_bytes, num_rows, num_ctas, seed)
    check_checksum(shim, 3, 300, 1, 0)  # more rows than a CTA of finish_checksums has threads


@pytest.mark.parametrize("fmt", VALUES, ids=name_of)
def test_changes_at_every_size(shim: Shim, fmt: FloatFormat | None) -> None:
    for num_values in SIZES:
        for seed in shim.seeds:
            check_changes(shim, fmt, num_values, 255, 0.4, seed)


@pytest.mark.parametrize("fmt", VALUES, ids=name_of)
def test_changes_of_all_kinds(shim: Shim, fmt: FloatFormat | None) -> None:
    for escape, share in [(255, 0.0), (15, 0.01), (5, 1.0), (0, 0.3)]:
        check_changes(shim, fmt, 2 * CTA + 300, escape, share, seed=len(shim.seeds) - 1)
    last = patterns(fmt, CTA + 9, 7)
    fresh = last ^ 1 << (8 * last.element_size() - 1) if fmt else last + 1  # all change, nearly all of them far
    send_changes(shim, fmt, fresh, last, 9, reference.find_changes(fresh, last.clone(), fmt, Form(9)), 1)


@pytest.mark.parametrize("fmt", VALUES, ids=name_of)
def test_damaged_changes_are_found_and_stay_in_bounds(shim: Shim, fmt: FloatFormat | None) -> None:
    num_values, escape = 2 * CTA + 300, 9
    last = patterns(fmt, num_values, 5)
    fresh = changed_patterns(last, 0.3, 5)
    changes = reference.find_changes(fresh, last.clone(), fmt, Form(escape))
    bitmap, moves, literals = changes.changed, changes.moves, changes.literals
    assert bitmap is not None
    first = int((fresh != last)[:CTA].sum())  # moves of the first CTA, which is intact

    def received(bitmap: torch.Tensor, moves: torch.Tensor, literals: torch.Tensor) -> tuple[bool, torch.Tensor]:
        values, out = last.clone(), room(num_values, last.dtype)
        damage = apply(shim, fmt, values, escape, bitmap, moves, literals, out, seed=1)
        assert torch.equal(values, out)
        return damage, values

    for num_moves in (len(moves) - 1, len(moves) - 300, first, 0):
        damage, values = received(bitmap, moves[:num_moves], literals)
        assert damage
        assert num_moves < first or torch.equal(values[:CTA], fresh[:CTA])
        assert num_moves or torch.equal(values, last)
    assert received(torch.full_like(bitmap, 255), moves, literals)[0]
    if fmt is not None:
        for num_literals in (len(literals) - 1, 1, 0):
            assert received(bitmap, moves, literals[:num_literals])[0]
        assert received(bitmap, torch.full_like(moves, escape), literals)[0]
        damage, values = received(bitmap, torch.full_like(moves, escape), literals[:0])
        assert damage and torch.equal(values, last)


def test_the_driver_launches_every_kernel_there_is(builds: Builds) -> None:
    command = builds.command("plain")
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True).stdout.split()
    symbols = subprocess.run(["nm", "--defined-only", *command], capture_output=True, text=True, check=True).stdout
    functions = {name for _, kind, name in map(str.split, symbols.splitlines()) if kind == "T"}
    assert set(listed) == {name for name in functions if not name.startswith("_") and name != "main"}
    assert len(listed) == 29


# One CTA each: races between CTAs do not show. Damaged changes are left out: several threads may write the same 1 to
# `damage`, a race in C++ and none that matters in CUDA.
def test_no_data_races(run: Callable[[str], Shim]) -> None:
    shim = run("thread")
    for fmt in FLOATS:
        check_split(shim, fmt, 300, 1)
        check_merge(shim, fmt, 300, 2, 1)
        check_hash(shim, fmt, 9 * 64 - 3, 64, 1)
        check_blocks(shim, fmt, 9 * 64 - 3, 64, 1)
    for values in VALUES:
        check_changes(shim, values, CTA - 3, 15, 0.5, 1)
    check_checksum(shim, 8 * 300 + 1, 2, 2, 1)


# ---- planted faults, each of which has to be reported

# (file, text in it, what it becomes). None does anything unless its name is asked for.
PLANTS = [
    (
        "common.cuh",
        "if (left >= N && num_bytes % 16 == 0 && is_aligned(from, 16)) {",
        'if ((left >= N || shim::planted("read behind")) && num_bytes % 16 == 0 &&'
        ' (is_aligned(from, 16) || shim::planted("misaligned"))) {',
    ),
    (
        "kernels.cu",
        "if (lane == 31) warp_sums[warp] = up_to;\n  __syncthreads();",
        'if (lane == 31) warp_sums[warp + (shim::planted("shared") ? kWarps : 0)] = up_to;\n'
        '  if (shim::planted("shuffle as fence"))'
        " __shfl_xor_sync(kAllLanes, 0u, 1), (void)*(volatile u32*)(warp_sums + warp);\n"
        '  if (!shim::planted("no barrier")) __syncthreads();',
    ),
    (
        "kernels.cu",
        "sum0 = sum_over_warp(sum0);",
        'if (lane < 16 || !shim::planted("divergent shuffle")) sum0 = sum_over_warp(sum0);',
    ),
    (
        "kernels.cu",
        "if (threadIdx.x % 32 == 0) warp_counts[threadIdx.x / 32] = count;\n  __syncthreads();",
        'if (threadIdx.x % 32 == 0 && (count || !shim::planted("unwritten")))\n'
        "    warp_counts[threadIdx.x / 32] = count;\n"
        '  if (shim::planted("two barriers") && threadIdx.x < 64) __syncthreads();\n'
        '  else if (threadIdx.x < 40 || !shim::planted("part of a barrier")) __syncthreads();',
    ),
    (
        "kernels.cu",
        "bitmap[tile] = (u8)bits;",
        'bitmap[tile] = (u8)bits;\n    if (shim::planted("write before") && tile == 0) bitmap[-1] = 0;',
    ),
]


@pytest.fixture
def plant(builds: Builds) -> Iterator[Callable[[str, str], Shim]]:
    """Build and name of a fault -> a process that has it."""
    shims = []

    def plant(build: str, fault: str) -> Shim:
        assert any(f'planted("{fault}")' in new for _, _, new in PLANTS)
        shims.append(Shim(build, builds.command(build, is_planted=True), fault))
        return shims[-1]

    yield plant
    for shim in shims:
        shim.close()


@pytest.mark.parametrize("build", ["address", "thread"])
def test_planted_copy_without_faults_is_clean(builds: Builds, build: str) -> None:
    shim = Shim(build, builds.command(build, is_planted=True))
    check_changes(shim, FLOATS[0], 300, 15, 0.5, 1)
    check_hash(shim, FLOATS[0], 300, 64, 1)
    shim.close()


@pytest.mark.parametrize(
    "build, fault, report",
    [
        ("thread", "no barrier", r"data race"),
        ("thread", "shuffle as fence", r"data race"),
        ("address", "shared", r"runtime error: store to address .* with insufficient space"),
        ("address", "write before", r"heap-buffer-overflow[\s\S]*WRITE of size 1"),
        ("plain", "write before", r"shim: scan_bf16 wrote outside of a buffer"),
    ],
)
def test_planted_fault_in_changes(plant: Callable[[str, str], Shim], build: str, fault: str, report: str) -> None:
    with pytest.raises(KernelFault, match=report):
        check_changes(plant(build, fault), FLOATS[0], 300, 15, 0.5, 1 if build == "plain" else 0)


def test_missing_barrier_makes_wrong_results(plant: Callable[[str, str], Shim]) -> None:
    with pytest.raises((AssertionError, KernelFault)):  # even addresses are wrong
        check_changes(plant("plain", "no barrier"), FLOATS[0], CTA, 15, 0.5, 1)


@pytest.mark.parametrize(
    "fault, seed, report",
    [("read behind", 0, r"heap-buffer-overflow[\s\S]*READ of size"), ("misaligned", 1, r"runtime error: .*misaligned")],
)
def test_planted_fault_in_loads(plant: Callable[[str, str], Shim], fault: str, seed: int, report: str) -> None:
    with pytest.raises(KernelFault, match=report):
        for num_values in (9, 300):
            check_split(plant("address", fault), FLOATS[0], num_values, seed)


@pytest.mark.parametrize("build", ["plain", "thread"])
def test_shuffle_in_part_of_a_warp_is_a_deadlock(plant: Callable[[str, str], Shim], build: str) -> None:
    with pytest.raises(KernelFault, match=r"shim: deadlock: 16 threads wait, 240 have ended.*\sstatus 3"):
        check_hash(plant(build, "divergent shuffle"), FLOATS[0], 64, 64, 0)


@pytest.mark.parametrize(
    "build, fault, report",
    [
        ("plain", "part of a barrier", r"shim: deadlock: 40 threads wait, 216 have ended"),
        ("thread", "part of a barrier", r"shim: deadlock: 40 threads wait, 216 have ended"),
        ("plain", "two barriers", r"shim: divergent barrier"),
        ("thread", "two barriers", r"shim: divergent barrier"),
    ],
)
def test_planted_fault_in_a_count(plant: Callable[[str, str], Shim], build: str, fault: str, report: str) -> None:
    with pytest.raises(KernelFault, match=report):
        plant(build, fault).launch("count_changes", 1, patterns(None, 40, 0), 320, room(1, torch.int64))


def test_unwritten_shared_memory_makes_wrong_results(plant: Callable[[str, str], Shim]) -> None:
    num_changed = room(1, torch.int64)
    plant("plain", "unwritten").launch("count_changes", 1, torch.full((40,), 255, dtype=torch.uint8), 320, num_changed)
    assert num_changed.item() != 320
