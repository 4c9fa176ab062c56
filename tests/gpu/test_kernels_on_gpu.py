"""The shipped kernels on a real device, bit for bit against the torch reference on CPU tensors.

All cases of kernel_cases.py, each between guard bytes and in memory filled once with one pattern and once with its complement,
so that a byte that should have been written and was not differs in one of them; whole gathers at the sizes of shards; positions
beyond 2**31; streams and devices; compute-sanitizer; nvCOMP.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from fsdp_ciera.errors import CieraKernelError
from fsdp_ciera.kernels import cuda, dispatch, nvcomp, reference, reference_tiles
from fsdp_ciera.kernels.formats import FORMATS, FloatFormat, packed_bytes
from fsdp_ciera.kernels.heads import ALIGNMENT, HEAD_BYTES, TILES
from fsdp_ciera.kernels.launch import PTX_FILE, kernel_module
from fsdp_ciera.kernels.tiles import Payloads, SectionRoom, Tiles, make_tiles
from kernel_cases import (
    NAME,
    NUM_SECTIONS,
    Case,
    GuardedMemory,
    Runs,
    all_cases,
    changed_values,
    run_case,
    some_values,
    words_of,
)
from places import python_path

KERNELS = re.findall(r"\.entry\s+(\w+)", PTX_FILE.read_text())
PATTERNS = (0xCD, 0x32)
BF16 = FORMATS[torch.bfloat16]
SHARD_RUNS: Runs = ((3, (3 << 20) + 1237), ((3 << 20) + 1300, 17), ((3 << 20) + 1400, 2 << 20))
"""More than 10 MiB of bf16, and no multiple of anything."""
FAR_VALUES = (1 << 31) + 4096 + 5


class BareMemory(GuardedMemory):
    """Without guards, for compute-sanitizer, which knows both bounds; each buffer is an allocation of its own."""

    def alloc(self, num_bytes: int, misalignment: int = 0) -> torch.Tensor:
        memory = torch.full((misalignment + max(num_bytes, 1),), self.pattern, dtype=torch.uint8, device=self.device)
        assert memory.data_ptr() % 256 == 0
        return memory[misalignment:][:num_bytes]


@cache
def cases_of(kernel: str) -> list[Case]:
    return [case for case in all_cases() if case.kernels[0] == kernel]


def run_quick_cases() -> None:
    """What runs under compute-sanitizer."""
    count = 0
    for case in all_cases():
        if case.quick:
            run_case(case, BareMemory(current_device(), PATTERNS[0]))
            count += 1
    torch.cuda.synchronize()
    print(f"ran {count} cases")


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("kernel", sorted({case.kernels[0] for case in all_cases()}))
def test_results_are_the_references(kernel: str) -> None:
    for case in cases_of(kernel):
        for pattern in PATTERNS:
            memory = GuardedMemory(current_device(), pattern)
            run_case(case, memory)
            memory.check_guards()


def test_every_kernel_has_cases() -> None:
    assert {kernel for case in all_cases() for kernel in case.kernels} == set(KERNELS)


# ---- whole gathers, without waiting


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaN equals NaN, and -0 differs from 0."""
    found, expected = words_of(found.contiguous()).cpu(), words_of(expected.contiguous()).cpu()
    return found.dtype == expected.dtype and torch.equal(found, expected)


class Gather:
    """What ranks send to each other of one unit: here all of them are on one device. Sizes stay there."""

    def __init__(self, kind: str, tiles: Tiles, fmt: FloatFormat, world_size: int) -> None:
        self.kind, self.tiles, self.fmt, self.world_size = kind, tiles, fmt, world_size
        self.fixed_at = HEAD_BYTES + 8 * NUM_SECTIONS[kind]
        self.low_bytes = 0 if kind == "values" else tiles.num_plane_values * fmt.low_bytes
        self.top_bytes = 0 if kind == "values" else packed_bytes(tiles.num_plane_values, fmt.top_bits)
        self.nibble_bytes = tiles.num_plane_values // 2 if kind == "symbols" else 0
        sections_at = self.fixed_at + self.low_bytes + self.top_bytes + self.nibble_bytes
        self.sections_at = -(-sections_at // ALIGNMENT) * ALIGNMENT

    def payloads(
        self, fresh: torch.Tensor, last: torch.Tensor, checksums: torch.Tensor, num_bytes: int
    ) -> torch.Tensor:
        """Shards [world_size, n] and what their ranks remember -> uint8 [world_size, num_bytes]."""
        data = torch.zeros(self.world_size, num_bytes, dtype=torch.uint8, device=fresh.device)
        for rank in range(self.world_size):
            self._encode(data[rank], fresh[rank], last[rank], checksums[rank : rank + 1])
        return data

    def _encode(self, payload: torch.Tensor, fresh: torch.Tensor, last: torch.Tensor, checksum: torch.Tensor) -> None:
        tiles, fmt = self.tiles, self.fmt
        table = self._sections(payload, fresh, last)
        payload[HEAD_BYTES : self.fixed_at] = table.view(torch.uint8)
        if self.kind != "values":
            low, top = (
                payload[self.fixed_at :][: self.low_bytes],
                payload[self.fixed_at + self.low_bytes :][: self.top_bytes],
            )
            cuda.split_tiles(fresh, tiles, fmt, low, top if fmt.top_bits else None, None)
        cuda.write_head(payload, NAME, checksum, checksum, table[-1:] & (1 << 56) - 1)

    def _sections(self, payload: torch.Tensor, fresh: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        tiles, fmt, arena = self.tiles, self.fmt, payload[self.sections_at :]

        def room(sizes: torch.Tensor) -> SectionRoom:
            return SectionRoom(arena, cuda.section_table(sizes, self.sections_at, TILES), self.sections_at, 0)

        if self.kind == "blocks":
            _, changed = cuda.hash_blocks(fresh, tiles, fmt, cuda.hash_blocks(last, tiles, fmt, None)[0])
            sizes, ranks = cuda.block_sizes(changed, tiles)
            sections = room(sizes)
            cuda.pack_blocks(fresh, tiles, fmt, changed, ranks, sections)
        elif self.kind == "symbols":
            symbols = cuda.scan_symbols(fresh, tiles, fmt)
            sections = room(cuda.symbol_sizes(symbols, tiles))
            cuda.pack_symbols(fresh, tiles, fmt, symbols, sections)
            nibbles = payload[self.fixed_at + self.low_bytes + self.top_bytes :][: self.nibble_bytes]
            cuda.put_nibbles(fresh, tiles, fmt, symbols.tops, nibbles)
        elif self.kind == "exponents":
            scan = cuda.scan_exponents(fresh, last, tiles, fmt)
            sections = room(cuda.change_sizes(scan, tiles, 0))
            cuda.pack_exponents(fresh, last, tiles, fmt, scan, sections)
        else:
            scan = cuda.scan_values(fresh, last, tiles, fmt, 255)
            sections = room(cuda.change_sizes(scan, tiles, fmt.item_bytes))
            cuda.pack_values(fresh, last, tiles, fmt, 255, scan, sections)
        return sections.table

    def decode(self, data: torch.Tensor, own: int, rows: torch.Tensor, out: torch.Tensor, damage: torch.Tensor) -> None:
        """Into the states of the ranks, and their shards."""
        row_ok = cuda.check_heads(data, own, NAME, damage)
        payloads = Payloads(data, own, row_ok, HEAD_BYTES, self.sections_at, 0)
        if self.kind == "values":
            cuda.apply_values(payloads, self.tiles, self.fmt, 255, rows, damage)
            cuda.copy_out(rows, own, self.tiles, out)
            return
        if self.kind == "symbols":
            cuda.merge_symbols(payloads, self.fixed_at, self.tiles, self.fmt, out, damage)
            return
        if self.kind == "exponents":
            cuda.apply_exponents(payloads, self.tiles, rows, damage)
        else:
            cuda.put_blocks(payloads, self.tiles, rows, damage)
        cuda.merge_rows(rows, payloads, self.fixed_at, self.tiles, self.fmt, out)


def check_gather(
    kind: str, fmt: FloatFormat, runs: Runs, share: float, device: torch.device, world_size: int = 3, own: int = 1
) -> None:
    """A raw gather that fills the states, then one of what changed; the shards that come out, and their checksums."""
    tiles = make_tiles(runs, device, block_size=64 if kind == "blocks" else 0)
    num_values = runs[-1][0] + runs[-1][1] + 5
    last = torch.stack([some_values(fmt, num_values, rank) for rank in range(world_size)])
    fresh = torch.stack([changed_values(shard, fmt, share, 255, rank) for rank, shard in enumerate(last)])
    gather = Gather(kind, tiles, fmt, world_size)
    there, before = fresh.to(device), last.to(device)
    peers = [rank for rank in range(world_size) if rank != own]
    if kind == "values":
        rows = torch.zeros(world_size, tiles.num_state_values, dtype=fmt.dtype, device=device)
        for start, at, _, count in tiles.table.tolist():
            words_of(rows)[:, at : at + count] = words_of(before)[:, start : start + count]
        remembered = rows.clone()
    else:
        rows = torch.empty(len(peers), tiles.num_state_values, dtype=torch.uint8, device=device)
        cuda.split_rows(before, own, tiles, fmt, rows)
        every = torch.empty(world_size, tiles.num_state_values, dtype=torch.uint8, device=device)
        cuda.split_rows(before, world_size, tiles, fmt, every)
        remembered = before if kind in ("blocks", "symbols") else every
    out, damage = before.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    checksums = cuda.checksum(there)
    num_bytes = gather.sections_at + 2 * fmt.item_bytes * tiles.num_state_values + 4096
    data = gather.payloads(there, remembered, checksums, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
    gather.decode(data, own, rows, out, damage)
    expected = last.clone()
    for start, count in runs:
        words_of(expected)[peers, start : start + count] = words_of(fresh)[peers, start : start + count]
    assert same_bits(out, expected) and not damage.item()
    assert same_bits(checksums, reference.checksum(fresh))
    row_ok = cuda.check_heads(data, own, NAME, damage, cuda.checksum(there))
    assert row_ok.tolist() == [1] * world_size and not damage.item()
    wrong = checksums ^ torch.tensor([0, 1, 0], device=device)[:world_size]
    cuda.check_heads(data, 0, NAME, damage, wrong)
    assert damage.item() == reference_tiles.Damage.WRONG_VALUES


@pytest.mark.parametrize("share", [0.0, 0.012, 1.0])
@pytest.mark.parametrize("kind", NUM_SECTIONS)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_gathers_of_whole_shards(fmt: FloatFormat, kind: str, share: float) -> None:
    check_gather(kind, fmt, SHARD_RUNS, share, current_device())


def test_they_are_what_serves_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.tile_kernels_of(current_device()) is cuda


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
    one, other = (tensor.view(-1).view(torch.uint8) for tensor in (one, other))
    return len(one) == len(other) and all(torch.equal(one[part], other[part]) for part in parts(len(one)))


def planted_places(num_values: int) -> list[int]:
    """Around the middle (2**31 for FAR_VALUES) and at the ends."""
    middle = min(1 << 31, num_values // 2)
    return sorted(
        {0, 1, 9, middle - 2049, middle - 1, middle, middle + 1, middle + 2050, num_values - 9, num_values - 1}
    )


def check_far_values(fmt: FloatFormat, num_values: int, device: torch.device) -> None:
    tiles = make_tiles([(0, num_values)], device, state_is_flat=True)
    fresh = random_bytes(num_values * fmt.item_bytes, device).view(fmt.int_dtype)
    last = fresh.clone()
    places = planted_places(num_values)
    for number, place in enumerate(places):  # the odd ones to far away, so that there are literals
        last[place : place + 1] ^= (1 << 8 * fmt.item_bytes - 2) if number % 2 else 1
    fresh, last = fresh.view(fmt.dtype), last.view(fmt.dtype)
    scan = cuda.scan_values(fresh, last, tiles, fmt, 255)
    octets = {place // 8 for place in places}
    assert scan.bits.nonzero().view(-1).tolist() == sorted(octets)
    totals = [len(octets), len(places), len(places) // 2]
    assert scan.up_to[-1].tolist() == totals
    sizes = cuda.change_sizes(scan, tiles, fmt.item_bytes)
    table = cuda.section_table(sizes, 48, TILES)
    data = torch.zeros(1, 48 + sum(sizes.tolist()) + 128 & ~15, dtype=torch.uint8, device=device)
    cuda.pack_values(fresh, last, tiles, fmt, 255, scan, SectionRoom(data[0, 48:], table, 48, 0))
    data[0, :40] = table.view(torch.uint8)
    damage, row_ok = (torch.full((1,), number, dtype=torch.int32, device=device) for number in (0, 1))
    cuda.apply_values(Payloads(data, 1, row_ok, 0, 48, 0), tiles, fmt, 255, last[None], damage)
    assert all_equal(last, fresh) and not damage.item()


def check_far_planes(fmt: FloatFormat, num_values: int, device: torch.device) -> None:
    block_size = 512
    tiles = make_tiles([(0, num_values)], device, block_size=block_size)
    values = random_bytes(num_values * fmt.item_bytes, device).view(fmt.dtype)
    data = torch.empty(1, tiles.num_plane_values * fmt.low_bytes, dtype=torch.uint8, device=device)
    exponents = torch.empty(1, tiles.num_state_values, dtype=torch.uint8, device=device)
    cuda.split_tiles(values, tiles, fmt, data[0], None, exponents[0])
    out = torch.zeros_like(values)
    row_ok = torch.ones(1, dtype=torch.int32, device=device)
    cuda.merge_rows(exponents, Payloads(data, 1, row_ok, 0, 0, 0), 0, tiles, fmt, out[None])
    assert all_equal(out, values)
    out.zero_()
    cuda.copy_out(values[None], 1, make_tiles([(0, num_values)], device, state_is_flat=True), out[None])
    assert all_equal(out, values)
    hashes, _ = cuda.hash_blocks(values, tiles, fmt, None)
    middle = planted_places(num_values)[4] // block_size * block_size
    for start in (0, middle, (num_values - 1) // block_size * block_size):
        part = values[start : start + 4 * block_size].cpu()
        wanted = torch.zeros(len(part), dtype=torch.uint8)
        reference.split_planes(part, fmt, wanted)
        assert same_bits(exponents[0, start : start + len(part)], wanted)
        first = start // block_size
        expected = reference.hash_blocks(part, fmt, block_size)
        assert same_bits(hashes[first : first + len(expected)], expected)
    assert same_bits(cuda.checksum(values.view(1, -1)), reference.checksum(values.view(1, -1)))


def check_far_symbols(fmt: FloatFormat, num_values: int, device: torch.device) -> None:
    """Random exponents: nearly all are escapes."""
    tiles = make_tiles([(0, num_values)], device)
    values = random_bytes(num_values * fmt.item_bytes, device).view(fmt.dtype)
    scan = cuda.scan_symbols(values, tiles, fmt)
    sizes = cuda.symbol_sizes(scan, tiles)
    low_bytes = tiles.num_plane_values * fmt.low_bytes
    sections_at = 32 + low_bytes + tiles.num_plane_values // 2
    table = cuda.section_table(sizes, sections_at, TILES)
    data = torch.empty(1, sections_at + sum(sizes.tolist()) + 64 & -ALIGNMENT, dtype=torch.uint8, device=device)
    data[0, :24] = table.view(torch.uint8)
    cuda.split_tiles(values, tiles, fmt, data[0, 32:][:low_bytes], None, None)
    cuda.put_nibbles(values, tiles, fmt, scan.tops, data[0, 32 + low_bytes : sections_at])
    cuda.pack_symbols(values, tiles, fmt, scan, SectionRoom(data[0, sections_at:], table, sections_at, 0))
    out, damage = torch.zeros_like(values), torch.zeros(1, dtype=torch.int32, device=device)
    row_ok = torch.ones(1, dtype=torch.int32, device=device)
    cuda.merge_symbols(Payloads(data, 1, row_ok, 0, sections_at, 0), 32, tiles, fmt, out[None], damage)
    assert all_equal(out, values) and not damage.item()


def needs_memory(num_gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < num_gib << 30:
        pytest.skip(f"needs {num_gib} GiB of device memory, {free / 2**30:.1f} are free")


def test_changes_beyond_2_31_values() -> None:
    needs_memory(32)
    check_far_values(BF16, FAR_VALUES, current_device())
    torch.cuda.empty_cache()


def test_planes_beyond_2_31_values() -> None:
    needs_memory(32)
    check_far_planes(BF16, FAR_VALUES, current_device())
    torch.cuda.empty_cache()


def test_symbols_beyond_2_31_values() -> None:
    needs_memory(32)
    check_far_symbols(BF16, FAR_VALUES, current_device())
    torch.cuda.empty_cache()


# ---- streams and devices

SLEEP_CYCLES = 20_000_000


def test_launches_go_to_the_current_stream() -> None:
    """Each stream sleeps before it makes the input: a kernel on another stream would read what was there before."""
    device, tiles = current_device(), make_tiles([(0, 300_001)], "cuda", block_size=512)
    values = [some_values(BF16, 300_001, seed) for seed in range(4)]
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
            found.append(cuda.hash_blocks(room, tiles, BF16, None)[0])
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    for hashes, tensor in zip(found, values, strict=True):
        assert same_bits(hashes, reference.hash_blocks(tensor, BF16, 512))


def test_side_streams_that_share_a_device() -> None:
    """Whole round trips, interleaved, with memory of each stream's own."""
    device, num_values = current_device(), 200_003
    tiles = make_tiles([(0, num_values)], device, state_is_flat=True)
    gather = Gather("values", tiles, BF16, 1)
    pairs = [
        (last, changed_values(last, BF16, 0.08, 255)) for last in (some_values(BF16, num_values, s) for s in range(3))
    ]
    there = [(last.to(device)[None], fresh.to(device)[None]) for last, fresh in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results: list[list[torch.Tensor]] = [[] for _ in pairs]
    damages: list[torch.Tensor] = []
    for _ in range(5):
        for stream, (last, fresh), result in zip(streams, there, results, strict=True):
            with torch.cuda.stream(stream):
                rows, out = last.clone(), torch.zeros_like(last)
                damage = torch.zeros(1, dtype=torch.int32, device=device)
                data = gather.payloads(fresh, last, cuda.checksum(fresh), 1 << 20)
                gather.decode(data, 1, rows, out, damage)
                result += [rows, out]
                damages.append(damage)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    for (_, fresh), result in zip(pairs, results, strict=True):
        assert all(same_bits(tensor[0], fresh) for tensor in result)
    assert not any(damage.item() for damage in damages)


def test_only_on_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two devices, there is {torch.cuda.device_count()}")
    values = some_values(BF16, 4999)
    there = values.to("cuda:1")
    with torch.cuda.device(0), pytest.raises(CieraKernelError, match="is current"):
        cuda.hash_blocks(there, make_tiles([(0, 4999)], "cuda:1", block_size=512), BF16, None)
    with torch.cuda.device(1):
        hashes, _ = cuda.hash_blocks(there, make_tiles([(0, 4999)], "cuda:1", block_size=512), BF16, None)
        assert same_bits(hashes, reference.hash_blocks(values, BF16, 512))


# ---- compute-sanitizer


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(tool: str) -> None:
    """The quick cases, which together run all of every kernel."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer (of the CUDA toolkit) is not on PATH")
    # without torch's caching allocator each buffer is an allocation, whose bounds the sanitizer knows
    env = {**os.environ, "PYTHONPATH": python_path(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
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
    exponents = torch.zeros(-(-num_bytes // 64) * 64, dtype=torch.uint8, device=device)
    cuda.split_tiles(values, make_tiles([(0, num_bytes)], device), BF16, None, None, exponents)
    exponents = exponents[:num_bytes]
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
