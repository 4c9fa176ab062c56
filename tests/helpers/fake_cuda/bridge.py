"""Runs what is launched on the stand-in driver in the PTX interpreter, on the memory of CPU tensors."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

import emulator
from fsdp_ciera.kernels import launch as launching

_LAUNCH_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)


class Launch(NamedTuple):
    """One launch as the driver received it."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    params: tuple[bytes, ...]
    """The bytes of each parameter, as many as the PTX text says."""
    thread: int
    """The host thread that launched (`threading.get_ident`)."""


class FakeCuda:
    """Make one in a process of `run_with_fake_cuda`; from then on `KernelModule.launch` takes CPU tensors.

    A kernel may touch the tensors that its launch was given, and those lent for good with `lend` (for kernels that find
    addresses in memory); everything else is out of bounds to the interpreter. Its errors are raised by the launch itself.
    seed, check_races: of `emulator.Machine`.
    """

    def __init__(self, seed: int | None = None, check_races: bool = True) -> None:
        self.launches: list[Launch] = []
        self.stream = 0
        """Raw handle of the stream that is current from now on."""
        self.machines: dict[str, emulator.Machine] = {}
        """PTX text -> the machine that runs its kernels, with what they covered so far."""
        self._seed, self._check_races = seed, check_races
        self._lent: list[torch.Tensor] = []
        self._thread = threading.local()
        self._device = threading.Lock()  # one kernel at a time
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._driver.fake_cuda_calls.restype = ctypes.c_char_p
        self._callback = _LAUNCH_CALLBACK(self._on_launch)  # kept: the driver calls it
        self._driver.fake_cuda_on_launch(self._callback)
        self._patch_launcher()

    def lend(self, *tensors: torch.Tensor) -> None:
        """Lets every later kernel touch these tensors, and keeps them alive."""
        self._lent += tensors

    def calls(self) -> list[str]:
        """Names of the recorded driver calls, in order."""
        recorded: bytes = self._driver.fake_cuda_calls()
        return recorded.decode().split()

    def forget_calls(self) -> None:
        """Empties the record."""
        self._driver.fake_cuda_forget_calls()

    def _patch_launcher(self) -> None:
        """Puts our place for torch's current stream, and notes the tensors of a launch before the real one."""
        real = launching.KernelModule.launch

        @functools.wraps(real)
        def launch(module: launching.KernelModule, name: str, *args: Any, **options: Any) -> None:
            self._thread.tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self._thread.error = None
            try:
                real(module, name, *args, **options)
            except launching.CieraKernelError:
                if self._thread.error is None:
                    raise
            finally:
                self._thread.tensors = []
            if self._thread.error is not None:
                raise self._thread.error

        launching.KernelModule.launch = launch  # type: ignore[method-assign]
        launching.current_place = lambda device: launching.Place(0, self.stream)

    def _on_launch(self, ptx: bytes, name: bytes, dims: Any, shared_bytes: int, stream: int | None, params: Any) -> int:
        try:
            with self._device:
                self._run(ptx.decode(), name.decode(), tuple(dims[:6]), shared_bytes, stream or 0, params)
        except BaseException as error:  # raised again by `launch`: it cannot pass through the driver
            self._thread.error = error
            return 1
        return 0

    def _run(self, ptx: str, name: str, dims: tuple[int, ...], shared_bytes: int, stream: int, params: Any) -> None:
        machine = self.machines.get(ptx)
        if machine is None:
            module = emulator.Module(ptx)
            machine = emulator.Machine(module, seed=self._seed, check_races=self._check_races)
            self.machines[ptx] = machine
        values = tuple(
            ctypes.string_at(params[i], param.num_bytes) for i, param in enumerate(machine.module.kernels[name].params)
        )
        grid, block = dims[:3], dims[3:]
        self.launches.append(Launch(name, grid, block, shared_bytes, stream, values, threading.get_ident()))
        mapped: list[int] = []
        try:
            for start, end in _spans([*self._thread.tensors, *self._lent]):
                memory = (ctypes.c_uint8 * (end - start)).from_address(start)
                machine.map_host(np.ctypeslib.as_array(memory), start)
                mapped.append(start)
            machine.launch(name, grid, block, *values, shared_bytes=shared_bytes)
        finally:
            for start in mapped:
                machine.release(start)


def _spans(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """First and last address (exclusive) of the tensors' memory, in order; where tensors overlap, one span holds both."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
        if spans and start < spans[-1][1]:
            start, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((start, end))
    return spans


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
