"""nvCOMP without a GPU: what the library answers on the host, its own headers, and the arguments that it would receive.

The stand-in library is made of C callbacks with the signatures of `nvcomp.SIGNATURES`, so that every argument goes through
the C calling convention, options by value included. Its coder copies bytes and puts the chunk's number in front.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ciera.errors import CieraKernelError
from fsdp_ciera.kernels import launch, nvcomp
from fsdp_ciera.kernels.nvcomp import CHUNK_BYTES, Alignments, Ans, CompressOptions, DecompressOptions, Properties

STREAM = 0x5000
MOST_CODED_BYTES = CHUNK_BYTES + 1000  # not a multiple of the alignment
TEMP_BYTES = 7


class FakeNvcomp:
    """A library object whose functions are C callbacks into `answer_*` below. `calls` holds names and arguments."""

    def __init__(self, version: int = 6000, failing: str = "") -> None:
        self.version, self.failing = version, failing
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        for name, arguments in nvcomp.SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._answer(name)))

    def _answer(self, name: str) -> Callable[..., int]:
        answer = getattr(self, "answer_" + name.removeprefix("nvcomp").removeprefix("BatchedANS"))

        def function(*args: Any) -> int:
            self.calls.append((name, args))
            if name == self.failing:
                return 11
            answer(*args)
            return 0

        return function

    def answer_GetProperties(self, properties: int) -> None:
        Properties.from_address(properties).version = self.version

    def answer_CompressGetRequiredAlignments(self, options: CompressOptions, alignments: int) -> None:
        Alignments.from_address(alignments).__init__(16, 8, 1)  # type: ignore[misc]

    def answer_DecompressGetRequiredAlignments(self, options: DecompressOptions, alignments: int) -> None:
        Alignments.from_address(alignments).__init__(32, 8, 1)  # type: ignore[misc]

    def answer_CompressGetMaxOutputChunkSize(self, chunk_bytes: int, options: CompressOptions, most: int) -> None:
        assert chunk_bytes == CHUNK_BYTES
        ctypes.c_size_t.from_address(most).value = MOST_CODED_BYTES

    def answer_CompressGetTempSize(self, *args: Any) -> None:
        num_chunks, chunk_bytes, _, temp_bytes, total_bytes, stream = args
        assert (chunk_bytes, total_bytes, stream) == (CHUNK_BYTES, num_chunks * CHUNK_BYTES, STREAM)
        ctypes.c_size_t.from_address(temp_bytes).value = TEMP_BYTES * num_chunks

    answer_DecompressGetTempSize = answer_CompressGetTempSize

    def answer_CompressAsync(self, *args: Any) -> None:
        pointers, sizes, largest, num_chunks, temp, temp_bytes, outputs, out_sizes, options, statuses, stream = args
        assert (largest, stream, temp_bytes) == (CHUNK_BYTES, STREAM, TEMP_BYTES * num_chunks) and temp
        assert bytes(options) == bytes(64), "the defaults of nvCOMP: rANS, NVCOMP_TYPE_CHAR, nothing overridden"
        for i in range(num_chunks):
            into, num_bytes = words(outputs, num_chunks)[i], words(sizes, num_chunks)[i]
            assert into % 8 == 0
            bytes_at(into, 1)[0] = i
            bytes_at(into + 1, num_bytes)[:] = bytes_at(words(pointers, num_chunks)[i], num_bytes)
            words(out_sizes, num_chunks)[i] = num_bytes + 1
        ints(statuses, num_chunks)[:] = 0

    def answer_DecompressAsync(self, *args: Any) -> None:
        pointers, sizes, room, out_sizes, num_chunks, temp, temp_bytes, outputs, options, statuses, stream = args
        assert (stream, temp_bytes) == (STREAM, TEMP_BYTES * num_chunks) and temp
        assert (options.backend, options.data_type, bytes(options)[8:]) == (2, 0, bytes(56))
        for i in range(num_chunks):
            num_bytes = words(sizes, num_chunks)[i] - 1
            assert num_bytes <= words(room, num_chunks)[i]
            coded = words(pointers, num_chunks)[i]
            ints(statuses, num_chunks)[i] = 0 if bytes_at(coded, 1)[0] == i else 13
            bytes_at(words(outputs, num_chunks)[i], num_bytes)[:] = bytes_at(coded + 1, num_bytes)
            words(out_sizes, num_chunks)[i] = num_bytes


def bytes_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(int(address)))


def words(address: int, count: int) -> Any:
    return (ctypes.c_uint64 * count).from_address(address)


def ints(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcomp, "current_place", lambda device: launch.Place(0, STREAM))


def aligned(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of random bytes at a multiple of 64."""
    room = torch.empty(num_bytes + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + num_bytes].random_(256, generator=torch.Generator().manual_seed(num_bytes))


# ---- arguments as a library receives them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 17])
def test_chunks_go_there_and_back(num_bytes: int) -> None:
    library = FakeNvcomp()
    ans = Ans(library)
    data = aligned(num_bytes)
    coded = ans.compress(data)
    num_chunks = nvcomp.num_chunks_of(num_bytes)
    sizes = [min(CHUNK_BYTES, num_bytes - start) for start in range(0, num_bytes, CHUNK_BYTES)]
    assert coded.chunk_bytes.tolist() == [size + 1 for size in sizes]
    assert coded.statuses.tolist() == [0] * num_chunks
    assert coded.scratch.numel() == num_chunks * coded.chunk_stride_bytes

    pointers = torch.tensor(
        [coded.scratch.data_ptr() + i * coded.chunk_stride_bytes for i in range(num_chunks)], dtype=torch.int64
    )
    out = torch.empty_like(data)
    assert ans.decompress(pointers, coded.chunk_bytes, out).tolist() == [0] * num_chunks
    assert torch.equal(out, data)
    assert [name for name, _ in library.calls if name.endswith("Async")] == [
        "nvcompBatchedANSCompressAsync",
        "nvcompBatchedANSDecompressAsync",
    ][: 2 * bool(num_bytes)]


def test_stride_is_a_multiple_of_both_alignments() -> None:
    ans = Ans(FakeNvcomp())
    assert ans.chunk_stride_bytes % 32 == 0
    assert 0 <= ans.chunk_stride_bytes - MOST_CODED_BYTES < 32


def test_damaged_chunks_have_a_status() -> None:
    ans = Ans(FakeNvcomp())
    data = aligned(4 * CHUNK_BYTES)
    coded = ans.compress(data)
    pointers = coded.scratch.data_ptr() + torch.arange(4) * coded.chunk_stride_bytes
    coded.scratch[coded.chunk_stride_bytes] ^= 1  # another chunk's number
    coded.chunk_bytes[2] -= 5  # decodes, but to fewer bytes
    assert ans.decompress(pointers, coded.chunk_bytes, torch.empty_like(data)).tolist() == [0, 13, 12, 0]


@pytest.mark.parametrize("version", [5300, 4200, 7000])
def test_other_versions_are_refused(version: int) -> None:
    with pytest.raises(CieraKernelError, match=rf"needs nvCOMP 6, found {version // 1000}\..*pip install"):
        Ans(FakeNvcomp(version))


@pytest.mark.parametrize("name", ["nvcompBatchedANSCompressAsync", "nvcompBatchedANSCompressGetTempSize"])
def test_refusals_are_named(name: str) -> None:
    ans = Ans(FakeNvcomp(failing=name))
    with pytest.raises(CieraKernelError, match=f"{name} returned nvcompStatus_t 11"):
        ans.compress(aligned(10))


def test_wrong_tensors_are_refused() -> None:
    ans = Ans(FakeNvcomp())
    data, one = aligned(100), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="not a multiple of 16"):
        ans.compress(data[1:])
    with pytest.raises(AssertionError, match="cannot compress"):
        ans.compress(data.view(torch.int8))
    with pytest.raises(AssertionError, match="100 bytes are 1 chunks"):
        ans.decompress(one.repeat(2), one, data)
    with pytest.raises(AssertionError, match=r"torch.int32"):
        ans.decompress(one, one.int(), data)


def test_absent_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcomp.ans.cache_clear()
    monkeypatch.setitem(sys.modules, "nvidia.libnvcomp", None)
    reason = nvcomp.why_not_available()
    assert reason is not None and "not installed" in reason and "pip install" in reason


# ---- the real library -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ans() -> Ans:
    """The coder of the installed library."""
    nvcomp.ans.cache_clear()
    reason = nvcomp.why_not_available()
    if reason is not None:
        pytest.skip(reason)
    return nvcomp.ans()


def test_real_library_answers(ans: Ans) -> None:
    assert nvcomp.ans() is ans
    assert 6000 <= ans.version < 7000
    assert CHUNK_BYTES < ans.chunk_stride_bytes < 1.5 * CHUNK_BYTES
    for alignments in (ans.compress_alignments, ans.decompress_alignments):
        assert alignments.input in (1, 2, 4, 8, 16) and alignments.output in (1, 2, 4, 8, 16)
    for direction, options in (("Compress", ans._compress_options), ("Decompress", ans._decompress_options)):
        assert 0 <= ans._temp_bytes(direction, 64, options, 0) < 64 * CHUNK_BYTES


HEADER_CHECK = """
#include <nvcomp.h>
#include <cstddef>
#include <type_traits>

#define SAME(left, right) static_assert((left) == (right), #left)
SAME(nvcomp_rANS, 0);
SAME(NVCOMP_TYPE_CHAR, 0);
SAME(NVCOMP_DECOMPRESS_BACKEND_CUDA, 2);
SAME(nvcompSuccess, 0);
SAME(nvcompErrorCannotDecompress, 12);

typedef nvcompBatchedANSCompressOpts_t CompressOptions;
typedef nvcompBatchedANSDecompressOpts_t DecompressOptions;
typedef nvcompProperties_t Properties;
typedef nvcompAlignmentRequirements_t Alignments;

// each argument as ctypes passes it: the structures by value, size_t, or a pointer
template <class T> struct Passed { static constexpr char kind = std::is_pointer<T>::value ? 'p' : '?'; };
template <> struct Passed<size_t> { static constexpr char kind = 's'; };
template <> struct Passed<CompressOptions> { static constexpr char kind = 'c'; };
template <> struct Passed<DecompressOptions> { static constexpr char kind = 'd'; };
template <class... T> constexpr bool takes(nvcompStatus_t (*)(T...), const char* kinds) {
    const char found[] = {Passed<T>::kind..., 0};
    for (size_t i = 0; i <= sizeof...(T); i++)
        if (found[i] != kinds[i]) return false;
    return true;
}
"""


def test_structures_and_functions_are_those_of_the_headers(ans: Ans, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on PATH")
    spec = importlib.util.find_spec("nvidia.libnvcomp")
    assert spec is not None and spec.submodule_search_locations is not None
    include = Path(spec.submodule_search_locations[0]) / "include"
    lines = [HEADER_CHECK]
    for structure in (CompressOptions, DecompressOptions, Properties, Alignments):
        name = structure.__name__
        lines.append(f"SAME(sizeof({name}), {ctypes.sizeof(structure)});")
        for field in structure._fields_:
            place = getattr(structure, field[0])
            lines.append(f"SAME(offsetof({name}, {field[0]}), {place.offset});")
            lines.append(f"SAME(sizeof({name}::{field[0]}), {place.size});")
    letters = {ctypes.c_size_t: "s", ctypes.c_void_p: "p", CompressOptions: "c", DecompressOptions: "d"}
    for name, arguments in nvcomp.SIGNATURES.items():
        kinds = "".join(letters[argument] for argument in arguments)
        lines.append(f'static_assert(takes(&{name}, "{kinds}"), "{name}");')
    (tmp_path / "check.cpp").write_text("\n".join(lines))
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", "check.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
