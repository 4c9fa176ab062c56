"""The launcher, through the real cuda.core: each test's `*_in_child` runs under the stand-in driver (fake_cuda).

What that cannot show (a real driver's compiler, its streams, its timing) is for tests/gpu.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fake_cuda import run_with_fake_cuda
from fsdp_ciera.errors import CieraKernelError
from fsdp_ciera.kernels import launch as launching
from fsdp_ciera.kernels.launch import KernelModule

SOURCE = """
extern "C" __global__ void affine(const int* in, long long* out, int factor, long long shift, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = (long long)in[i] * factor + shift;
}
extern "C" __global__ void reverse_blocks(const unsigned* in, unsigned* out) {
    extern __shared__ unsigned room[];
    room[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void copy_from(const unsigned long long* addresses, unsigned* out) {
    out[threadIdx.x] = reinterpret_cast<const unsigned*>(addresses[threadIdx.x])[0];
}
extern "C" __global__ void nothing() {}
"""

CPU = torch.device("cpu")
WAITING_CALLS = ("Synchronize", "Memcpy", "Query", "Event", "Alloc")


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The kernels above, compiled for sm_80."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH: the test's kernels cannot be compiled")
    folder = tmp_path_factory.mktemp("ptx")
    (folder / "kernels.cu").write_text(SOURCE)
    subprocess.run([nvcc, "-ptx", "-arch=compute_80", "-o", "kernels.ptx", "kernels.cu"], check=True, cwd=folder)
    return (folder / "kernels.ptx").read_bytes()


def affine_arguments(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count, dtype=torch.int32), torch.empty(count, dtype=torch.int64)


def raises(message: str) -> pytest.RaisesExc[CieraKernelError]:
    return pytest.RaisesExc(CieraKernelError, match=message)


# ---- the PTX text -------------------------------------------------------------------------------------------------------


def test_parameters_are_read_from_the_ptx(ptx: bytes) -> None:
    module = KernelModule(ptx)
    sizes = {"affine": (8, 8, 4, 8, 4), "reverse_blocks": (8, 8), "copy_from": (8, 8), "nothing": ()}
    assert module.entries == sizes
    assert module.least_capability == (8, 0)
    assert module.ptx_version >= (7, 0)


def test_parameters_that_carry_attributes_are_read() -> None:
    text = """.version 9.0
    .target sm_100a
    .visible .entry k(
        .param .u64 .ptr .align 1 k_param_0,
        .param .u64 .ptr .global .align 16 k_param_1,
        .param .s32 k_param_2
    )
    .maxntid 128
    """
    module = KernelModule(text.encode())
    assert module.entries == {"k": (8, 8, 4)}
    assert module.least_capability == (10, 0)


@pytest.mark.parametrize(
    "parameter", [".param .f32 x", ".param .u8 x", ".param .align 8 .b8 x[24]", ".param .b32 x[2]"]
)
def test_parameters_that_cannot_be_passed_are_refused(parameter: str) -> None:
    with raises("cannot be passed"):
        KernelModule(f".version 9.0\n.target sm_80\n.entry k({parameter})".encode())


# ---- launches that work ----------------------------------------------------------------------------------------------------


def launches_in_child(ptx: bytes) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda()
    module = KernelModule(ptx)
    values, out = affine_arguments(1000)
    module.launch("affine", 8, 128, values, out, -3, 1 << 40, 1000, device=CPU)
    assert torch.equal(out, values.long() * -3 + (1 << 40))

    words = torch.arange(256, dtype=torch.int32)
    reversed_words = torch.empty_like(words)
    module.launch("reverse_blocks", 4, 64, words, reversed_words, shared_bytes=256, device=CPU)
    assert torch.equal(reversed_words.view(4, 64), words.view(4, 64).flip(1))
    assert fake.launches[-1].shared_bytes == 256

    sources = [torch.tensor([7 + i], dtype=torch.int32) for i in range(4)]
    fake.lend(*sources)
    addresses, found = torch.tensor([source.data_ptr() for source in sources]), torch.empty(4, dtype=torch.int32)
    module.launch("copy_from", 1, 4, addresses, found, device=CPU)
    assert found.tolist() == [7, 8, 9, 10]

    # no blocks: nothing runs, but the arguments are looked at
    num_launches = len(fake.launches)
    module.launch("affine", 0, 128, values[:0], out[:0], 1, 0, 0, device=CPU)
    with raises("takes 5 arguments"):
        module.launch("affine", 0, 128, values, device=CPU)
    assert len(fake.launches) == num_launches


def test_launches(ptx: bytes) -> None:
    run_with_fake_cuda(launches_in_child, ptx)


def sizes_in_child(ptx: bytes) -> None:
    import cuda.core

    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda()
    handed: list[object] = []
    real = cuda.core.launch

    def launch(stream: object, config: object, kernel: object, *args: object) -> None:
        handed[:] = args
        real(stream, config, kernel, *args)

    cuda.core.launch = launch
    module = KernelModule(ptx)
    values, out = affine_arguments()
    for factor, shift in ((-1, -1), (2**31 - 1, 2**63 - 1), (2**32 - 1, 2**64 - 1), (-(2**31), -(2**63)), (0, 0)):
        module.launch("affine", 1, 8, values, out, factor, shift, 5, device=CPU)
        # as the driver read them: an int64 that was passed in 4 bytes would lack its upper half
        assert fake.launches[-1].params == (
            values.data_ptr().to_bytes(8, "little"),
            out.data_ptr().to_bytes(8, "little"),
            (factor & 2**32 - 1).to_bytes(4, "little"),
            (shift & 2**64 - 1).to_bytes(8, "little"),
            (5).to_bytes(4, "little"),
        )
        # as they were handed over: cuda.core passes a Python int as 8 bytes
        assert [8 if isinstance(arg, int) else np.dtype(type(arg)).itemsize for arg in handed] == [8, 8, 4, 8, 4]


def test_ints_are_passed_in_their_parameters_size(ptx: bytes) -> None:
    run_with_fake_cuda(sizes_in_child, ptx)


def loading_in_child(ptx: bytes) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda()
    module = KernelModule(ptx)
    module.load(CPU)
    loading = fake.calls()
    assert loading.count("cuLibraryLoadData") == 1
    assert loading.count("cuLibraryGetKernel") == loading.count("cuKernelGetFunction") == len(module.entries)

    fake.forget_calls()
    module.load(CPU)
    values, out = affine_arguments()
    for stream in (0, 0x1000, 0x2000, 0x1000, 0):
        fake.stream = stream
        for _ in range(10):
            module.launch("affine", 1, 8, values, out, 1, 0, 5, device=CPU)
    assert [launch.stream for launch in fake.launches[::10]] == [1, 0x1000, 0x2000, 0x1000, 1]  # 1: CU_STREAM_LEGACY
    calls = fake.calls()
    assert calls.count("cuLaunchKernel") + calls.count("cuLaunchKernelEx") >= 50
    assert {call for call in calls if call.startswith(("cuLibrary", "cuKernel"))} == set(), (
        "loaded once for all launches"
    )
    waiting = [call for call in loading + calls if any(name in call for name in WAITING_CALLS)]
    assert not waiting, f"a launch must not wait for the device: {waiting}"


def test_loads_once_and_never_waits(ptx: bytes) -> None:
    run_with_fake_cuda(loading_in_child, ptx)


def threads_in_child(ptx: bytes) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda()
    module = KernelModule(ptx)
    start, failures = threading.Barrier(2), []

    def work(factor: int) -> None:
        try:
            start.wait()
            for count in range(1, 20):
                values, out = affine_arguments(count)
                module.launch("affine", 1, 32, values, out, factor, factor, count, device=CPU)
                assert torch.equal(out, values.long() * factor + factor)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert len(fake.launches) == 38
    assert len({launch.thread for launch in fake.launches}) == 2
    assert fake.calls().count("cuLibraryLoadData") == 1, "two threads that come first together load once"


def test_two_threads_launch(ptx: bytes) -> None:
    run_with_fake_cuda(threads_in_child, ptx)


def host_cost_in_child(ptx: bytes) -> None:
    import cuda.core

    from fake_cuda.bridge import FakeCuda

    FakeCuda()
    cuda.core.launch = lambda *args: None
    module = KernelModule(ptx)
    values, out = affine_arguments()
    launch = KernelModule.launch.__wrapped__  # type: ignore[attr-defined]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(1000):
            launch(module, "affine", 1, 8, values, out, 1, 0, 5, device=CPU)
        seconds.append(time.perf_counter() - start)
    print(f"{min(seconds) * 1000:.1f}")


def test_a_launch_costs_microseconds(ptx: bytes) -> None:
    microseconds = float(run_with_fake_cuda(host_cost_in_child, ptx))
    assert microseconds < 100, "the launcher's own time, without cuda.core's launch and torch's look-up of the stream"


# ---- launches that are refused ---------------------------------------------------------------------------------------------


def refused_in_child(ptx: bytes) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda()
    module = KernelModule(ptx)
    values, out = affine_arguments()

    def refused(message: str, *args: object, name: str = "affine", blocks: int = 1, threads: int = 8) -> None:
        num_launches = len(fake.launches)
        with raises(message):
            module.launch(name, blocks, threads, *args, device=CPU)  # type: ignore[arg-type]
        assert len(fake.launches) == num_launches

    refused("takes 5 arguments, got 4", values, out, 1, 0)
    refused("takes 5 arguments, got 6", values, out, 1, 0, 5, 5)
    refused("argument 2 .* is 4294967296; the parameter has 4 bytes", values, out, 1 << 32, 0, 5)
    refused("argument 2 .* is -2147483649;", values, out, -(1 << 31) - 1, 0, 5)
    refused("argument 3 .* has 8 bytes", values, out, 1, 1 << 64, 5)
    refused("argument 3 .* has 8 bytes", values, out, 1, -(1 << 63) - 1, 5)
    refused("argument 2 .* is a tensor on cpu; the parameter has 4 bytes", values, out, values, 0, 5)
    refused("argument 1 .* is a tensor on meta; .* a tensor on cpu", values, out.to("meta"), 1, 0, 5)
    for other in (True, 1.0, None, np.int64(1), np.zeros(5)):
        refused("argument 2 ", values, out, other, 0, 5)
        refused("argument 3 ", values, out, 1, other, 5)
    refused("no kernel is called shrink: there are affine", name="shrink")
    refused("2048 threads a block: it takes at most 1024", values, out, 1, 0, 5, threads=2048)
    refused("kernel affine, .1, 1. blocks of 0 threads", values, out, 1, 0, 5, threads=0)
    refused("kernel affine, .-1, 1. blocks", values, out, 1, 0, 5, blocks=-1)


def test_wrong_arguments_are_refused(ptx: bytes) -> None:
    run_with_fake_cuda(refused_in_child, ptx)


def memory_errors_in_child(ptx: bytes) -> None:
    import emulator
    from fake_cuda.bridge import FakeCuda

    FakeCuda()
    module = KernelModule(ptx)
    values, out = affine_arguments(8)
    with pytest.raises(emulator.Misaligned):
        module.launch("affine", 1, 8, values.view(torch.uint8)[1:], out, 1, 0, 7, device=CPU)
    with pytest.raises(emulator.OutOfBounds):
        module.launch("affine", 1, 16, values, out, 1, 0, 9, device=CPU)
    module.launch("affine", 1, 8, values, out, 2, 0, 8, device=CPU)  # an error does not stick
    assert torch.equal(out, values.long() * 2)


def test_memory_errors_are_reported_by_the_interpreter(ptx: bytes) -> None:
    run_with_fake_cuda(memory_errors_in_child, ptx)


# ---- where the kernels cannot run --------------------------------------------------------------------------------------------


def check_device(ptx: bytes, capability: str, driver: str, reason: str | None) -> None:
    os.environ |= {"FAKE_CUDA_CAPABILITY": capability, "FAKE_CUDA_DRIVER": driver}
    module = KernelModule(ptx)
    found = module.why_not_loadable(CPU)
    if reason is None:
        assert found is None
        module.load(CPU)
        return
    assert found is not None and reason in found and launching.WITHOUT_KERNELS in found
    with raises(".") as error:
        module.launch("nothing", 1, 1, device=CPU)
    assert str(error.value) == found


def reasons_in_child(ptx: bytes) -> None:
    from fake_cuda.bridge import FakeCuda

    FakeCuda()
    older = ptx.replace(b".version 9.0", b".version 7.0")
    assert older != ptx
    check_device(ptx, "75", "13000", "compute capability 7.5; the kernels need 8.0")
    check_device(ptx, "80", "13000", None)
    check_device(ptx, "120", "13000", None)
    check_device(ptx, "90", "12090", "supports CUDA 12.9; the kernels are PTX 9.0 and need a driver for CUDA 13.0")
    check_device(older, "90", "12090", None)
    check_device(older, "90", "11000", None)
    check_device(older, "90", "10020", "supports CUDA 10.2; the kernels are PTX 7.0 and need a driver for CUDA 11.0")

    os.environ |= {"FAKE_CUDA_CAPABILITY": "90", "FAKE_CUDA_DRIVER": "13000"}
    future = KernelModule(ptx.replace(b".version 9.0", b".version 99.7"))
    assert "PTX 99.7" in (future.why_not_loadable(CPU) or "")
    sys.modules["cuda.core"] = None  # type: ignore[assignment]
    assert "pip install cuda-python" in (KernelModule(ptx).why_not_loadable(CPU) or "")


def test_reasons_are_named(ptx: bytes) -> None:
    if b".version 9.0" not in ptx:
        pytest.skip("the nvcc on PATH writes another PTX version than 9.0")
    run_with_fake_cuda(reasons_in_child, ptx)


def shipped_kernels_in_child(ptx_file: Path) -> None:
    from fake_cuda.bridge import FakeCuda

    fake = FakeCuda()
    launching.PTX_FILE = ptx_file.with_name("absent.ptx")
    assert "install it again" in (launching.why_not_available(CPU) or "")
    launching.PTX_FILE = ptx_file
    assert launching.why_not_available(CPU) is None
    module = launching.kernel_module(CPU)
    assert launching.kernel_module(CPU) is module
    assert fake.calls().count("cuLibraryLoadData") == 1


def test_shipped_kernels_are_one_module(ptx: bytes, tmp_path: Path) -> None:
    (tmp_path / "kernels.ptx").write_bytes(ptx)
    run_with_fake_cuda(shipped_kernels_in_child, tmp_path / "kernels.ptx")


def test_without_a_driver_the_reason_comes_at_once(ptx: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.ptx").write_bytes(ptx)
    monkeypatch.setattr(launching, "PTX_FILE", tmp_path / "kernels.ptx")
    monkeypatch.setattr(launching, "_SHIPPED", launching._ShippedKernels())
    monkeypatch.setattr(launching, "DRIVER_LIBRARY", "libcuda-absent.so.1")
    device = torch.device("cuda:0")
    for _ in range(3):  # cuda-bindings hangs when asked again; see [Note: Probing]
        assert "no NVIDIA driver" in (launching.why_not_available(device) or "")
        with raises("no NVIDIA driver"):
            launching.kernel_module(device)


def test_other_devices_are_refused() -> None:
    with raises("'cpu' device"):
        launching.current_place(CPU)


def test_place_is_torchs_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0x77))
    assert launching.current_place(torch.device("cuda:1")) == (1, 0x77)
    assert launching.current_place(torch.device("cuda")) == (1, 0x77)
    with raises("cuda:0 while cuda:1 is current: call torch.cuda.set_device"):
        launching.current_place(torch.device("cuda:0"))
