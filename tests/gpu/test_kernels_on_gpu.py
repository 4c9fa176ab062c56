"""The shipped kernels on a real device, bit for bit against the torch reference on CPU tensors.

All cases of kernel_cases.py, each between guard bytes and in memory filled once with one pattern and once with its complement,
so that a byte that should have been written and was not differs in one of them; the functions of kernels/cuda.py at the sizes
of shards; positions beyond 2**31; streams and devices; compute-sanitizer; nvCOMP.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fsdp_ciera.kernels import cuda, dispatch, nvcomp, reference
from fsdp_ciera.kernels.changes import Form, Received
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.launch import PTX_FILE, CieraKernelError, kernel_module
from kernel_cases import THREADS, Array, Case, all_cases, changed_values, some_values

KERNELS = re.findall(r"\.entry\s+(\w+)", PTX_FILE.read_text())
PATTERNS = (0xCD, 0x32)
GUARD_BYTES = 512
EVERY: list[FloatFormat | None] = [*FORMATS.values(), None]
SHARD_VALUES = (5 << 20) + 1237
"""More than 8 MiB of bf16, and no multiple of anything."""
FAR_VALUES = (1 << 31) + 4096 + 5


class Buffer(NamedTuple):
    """A buffer and the memory around it."""

    memory: torch.Tensor
    first: int
    num_bytes: int

    @property
    def address(self) -> int:
        return self.memory.data_ptr() + self.first


class DeviceExecutor:
    """An executor (see kernel_cases.py) that launches on a device, through the launcher of the package.

    pattern: what guard bytes and unwritten memory are filled with. `None`: no guards and no filling, for compute-sanitizer,
    which knows both bounds and what was written; each buffer is then an allocation of its own.
    """

    def __init__(self, device: torch.device, pattern: int | None) -> None:
        self.device, self.pattern = device, pattern
        self.module = kernel_module(device)
        self.buffers: list[Buffer] = []

    def upload(self, array: Array, misalignment: int = 0) -> int:
        data = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
        buffer = self._place(len(data), misalignment)
        buffer.memory[buffer.first : buffer.first + len(data)].copy_(data)
        return buffer.address

    def alloc(self, num_bytes: int, misalignment: int = 0) -> int:
        return self._place(num_bytes, misalignment).address

    def flag(self) -> int:
        return self.upload(np.zeros(1, np.uint32))

    def launch(self, kernel: str, grid: tuple[int, int], *args: int) -> None:
        self.module.launch(kernel, grid, THREADS, *map(int, args), device=self.device)

    def download(self, address: int, dtype: npt.DTypeLike, count: int) -> Array:
        return self._bytes_at(address, count * np.dtype(dtype).itemsize).view(dtype)

    def untouched(self, address: int, num_bytes: int) -> bool:
        return self.pattern is None or bool((self._bytes_at(address, num_bytes) == self.pattern).all())

    def check_guards(self) -> None:
        """Fails where a byte beside a buffer was written."""
        for number, buffer in enumerate(self.buffers if self.pattern is not None else []):
            around = buffer.memory.cpu()
            around[buffer.first : buffer.first + buffer.num_bytes] = self.pattern
            wrong = (around != self.pattern).nonzero().view(-1) - buffer.first
            assert not len(wrong), (
                f"buffer {number} of {buffer.num_bytes} bytes: bytes {wrong[:8].tolist()} were written"
            )

    def _place(self, num_bytes: int, misalignment: int) -> Buffer:
        if self.pattern is None:
            memory = torch.empty(misalignment + max(num_bytes, 1), dtype=torch.uint8, device=self.device)
            assert memory.data_ptr() % 256 == 0
            first = misalignment
        else:
            size = 256 + misalignment + num_bytes + 2 * GUARD_BYTES
            memory = torch.full((size,), self.pattern, dtype=torch.uint8, device=self.device)
            first = GUARD_BYTES + -memory.data_ptr() % 256 + misalignment
        self.buffers.append(Buffer(memory, first, num_bytes))
        return self.buffers[-1]

    def _bytes_at(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        for buffer in self.buffers:
            start = address - buffer.address
            if start >= 0 and start + num_bytes <= buffer.num_bytes:
                first = buffer.first + start
                found: npt.NDArray[np.uint8] = buffer.memory[first : first + num_bytes].cpu().numpy().copy()
                return found
        raise AssertionError(f"no buffer has {num_bytes} bytes at {address:#x}")


@cache
def cases_by_group() -> dict[str, list[Case]]:
    """By kernel; those of several kernels are the `pipelines`."""
    found: dict[str, list[Case]] = {}
    for case in all_cases():
        found.setdefault(case.kernels[0] if len(case.kernels) == 1 else "pipelines", []).append(case)
    return found


def run_case(case: Case, make_executor: Callable[[int], DeviceExecutor]) -> None:
    """Twice, so that it is told what was not written."""
    for pattern in PATTERNS:
        executor = make_executor(pattern)
        try:
            case.run(executor)
            executor.check_guards()
        except AssertionError as error:
            error.add_note(f"in case {case.name}, memory filled with {pattern:#x}")
            raise


def run_quick_cases() -> None:
    """What runs under compute-sanitizer."""
    device, count = torch.device("cuda", torch.cuda.current_device()), 0
    for case in all_cases():
        if case.quick:
            case.run(DeviceExecutor(device, None))
            count += 1
    torch.cuda.synchronize()
    print(f"ran {count} cases")


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("group", [*KERNELS, "pipelines"])
def test_results_are_the_references(group: str) -> None:
    device = current_device()
    for case in cases_by_group().get(group, []):
        run_case(case, lambda pattern: DeviceExecutor(device, pattern))


# ---- the functions of kernels/cuda.py, as the codecs call them


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaN equals NaN, and -0 differs from 0. `expected` is on CPU."""
    found, expected = found.contiguous().cpu(), expected.contiguous()
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def check_planes(fmt: FloatFormat, values: torch.Tensor, device: torch.device) -> None:
    """split, merge, hash and checksum of `values` [n] on CPU."""
    num_values, there = len(values), values.to(device)
    sizes = (num_values, num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits))
    expected, found = ([torch.zeros(size, dtype=torch.uint8, device=on) for size in sizes] for on in ("cpu", device))
    reference.split_planes(values, fmt, *expected)
    cuda.split_planes(there, fmt, *found)
    assert all(map(same_bits, found, expected))
    out = torch.zeros_like(there)
    cuda.merge_planes(found[0], found[1], found[2] if fmt.top_bits else None, fmt, out)
    assert same_bits(out, values)
    for block_size in (64, 512):
        hashes = cuda.hash_blocks(there, fmt, block_size)
        assert same_bits(hashes, reference.hash_blocks(values, fmt, block_size))
    for rows in (1, 3):
        of_rows = values[: num_values // rows * rows].view(rows, -1)
        assert same_bits(cuda.checksum(of_rows.to(device)), reference.checksum(of_rows))


def check_changes(
    fmt: FloatFormat | None, last: torch.Tensor, fresh: torch.Tensor, escape: int, device: torch.device
) -> None:
    """scan, compact and apply without waiting, then the functions that dispatch.py asks for. All on CPU: [n], [n]."""
    if fmt is None:
        escape = 255
    form = Form(escape=escape)
    expected = reference.find_changes(fresh.clone(), last.clone(), fmt, form)
    assert expected.changed is not None
    num_changed, num_literals = len(expected.moves), len(expected.literals)
    new, old = fresh.to(device), last.to(device, copy=True)
    found = cuda.scan(new, old, fmt, escape)
    assert same_bits(found.bits, expected.changed)
    assert found.counts().tolist() == [num_changed, num_literals]
    moves = torch.zeros(num_changed, dtype=torch.uint8, device=device)
    literals = torch.zeros(num_literals, dtype=expected.literals.dtype, device=device)
    cuda.compact(new, old, fmt, escape, found, moves, literals)
    assert same_bits(moves, expected.moves) and same_bits(literals, expected.literals) and same_bits(old, fresh)

    values, damage = last.to(device, copy=True), torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.zeros_like(values)
    taken = cuda.apply(values, fmt, escape, found.bits, moves, literals, out, damage)
    assert same_bits(values, fresh) and same_bits(out, fresh) and not damage.item()
    assert taken.counts().tolist()[0] == num_changed

    again = cuda.find_changes(new, last.to(device, copy=True), fmt, form)
    assert again.changed is not None and same_bits(again.changed, expected.changed)
    assert same_bits(again.moves, expected.moves) and same_bits(again.literals, expected.literals)
    assert cuda.count_bits(again.changed, len(fresh)) == num_changed
    values = last.to(device, copy=True)
    used = cuda.apply_changes(
        values, fmt, Received(form, again.changed, None, again.small_moves, again.moves, again.literals)
    )
    assert same_bits(values, fresh) and (used.num_moves, used.num_literals)[: 1 if fmt is None else 2] == (
        (num_changed,) if fmt is None else (num_changed, num_literals)
    )
    if num_changed:
        values = last.to(device, copy=True)
        cuda.apply(values, fmt, escape, found.bits, moves[:-1], literals, None, damage)
        assert damage.item() == 1


def check_blocks(fmt: FloatFormat, values: torch.Tensor, block_size: int, device: torch.device) -> None:
    """take_blocks of every third block, and put_blocks of them into an empty cache."""
    num_values = len(values)
    num_blocks = -(-num_values // block_size)
    exponents = torch.zeros(num_blocks * block_size, dtype=torch.uint8)
    reference.split_planes(values, fmt, exponents[:num_values])
    chosen = torch.arange(num_blocks) % 3 == 0
    ranks = torch.where(chosen, chosen.cumsum(0) - 1, -1).to(device)
    num_taken = int(chosen.sum()) * block_size - (num_blocks * block_size - num_values) * int(chosen[-1])
    taken = torch.zeros(num_taken, dtype=torch.uint8, device=device)
    cuda.take_blocks(values.to(device), fmt, block_size, ranks, taken)
    kept = exponents.view(-1, block_size)
    assert same_bits(taken, kept[chosen].reshape(-1)[:num_taken])
    store = torch.zeros_like(exponents, device=device)
    cuda.put_blocks(taken, block_size, ranks, store)
    assert same_bits(store.view(-1, block_size), kept * chosen[:, None])


@pytest.mark.parametrize("num_values", [1, 2047, 4999, SHARD_VALUES])
@pytest.mark.parametrize("fmt", EVERY, ids=lambda fmt: fmt.name if fmt else "byte")
def test_functions_equal_the_reference(fmt: FloatFormat | None, num_values: int) -> None:
    device, values = current_device(), some_values(fmt, num_values)
    if fmt is not None:
        check_planes(fmt, values, device)
        check_blocks(fmt, values, 512, device)
    for share, escape in ((0.0, 255), (0.012, 255), (0.08, 15), (1.0, 3)):
        check_changes(fmt, values, changed_values(values, fmt, share, escape), escape, device)


def test_they_are_what_serves_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.kernels_of(torch.zeros(1, device="cuda")) is cuda


# ---- positions beyond 2**31


def parts(num_values: int, num_in_part: int = 1 << 28) -> Iterator[slice]:
    for start in range(0, num_values, num_in_part):
        yield slice(start, min(start + num_in_part, num_values))


def random_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for part in parts(num_bytes):
        data[part].random_(0, 256)
    return data


def all_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (tensor.view(torch.uint8) for tensor in (one, other))
    return len(one) == len(other) and all(torch.equal(one[part], other[part]) for part in parts(len(one)))


def planted_places(num_values: int) -> list[int]:
    """Around the middle (2**31 for FAR_VALUES) and at the ends."""
    middle = min(1 << 31, num_values // 2)
    return sorted(
        {0, 1, 9, middle - 2049, middle - 1, middle, middle + 1, middle + 2050, num_values - 9, num_values - 1}
    )


def set_places(bits: torch.Tensor) -> list[int]:
    return [8 * i + k for i in bits.nonzero().view(-1).tolist() for k in range(8) if int(bits[i]) >> k & 1]


def check_far_changes(fmt: FloatFormat | None, num_values: int, device: torch.device) -> None:
    item_bytes = 1 if fmt is None else fmt.item_bytes
    integers = torch.uint8 if fmt is None else fmt.int_dtype
    fresh = random_bytes(num_values * item_bytes, device).view(integers)
    values = fresh.clone()
    places = planted_places(num_values)
    for number, place in enumerate(places):  # the odd ones to far away, so that there are literals
        values[place : place + 1] ^= (1 << 8 * item_bytes - 2) if number % 2 else 1
    old = [values[place : place + 1].cpu() for place in places]
    new = [fresh[place : place + 1].cpu() for place in places]
    expected = reference.find_changes(torch.cat(new), torch.cat(old), fmt, Form(escape=7 if fmt else 255))
    escape = 7 if fmt else 255
    found = cuda.scan(fresh, values, fmt, escape)
    assert set_places(found.bits) == places
    assert found.counts().tolist() == [len(expected.moves), len(expected.literals)]
    moves = torch.zeros(len(expected.moves), dtype=torch.uint8, device=device)
    literals = torch.zeros(len(expected.literals), dtype=integers, device=device)
    last = values.clone()
    cuda.compact(fresh, last, fmt, escape, found, moves, literals)
    assert same_bits(moves, expected.moves) and same_bits(literals, expected.literals)
    assert all_equal(last, fresh)
    del last
    out, damage = torch.zeros_like(values), torch.zeros(1, dtype=torch.int32, device=device)
    cuda.apply(values, fmt, escape, found.bits, moves, literals, out, damage)
    assert all_equal(values, fresh) and all_equal(out, fresh) and not damage.item()


def check_far_planes(fmt: FloatFormat, num_values: int, device: torch.device) -> None:
    values = random_bytes(num_values * fmt.item_bytes, device).view(fmt.dtype)
    sizes = (num_values, num_values * fmt.low_bytes, packed_bytes(num_values, fmt.top_bits))
    planes = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    cuda.split_planes(values, fmt, *planes)
    out = torch.zeros_like(values)
    cuda.merge_planes(planes[0], planes[1], planes[2] if fmt.top_bits else None, fmt, out)
    assert all_equal(out, values)
    block_size = 512
    hashes = cuda.hash_blocks(values, fmt, block_size)
    middle = planted_places(num_values)[4] // block_size * block_size
    for start in (0, middle, (num_values - 1) // block_size * block_size):
        part = values[start : start + 4 * block_size].cpu()
        exponents = torch.zeros(len(part), dtype=torch.uint8)
        reference.split_planes(part, fmt, exponents)
        assert same_bits(planes[0][start : start + len(part)], exponents)
        first = start // block_size
        expected = reference.hash_blocks(part, fmt, block_size)
        assert same_bits(hashes[first : first + len(expected)], expected)
    assert same_bits(cuda.checksum(values.view(1, -1)), reference.checksum(values.view(1, -1)).cpu())


def needs_memory(num_gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < num_gib << 30:
        pytest.skip(f"needs {num_gib} GiB of device memory, {free / 2**30:.1f} are free")


@pytest.mark.parametrize("fmt", [None, FORMATS[torch.bfloat16]], ids=["byte", "bf16"])
def test_changes_beyond_2_31_values(fmt: FloatFormat | None) -> None:
    needs_memory(32)
    check_far_changes(fmt, FAR_VALUES, current_device())
    torch.cuda.empty_cache()


def test_planes_beyond_2_31_values() -> None:
    needs_memory(32)
    check_far_planes(FORMATS[torch.bfloat16], FAR_VALUES, current_device())
    torch.cuda.empty_cache()


# ---- streams and devices

SLEEP_CYCLES = 20_000_000


def test_launches_go_to_the_current_stream() -> None:
    """Each stream sleeps before it makes the input: a kernel on another stream would read what was there before."""
    device, fmt = current_device(), FORMATS[torch.bfloat16]
    values = [some_values(fmt, 300_001, seed) for seed in range(4)]
    inputs = [tensor.to(device) for tensor in values]
    rooms = [torch.zeros_like(tensor) for tensor in inputs]
    kernel_module(device)  # loading may wait for the device
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in values]
    found = []
    for stream, source, room in zip(streams, inputs, rooms, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            room.copy_(source)
            found.append(cuda.hash_blocks(room, fmt, 512))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    for hashes, tensor in zip(found, values, strict=True):
        assert same_bits(hashes, reference.hash_blocks(tensor, fmt, 512))


def test_side_streams_that_share_a_device() -> None:
    """Whole round trips, interleaved, with memory of each stream's own."""
    device, fmt = current_device(), FORMATS[torch.bfloat16]
    pairs = [(last, changed_values(last, fmt, 0.08, 255)) for last in (some_values(fmt, 200_003, s) for s in range(3))]
    there = [(last.to(device), fresh.to(device)) for last, fresh in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results: list[list[torch.Tensor]] = [[] for _ in pairs]
    for _ in range(5):
        for stream, (last, fresh), result in zip(streams, there, results, strict=True):
            with torch.cuda.stream(stream):
                values, out = last.clone(), torch.zeros_like(last)
                room = torch.zeros(len(last), dtype=torch.uint8, device=device)
                literals = torch.zeros(len(last), dtype=torch.int16, device=device)
                damage = torch.zeros(1, dtype=torch.int32, device=device)
                found = cuda.scan(fresh, values, fmt, 255)
                cuda.compact(fresh, values.clone(), fmt, 255, found, room, literals)
                cuda.apply(values, fmt, 255, found.bits, room, literals, out, damage)
                result += [values, out]
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    for (_, fresh), result in zip(pairs, results, strict=True):
        assert all(same_bits(tensor, fresh) for tensor in result)


def test_only_on_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two devices, there is {torch.cuda.device_count()}")
    fmt, values = FORMATS[torch.bfloat16], some_values(FORMATS[torch.bfloat16], 4999)
    there = values.to("cuda:1")
    with torch.cuda.device(0), pytest.raises(CieraKernelError, match="is current"):
        cuda.hash_blocks(there, fmt, 512)
    with torch.cuda.device(1):
        assert same_bits(cuda.hash_blocks(there, fmt, 512), reference.hash_blocks(values, fmt, 512))


# ---- compute-sanitizer


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(tool: str) -> None:
    """The quick cases, which together run all of every kernel."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer (of the CUDA toolkit) is not on PATH")
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # without torch's caching allocator each buffer is an allocation, whose bounds the sanitizer knows
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    call = "import test_kernels_on_gpu; test_kernels_on_gpu.run_quick_cases()"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "42", sys.executable, "-c", call]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)
    tail = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, f"{tool}: exit {done.returncode}\n{tail}"
    assert re.search(r"ran \d{2,} cases", done.stdout), tail
    print(
        f"\n{tool}:", *(line for line in tail.splitlines() if "SUMMARY" in line or line.startswith("ran ")), sep="\n  "
    )


# ---- nvCOMP


def check_ans(data: torch.Tensor) -> int:
    """Codes and decodes `data`, uint8 [n] on the device. -> coded bytes."""
    ans = nvcomp.ans()
    coded = ans.compress(data)
    num_chunks = nvcomp.num_chunks_of(len(data))
    assert coded.chunk_bytes.shape == (num_chunks,) and not coded.statuses.any()
    starts = coded.scratch.data_ptr() + coded.chunk_stride_bytes * torch.arange(num_chunks, device=data.device)
    out = torch.zeros_like(data)
    statuses = ans.decompress(starts, coded.chunk_bytes, out)
    assert not statuses.any() and torch.equal(out, data)
    return int(coded.chunk_bytes.sum())


@pytest.mark.parametrize("num_bytes", [1, nvcomp.CHUNK_BYTES, 5 * nvcomp.CHUNK_BYTES + 77])
def test_nvcomp_round_trip(num_bytes: int) -> None:
    reason = nvcomp.why_not_available()
    if reason is not None:
        pytest.skip(reason)
    device = current_device()
    values = (0.02 * torch.randn(num_bytes, generator=torch.Generator().manual_seed(0))).bfloat16().to(device)
    exponents = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    cuda.split_planes(values, FORMATS[torch.bfloat16], exponents)
    coded_bytes = check_ans(exponents)
    print(f"\nANS: exponents of {num_bytes} normal numbers in {coded_bytes} bytes")
    assert num_bytes < nvcomp.CHUNK_BYTES or coded_bytes < 0.5 * num_bytes
    check_ans(random_bytes(num_bytes, device))
    check_ans(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check_ans(exponents)
    torch.cuda.current_stream().wait_stream(side)
