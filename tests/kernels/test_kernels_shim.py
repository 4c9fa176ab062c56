"""The CUDA kernels' source, compiled by g++ with a shim (shim/shim.h) and run on the CPU, under sanitizers.

    plain     fibres, schedules by seed: results bit for bit, uninitialised shared memory, writes around buffers
    address   the same with AddressSanitizer and UndefinedBehaviorSanitizer
    thread    an OS thread for each CUDA thread, with ThreadSanitizer

Cases are those of kernel_cases.py. Each build also has to report the faults that `PLANTS` puts into a copy of the source. What
this does not show: races between CTAs, which run one after another here, and what nvcc and ptxas make of the source.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fsdp_ciera.kernels import launch as launching
from fsdp_ciera.kernels.launch import PTX_FILE, Argument
from kernel_cases import (
    BF16,
    Case,
    Damages,
    GuardedMemory,
    Unit,
    all_cases,
    hash_case,
    pack_case,
    receive_case,
    run_case,
    scan_case,
    scan_symbols_case,
    whole,
)
from places import NATIVE, SHIM

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on PATH: the kernels cannot be compiled for the CPU")

SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread", "-DSHIM_THREADS", "-pthread"],
}
UNTOUCHED = 0xEE  # what memory for results is filled with
KERNELS = re.findall(r"\.entry\s+(\w+)", PTX_FILE.read_text())


# ---- builds and launches


class KernelFault(Exception):
    """A launch ended the driver; the message is what the driver or its sanitizer wrote."""


class Shim:
    """One build of the kernels, as a process that launches them on request (shim/driver.cpp)."""

    def __init__(self, build: str, command: list[str], fault: str = "") -> None:
        self.build = build
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

    def launch(self, name: str, grid: tuple[int, int], args: tuple[Argument, ...], seed: int = 0) -> None:
        """Runs kernel `name`, which changes the tensors among its arguments in place. 0 may be a null pointer.

        Every tensor, gaps between its rows included, is a buffer of its own, aligned as it is here.
        """
        request = [struct.pack("<I", len(name)), name.encode(), struct.pack("<QIII", seed, *grid, len(args))]
        outputs = []
        for arg in args:
            if isinstance(arg, int) or not arg.numel():
                number = arg & (1 << 64) - 1 if isinstance(arg, int) else 0
                request.append(struct.pack("<BQ", 0, number))
            else:
                raw = bytes_of(arg)
                request += [struct.pack("<BIQ", 1, arg.data_ptr() % 16, len(raw)), raw.tobytes()]
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
        return words + (f"status {status}" if status else "")


class ShimExecutor(GuardedMemory):
    """An executor (see kernel_cases.py): memory of this process, launches in a process of a shim."""

    def __init__(self, shim: Shim, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"), UNTOUCHED)
        self._shim, self._seed = shim, seed

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with super().serving(), patch.object(launching, "kernel_module", lambda device: self):
            yield

    def launch(self, name: str, grid: tuple[int, int], num_threads: int, *args: Argument, device: torch.device) -> None:
        """As KernelModule.launch."""
        if all(grid):
            self._shim.launch(name, grid, args, self._seed)


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """From the first byte of a tensor to its last one, as a view."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(memory)


def compile_driver(build: str, source: Path, program: Path) -> list[str]:
    """Compiles the driver with the kernels in `source` -> the command that runs it. Cost: 5 to 15 seconds."""
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
        shutil.copytree(NATIVE, planted)
        for file, old, new in PLANTS:
            text = (planted / file).read_text()
            assert text.count(old) == 1, f"{file} has changed: plant the fault anew in {old}"
            (planted / file).write_text(text.replace(old, new))
        self._pool = ThreadPoolExecutor(2)
        self._commands: dict[tuple[str, bool], Future[list[str]]] = {
            (build, is_planted): self._pool.submit(
                compile_driver, build, planted if is_planted else NATIVE, folder / f"{build}{int(is_planted)}"
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


# ---- every kernel against the reference


def cases_of(kernel: str) -> list[Case]:
    found = [case for case in all_cases() if kernel in case.kernels]
    assert found
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_in_any_order_of_threads(run: Callable[[str], Shim], kernel: str) -> None:
    shim = run("plain")
    for case in cases_of(kernel):
        if not case.name.endswith("-all"):
            for seed in range(4) if case.quick and "damaged" not in case.name else [1]:
                run_case(case, ShimExecutor(shim, seed))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_outside_of_buffers_is_touched(run: Callable[[str], Shim], kernel: str) -> None:
    """With damaged payloads too."""
    shim = run("address")
    for number, case in enumerate(cases_of(kernel)):
        if not case.name.endswith("-all"):
            run_case(case, ShimExecutor(shim, number % 3))


# One CTA each mostly: races between CTAs do not show.
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_data_races(run: Callable[[str], Shim], kernel: str) -> None:
    quick = [case for case in cases_of(kernel) if case.quick]
    damaged = [case for case in quick if "damaged" in case.name]
    for case in [*[case for case in quick if "damaged" not in case.name][:2], *damaged[:1]]:
        run_case(case, ShimExecutor(run("thread")))


def test_the_driver_launches_every_kernel_there_is(builds: Builds) -> None:
    command = builds.command("plain")
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True).stdout.split()
    symbols = subprocess.run(["nm", "--defined-only", *command], capture_output=True, text=True, check=True).stdout
    functions = {name for _, kind, name in map(str.split, symbols.splitlines()) if kind == "T"}
    assert set(listed) == {name for name in functions if not name.startswith("_") and name != "main"} == set(KERNELS)


# ---- planted faults, each of which has to be reported

# (file, text in it, what it becomes). None does anything unless its name is asked for.
PLANTS = [
    (
        "common.cuh",
        "void load_values(T* values, const T* __restrict__ from, i64 left) {\n"
        "  constexpr int num_bytes = N * sizeof(T);\n"
        "  if (left >= N && num_bytes % 16 == 0 && is_aligned(from, 16)) {",
        "void load_values(T* values, const T* __restrict__ from, i64 left) {\n"
        "  constexpr int num_bytes = N * sizeof(T);\n"
        '  if ((left >= N || shim::planted("read behind")) && num_bytes % 16 == 0 &&'
        ' (is_aligned(from, 16) || shim::planted("misaligned"))) {',
    ),
    (
        "cta.cuh",
        "if (lane_number() == 31) warp_sums[warp_number()] = up_to;\n  __syncthreads();",
        'if (lane_number() == 31) warp_sums[warp_number() + (shim::planted("shared") ? kWarps : 0)] = up_to;\n'
        '  if (shim::planted("shuffle as fence"))'
        " __shfl_xor_sync(kAllLanes, 0u, 1), (void)*(volatile u32*)(warp_sums + warp_number());\n"
        '  if (!shim::planted("no barrier")) __syncthreads();',
    ),
    (
        "cuda_blocks.cuh",
        "sum0 = sum_over_warp(sum0);",
        'if (lane_number() < 16 || !shim::planted("divergent shuffle")) sum0 = sum_over_warp(sum0);',
    ),
    (
        "cuda_changes.cuh",
        "if (lane_number() == 0) warp_counts[warp_number()] = counts;\n  __syncthreads();",
        'if (lane_number() == 0 && (counts || !shim::planted("unwritten"))) warp_counts[warp_number()] = counts;\n'
        '  if (shim::planted("two barriers") && threadIdx.x < 64) __syncthreads();\n'
        '  else if (threadIdx.x < 40 || !shim::planted("part of a barrier")) __syncthreads();',
    ),
    (
        "cuda_changes.cuh",
        "bits_of[(i64)blockIdx.x * kThreads + threadIdx.x] = (u8)bits;",
        "bits_of[(i64)blockIdx.x * kThreads + threadIdx.x] = (u8)bits;\n"
        '  if (shim::planted("write before") && threadIdx.x == 0) bits_of[-1] = 0;',
    ),
    (
        "cuda_changes.cuh",
        "sum_before(num_literals, warp_literals, total)",
        'sum_before(num_literals, shim::planted("one array") ? warp_moves : warp_literals, total)',
    ),
    (
        "cuda_changes.cuh",
        "if (total != here[0]) return report_damage(damage);",
        'if (total != here[0] || (shim::planted("own mind") && !is_changed)) return report_damage(damage);',
    ),
    (
        "cuda_changes.cuh",
        "  if (!fits) return report_damage(damage);",
        '  if (!fits && !shim::planted("trust")) return report_damage(damage);',
    ),
    (
        "cuda_symbols.cuh",
        "sum_before(__popc(far_nibbles(nibbles_of(exponents, top, left))), warp_escapes, total);",
        "sum_before(__popc(far_nibbles(nibbles_of(exponents, top, left))),"
        ' shim::planted("one array of symbols") ? warp_tops : warp_escapes, total);',
    ),
    (
        "cuda_symbols.cuh",
        "if (before_tile == behind_tile) return;",
        'if (before_tile == behind_tile || (shim::planted("own mind of symbols") && threadIdx.x > 70)) return;',
    ),
    (
        "cuda_symbols.cuh",
        "  if (!fits) return report_damage(damage);",
        '  if (!fits && !shim::planted("trust in symbols")) return report_damage(damage);',
    ),
    (
        "payloads.cuh",
        "fits = fits && start <= end && end <= limit &&",
        'fits = fits && start <= end && (end <= limit || shim::planted("trust in the table")) &&',
    ),
]

SMALL_SCAN = Case("scan", ("scan_values_bf16",), scan_case(Unit(BF16, whole(300), 0.5, 15), "values"))
FEW_CHANGES = Case("scan", ("scan_values_bf16",), scan_case(Unit(BF16, whole(2000), 0.001), "values"))
HASH = Case("hash", ("hash_blocks_bf16",), hash_case(Unit(BF16, whole(64), block_size=64)))
TWO_TILES = Unit(BF16, ((0, 2048), (2050, 37)), 0.3)
APPLY = Case("apply", ("apply_values_bf16",), receive_case(TWO_TILES, "values", 0))
SCAN_SYMBOLS = Case("scan symbols", ("scan_symbols_bf16",), scan_symbols_case(TWO_TILES))
PACK_SYMBOLS = Case("pack symbols", ("pack_symbols_bf16",), pack_case(TWO_TILES, "symbols"))
MERGE_SYMBOLS = Case("merge symbols", ("merge_symbols_bf16",), receive_case(TWO_TILES, "symbols", 0))


def damaged(name: str, case: Case = APPLY, kind: str = "values") -> Case:
    """A receiver with one kind of damage."""
    damage = Damages(TWO_TILES, kind, 1).noticed[name]
    return Case(f"{case.name}, {name}", case.kernels, receive_case(TWO_TILES, kind, 0, damage=damage))


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
    for case in (SMALL_SCAN, FEW_CHANGES, HASH, APPLY, SCAN_SYMBOLS, PACK_SYMBOLS, MERGE_SYMBOLS):
        run_case(case, ShimExecutor(shim, 1))
    shim.close()


REPORTS = [
    ("thread", "no barrier", APPLY, r"data race"),
    ("thread", "shuffle as fence", APPLY, r"data race"),
    ("thread", "one array", APPLY, r"data race"),
    ("address", "shared", APPLY, r"runtime error: store to address .* with insufficient space"),
    ("address", "write before", SMALL_SCAN, r"heap-buffer-overflow[\s\S]*WRITE of size 1"),
    ("plain", "write before", SMALL_SCAN, r"shim: scan_values_bf16 wrote outside of a buffer"),
    ("address", "read behind", SMALL_SCAN, r"heap-buffer-overflow[\s\S]*READ of size"),
    ("address", "trust", damaged("all offsets are 2**30 more"), r"AddressSanitizer[\s\S]*READ"),
    (
        "address",
        "trust in symbols",
        damaged("all offsets are 2**30 more", MERGE_SYMBOLS, "symbols"),
        r"AddressSanitizer[\s\S]*READ",
    ),
    ("thread", "one array of symbols", SCAN_SYMBOLS, r"data race"),
    ("plain", "own mind of symbols", PACK_SYMBOLS, r"shim: deadlock"),
    ("thread", "own mind of symbols", PACK_SYMBOLS, r"shim: deadlock"),
    ("address", "trust in the table", damaged("all sections are far behind"), r"AddressSanitizer[\s\S]*READ"),
    ("plain", "divergent shuffle", HASH, r"shim: deadlock: 16 threads wait, 240 have ended.*\sstatus 3"),
    ("thread", "divergent shuffle", HASH, r"shim: deadlock: 16 threads wait, 240 have ended.*\sstatus 3"),
    ("plain", "part of a barrier", SMALL_SCAN, r"shim: deadlock: 40 threads wait, 216 have ended"),
    ("thread", "part of a barrier", SMALL_SCAN, r"shim: deadlock: 40 threads wait, 216 have ended"),
    ("plain", "two barriers", SMALL_SCAN, r"shim: divergent barrier"),
    ("thread", "two barriers", SMALL_SCAN, r"shim: divergent barrier"),
    ("plain", "own mind", APPLY, r"shim: deadlock"),
    ("thread", "own mind", APPLY, r"shim: deadlock"),
]


@pytest.mark.parametrize(
    "build, fault, case, report", REPORTS, ids=[f"{build}-{fault}" for build, fault, *_ in REPORTS]
)
def test_planted_fault(plant: Callable[[str, str], Shim], build: str, fault: str, case: Case, report: str) -> None:
    with pytest.raises(KernelFault, match=report):
        run_case(case, ShimExecutor(plant(build, fault)))


@pytest.mark.parametrize(
    "fault, case", [("no barrier", APPLY), ("one array", APPLY), ("unwritten", FEW_CHANGES)], ids=str
)
def test_planted_fault_makes_wrong_results(plant: Callable[[str, str], Shim], fault: str, case: Case) -> None:
    with pytest.raises((AssertionError, KernelFault)):  # even addresses are wrong
        for seed in range(4):
            run_case(case, ShimExecutor(plant("plain", fault), seed))


def test_misaligned_vectors_are_reported(plant: Callable[[str, str], Shim]) -> None:
    odd = Case("scan", SMALL_SCAN.kernels, scan_case(Unit(BF16, whole(300), 0.5, 15), "values", "odd"))
    with pytest.raises(KernelFault, match=r"runtime error: .*misaligned"):
        run_case(odd, ShimExecutor(plant("address", "misaligned")))
