"""The machine: memory, launches, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .batch import Batch, Shape
from .code import KernelCode, Module
from .coverage import KernelCoverage
from .errors import LaunchError
from .memory import Memory
from .parse import Param

MAX_BLOCK, MAX_BLOCK_DIMS = 1024, (1024, 1024, 64)
MAX_GRID_DIMS = (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = 227 * 1024

Dimensions = int | Sequence[int]
Argument = int | np.integer[Any] | bytes


class Machine:
    """Runs kernels of one module. One CTA batch has up to num_threads_at_once threads (at least one CTA); CTAs of
    different batches never interleave, but races between them are found all the same. A seed draws the schedule."""

    def __init__(
        self,
        module: Module,
        num_threads_at_once: int = 8192,
        seed: int | None = None,
        check_races: bool = True,
        measure_traffic: bool = True,
        max_steps: int = 50_000_000,
    ) -> None:
        self.module, self.num_threads_at_once = module, num_threads_at_once
        self.check_races, self.measure_traffic, self.max_steps = check_races, measure_traffic, max_steps
        self.random = None if seed is None else np.random.default_rng(seed)
        self.memory = Memory()
        self.symbols = {
            v.name: self.memory.allocate(v.num_bytes, v.initial or bytes(v.num_bytes), read_only=v.space == "const")
            for v in module.variables
            if v.space in ("global", "const")
        }
        self.coverage = {name: KernelCoverage(code.kernel) for name, code in module.code.items()}
        self.steps = self.thread_steps = 0  # instructions, and instructions times threads, over all launches

    def upload(self, array: npt.NDArray[Any]) -> int:
        return self.memory.allocate(array.nbytes, np.ascontiguousarray(array).tobytes())

    def alloc(self, num_bytes: int) -> int:
        """Bytes that count as never written."""
        return self.memory.allocate(num_bytes)

    def map_host(self, view: npt.NDArray[np.uint8], address: int) -> None:
        """Makes a host array the memory at that address; its bytes count as written. Kernels work on the array itself,
        which the machine keeps alive until release."""
        self.memory.map_host(view, address)

    def release(self, address: int) -> None:
        """Ends an allocation or a mapping; later accesses are out of bounds."""
        self.memory.release(address)

    def download(self, address: int, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        """Raises UninitialisedRead if some byte was never written."""
        return self.memory.load(address, count * np.dtype(dtype).itemsize).view(dtype)

    def written(self, address: int, num_bytes: int) -> npt.NDArray[np.bool_]:
        """Which bytes hold something: uploaded or written by a kernel."""
        return self.memory.initialised(address, num_bytes)

    def symbol(self, name: str) -> int:
        """Address of a global or constant variable."""
        return self.symbols[name]

    def launch(self, name: str, grid: Dimensions, block: Dimensions, *args: Argument, shared_bytes: int = 0) -> None:
        """Runs a kernel to its end. Integers are checked for range; NumPy scalars and bytes have to have the exact size
        of the parameter. shared_bytes is the dynamic part of shared memory."""
        if name not in self.module.code:
            raise LaunchError(f"no kernel {name}; there are {sorted(self.module.code)}")
        code = self.module.code[name]
        shape = Shape(dimensions(grid, MAX_GRID_DIMS, "grid"), dimensions(block, MAX_BLOCK_DIMS, "block"))
        check_size(code, shape, shared_bytes)
        parameters = pack_arguments(name, code.kernel.params, args)
        self.memory.begin_launch()
        ctas: npt.NDArray[np.int64] = np.arange(shape.num_ctas)
        if self.random is not None:
            ctas = self.random.permutation(ctas)
        at_once = max(1, self.num_threads_at_once // shape.block_size)
        for first in range(0, shape.num_ctas, at_once):
            batch = Batch(
                code,
                shape,
                ctas[first : first + at_once],
                parameters,
                self.memory,
                self.symbols,
                self.coverage[name],
                dynamic_shared=shared_bytes,
                check_races=self.check_races,
                measure=self.measure_traffic,
                random=self.random,
                max_steps=self.max_steps,
            )
            try:
                batch.run()
            finally:
                self.steps += batch.steps
                self.thread_steps += batch.thread_steps

    def report(self) -> str:
        """Coverage of every kernel as text."""
        return "\n".join(f"{name}: {coverage.report()}" for name, coverage in self.coverage.items())


def dimensions(given: Dimensions, limits: tuple[int, ...], what: str) -> tuple[int, int, int]:
    values = [int(given)] if isinstance(given, int | np.integer) else [int(v) for v in given]
    if not 1 <= len(values) <= 3 or any(not 1 <= v <= limit for v, limit in zip(values, limits, strict=False)):
        raise LaunchError(f"{what} {given}")
    x, y, z = [*values, 1, 1][:3]
    return x, y, z


def check_size(code: KernelCode, shape: Shape, shared_bytes: int) -> None:
    limit = min(MAX_BLOCK, code.kernel.max_threads or MAX_BLOCK)
    if shape.block_size > limit:
        raise LaunchError(f"{code.kernel.name}: block of {shape.block_size} threads, at most {limit}")
    if shared_bytes < 0 or code.variable_bytes + shared_bytes > MAX_SHARED_BYTES:
        raise LaunchError(f"{code.kernel.name}: {code.variable_bytes} + {shared_bytes} bytes of shared memory")


def pack_arguments(kernel: str, params: list[Param], args: Sequence[Argument]) -> npt.NDArray[np.uint8]:
    if len(args) != len(params):
        raise LaunchError(f"{kernel} takes {len(params)} arguments, got {len(args)}")
    size = max((p.offset + p.num_bytes for p in params), default=0)
    buffer = np.zeros(size, np.uint8)
    for number, (param, value) in enumerate(zip(params, args, strict=True)):
        where = f"{kernel}: argument {number} ({param.name}, .{param.type}, {param.num_bytes} bytes)"
        if isinstance(value, bytes | np.generic):
            raw = bytes(value) if isinstance(value, bytes) else value.tobytes()
            if len(raw) != param.num_bytes:
                raise LaunchError(f"{where}: {type(value).__name__} has {len(raw)} bytes")
        elif isinstance(value, int):
            bits = 8 * param.num_bytes
            if not -(1 << (bits - 1)) <= value < 1 << bits:
                raise LaunchError(f"{where}: {value} does not fit")
            raw = (value & ((1 << bits) - 1)).to_bytes(param.num_bytes, "little")
        else:
            raise LaunchError(f"{where}: {type(value).__name__} is not an integer, NumPy scalar or bytes")
        buffer[param.offset : param.offset + param.num_bytes] = np.frombuffer(raw, np.uint8)
    return buffer
