"""The shim as a device (shim_device.py): its kernels equal the reference, launches are counted and checked, and it is fast
enough for whole training runs, in forked ranks too."""

from __future__ import annotations

import multiprocessing
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fsdp_ciera.errors import CieraKernelError
from fsdp_ciera.kernels import cuda, launch, reference_tiles
from fsdp_ciera.kernels.dispatch import VARIABLE, tile_kernels_of
from fsdp_ciera.kernels.launch import KernelModule
from fsdp_ciera.kernels.tiles import CTA_VALUES, Scan, make_tiles
from kernel_cases import (
    BF16,
    GuardedMemory,
    Layout,
    Unit,
    all_cases,
    changed_values,
    run_case,
    sent_payloads,
    some_values,
)
from shim_device import ShimDevice, install, library

PATTERNS = (0xCD, 0x32)
NUM_CTAS = 45
MOST_MILLISECONDS = 50


@pytest.fixture
def shim() -> Iterator[ShimDevice]:
    with install() as device:
        yield device


@pytest.mark.kernels_only
@pytest.mark.parametrize("kernel", sorted({case.kernels[0] for case in all_cases()}))
def test_results_are_the_references(shim: ShimDevice, kernel: str) -> None:
    """Memory is filled with one pattern before, and damaged payloads once only."""
    cases = [case for case in all_cases() if case.kernels[0] == kernel]
    assert cases
    for case in cases:
        for pattern in PATTERNS if "damaged" not in case.name else PATTERNS[:1]:
            memory = GuardedMemory(torch.device("cpu"), pattern)
            run_case(case, memory)
            memory.check_guards()
    assert {name for name, _ in shim.launches} == {name for case in cases for name in case.kernels}


def scan(seed: int = 0) -> tuple[Scan, Scan]:
    """Of 45 tiles, by the launcher and by the reference."""
    tiles, last = make_tiles([(0, NUM_CTAS * CTA_VALUES)], "cpu"), some_values(BF16, NUM_CTAS * CTA_VALUES, seed)
    fresh = changed_values(last, BF16, 0.1, 255, seed)
    found, wanted = (kernels.scan_values(fresh, last, tiles, BF16, 255) for kernels in (cuda, reference_tiles))
    return found, wanted


def is_right(seed: int = 0) -> bool:
    found, wanted = scan(seed)
    return torch.equal(found.bits, wanted.bits) and torch.equal(found.up_to, wanted.up_to)


def test_launches_are_counted(shim: ShimDevice) -> None:
    assert is_right()
    assert shim.launches == [("scan_values_bf16", (NUM_CTAS, 1))]
    none = make_tiles([], "cpu")
    cuda.scan_values(some_values(BF16, 8), some_values(BF16, 8), none, BF16, 255)
    assert len(shim.launches) == 1


def test_arguments_are_checked_as_on_a_device(shim: ShimDevice) -> None:
    module = launch.kernel_module(torch.device("cpu"))
    for args, message in (
        ((torch.zeros(1), 1, 1), "takes 2 arguments"),
        ((torch.zeros(1), 1 << 70), "argument 1 of kernel finish_checksums"),
        ((torch.zeros(1, device="meta"), 1), "argument 0 of kernel finish_checksums is a tensor on meta"),
    ):
        with pytest.raises(CieraKernelError, match=message):
            module.launch("finish_checksums", (1, 1), 256, *args, device=torch.device("cpu"))
    with pytest.raises(CieraKernelError, match="no kernel is called"):
        module.launch("nothing", (1, 1), 256, device=torch.device("cpu"))
    assert not shim.launches


def test_the_launcher_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KernelModule.launch, launch.kernel_module, launch.current_place, launch.why_not_available
    monkeypatch.setenv(VARIABLE, "cuda")
    with install():
        assert tile_kernels_of(torch.device("cpu")) is cuda
    assert real == (KernelModule.launch, launch.kernel_module, launch.current_place, launch.why_not_available)


def test_threads_take_turns(shim: ShimDevice) -> None:
    """Autograd's threads launch too, and there is one shared memory."""
    results = [False] * 4

    def run(number: int) -> None:
        results[number] = all(is_right(number) for _ in range(3))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results)


def in_rank(rank: int, answers: multiprocessing.Queue[tuple[int, bool, int]]) -> None:
    torch.set_num_threads(1)  # more of them hang in a fork of a process that had some
    subprocess.run = None  # type: ignore[assignment]  # nothing is compiled again
    device = install()
    answers.put((rank, is_right(rank), len(device.launches)))


def test_forked_ranks_have_the_library() -> None:
    library()
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[tuple[int, bool, int]] = context.Queue()  # type: ignore[assignment]
    ranks = [context.Process(target=in_rank, args=(rank, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    assert found == [(0, True, 1), (1, True, 1)]


def test_how_long_a_launch_takes(shim: ShimDevice) -> None:
    """CPU time of this thread, the least of some: what other processes do is not in it."""
    unit = Unit(BF16, ((0, NUM_CTAS * CTA_VALUES),), 0.1, world_size=1)
    payloads = sent_payloads(unit, Layout("values"), own=1)
    seconds = []
    for _ in range(7):
        rows, damage = unit.state(unit.last[0])[None], torch.zeros(1, dtype=torch.int32)
        start = time.thread_time()
        cuda.apply_values(payloads, unit.tiles, BF16, 255, rows, damage)
        seconds.append(time.thread_time() - start)
    assert torch.equal(rows[0].view(torch.int16), unit.state(unit.fresh[0]).view(torch.int16)) and not damage.any()
    milliseconds = 1e3 * min(seconds)
    print(
        f"\n{NUM_CTAS} CTAs of apply_values_bf16, three barriers and eleven exchanges in a warp: {milliseconds:.1f} ms"
    )
    assert milliseconds < MOST_MILLISECONDS
