"""Launches the project's CUDA kernels: PTX text from the package, through `cuda.core`, on torch's current stream.

    why_not_available(device)   None, or the reason why the kernels cannot run there
    kernel_module(device)       the shipped kernels, loaded on `device`
    KernelModule                the kernels of one PTX text; `launch` runs one of them

A launch is asynchronous: nothing here waits for the device, and nothing here needs a compiler.

[Note: Stream lifetime] torch's allocator hands memory that was freed on a stream to the next allocation on that stream,
without waiting. A launch goes to torch's *current* stream, so a tensor that was allocated while the same stream was current
may be dropped by the caller right after the launch: whoever gets its memory next works on it later on the same stream, after
the kernel. So launches call no `record_stream`. Who launches under `torch.cuda.stream(side)` on tensors of another stream
orders both streams with `wait_stream` in both directions, or calls `tensor.record_stream(side)`.

[Note: Eager loading] The driver loads a kernel when its function is first asked for, by default at its first launch, and
loading may wait for the whole device. In the middle of a training step, while another rank's collective waits for ours, that
wait can be for ever. So `load` asks for every function, and callers call `kernel_module` before the first gather.

[Note: Probing] cuda-bindings calls that fail for want of a driver can hang the process when repeated. So the driver is asked
through ctypes first, and `cuda.core` is touched only where that went well.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fsdp_ciera.errors import CieraKernelError

PTX_FILE = Path(__file__).parent / "ptx" / "ciera_compute_80.ptx"
"""The kernels that the package ships."""

DRIVER_LIBRARY = "libcuda.so.1"

WITHOUT_KERNELS = (
    "gathers of this device run uncompressed; set FSDP_CIERA_KERNELS=reference to run the codecs on it in plain torch"
)

# The CUDA version whose driver first reads a PTX ISA version, as cuDriverGetVersion gives it (1000 major + 10 minor).
_DRIVER_OF_PTX = {(7, minor): 11000 + 10 * minor for minor in range(9)}
_DRIVER_OF_PTX |= {(8, minor): 12000 + 10 * minor for minor in range(6)}
_DRIVER_OF_PTX |= {(8, 6): 12070, (8, 7): 12080, (8, 8): 12090}
_DRIVER_OF_PTX |= {(9, minor): 13000 + 10 * minor for minor in range(6)}

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")
_PARAMETER_BYTES = {f".{kind}{8 * num_bytes}": num_bytes for kind in "usb" for num_bytes in (4, 8)}

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY: torch's default stream, whatever CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM says

Argument: TypeAlias = torch.Tensor | int
# cuda.core ships no type information at its public path
Kernel: TypeAlias = Any
LaunchConfig: TypeAlias = Any
Stream: TypeAlias = Any


class Place(NamedTuple):
    """Where a launch goes: CUDA device number, and the raw handle of a stream on it (0: the default stream)."""

    device: int
    stream: int


def current_place(device: torch.device) -> Place:
    """torch's current stream on `device`: the one thing that launches ask of torch. Cost: about 1 microsecond.

    Raises `CieraKernelError` when it is not a CUDA device, or not the current one: a launch makes its device current in
    the calling thread, behind torch's back.
    """
    if device.type != "cuda":
        raise CieraKernelError(f"the CUDA kernels cannot run on a {device.type!r} device")
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise CieraKernelError(
            f"kernels for {device} while cuda:{current} is current: call torch.cuda.set_device first"
        )
    return Place(current, torch.cuda.current_stream(device).cuda_stream)


class _Loaded(NamedTuple):
    """The kernels of a module as they were loaded for one device."""

    core: ModuleType
    """`cuda.core`. Kept, since two threads that import it at the same time for the first time can break it."""
    kernels: dict[str, Kernel]
    most_threads: dict[str, int]


class KernelModule:
    """The kernels of one PTX text. Cost: parsing the text once; nothing is loaded before the first use on a device.

    Threads may share it: the dictionaries are only added to, and loading is under a lock.
    """

    def __init__(self, ptx: bytes) -> None:
        self._ptx = ptx
        text = ptx.decode("ascii")
        major, minor = _header(r"\.version\s+(\d+)\.(\d+)", text)
        self.ptx_version = (major, minor)
        """PTX ISA version, (major, minor)."""
        self.least_capability = divmod(_header(r"\.target\s+sm_(\d+)", text)[0], 10)
        """Oldest compute capability that the text may be compiled for, (major, minor)."""
        self.entries = {name: _parameter_bytes(name, parameters) for name, parameters in _ENTRY.findall(text)}
        """Kernel name -> bytes of each parameter."""
        self._reasons: dict[int, str | None] = {}
        self._loaded: dict[int, _Loaded] = {}
        self._streams: dict[Place, Stream] = {}
        self._configs: dict[tuple[int, int, int, int], LaunchConfig] = {}
        self._lock = threading.Lock()

    def why_not_loadable(self, device: torch.device) -> str | None:
        """The reason why `load` would fail on `device`, or `None`. Cost: one probe of the driver per device."""
        try:
            driver = _open_driver()
            index = current_place(device).device
            with self._lock:
                if index not in self._reasons:
                    self._reasons[index] = self._probe(driver, index)
                return self._reasons[index]
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
            return str(error)

    def load(self, device: torch.device) -> None:
        """Loads every kernel on `device`; again is free. See [Note: Eager loading].

        Raises `CieraKernelError` with the reason. Cost: the driver compiles the PTX, seconds where its cache is cold.
        """
        if self._loaded and current_place(device).device in self._loaded:
            return
        reason = self.why_not_loadable(device)
        if reason is not None:
            raise CieraKernelError(reason)
        index = current_place(device).device
        with self._lock:
            if index not in self._loaded:
                self._loaded[index] = self._load(index)

    def launch(
        self,
        name: str,
        num_blocks: int | tuple[int, int],
        num_threads: int,
        *args: Argument,
        shared_bytes: int = 0,
        device: torch.device,
    ) -> None:
        """Runs kernel `name` on torch's current stream: `num_blocks` blocks (x, or x and y) of `num_threads` threads. Does not
        wait.

        args: what the kernel takes, in order. A tensor gives its address (its dtype and shape are the caller's care) and
        must be on `device`, index included; an int must fit its parameter, signed or unsigned. `shared_bytes`: dynamic
        shared memory a block. No blocks: nothing is run. About streams and memory see [Note: Stream lifetime].

        Raises `CieraKernelError` when the arguments do not fit the kernel's parameters or the driver refuses the launch.
        Cost: about 10 microseconds of host time.
        """
        values = self._pack(name, args, device)
        grid = (num_blocks, 1) if isinstance(num_blocks, int) else num_blocks
        if not all(grid):
            return
        place = current_place(device)
        if place.device not in self._loaded:
            self.load(device)
        loaded = self._loaded[place.device]
        if num_threads > loaded.most_threads[name]:
            most = loaded.most_threads[name]
            raise CieraKernelError(
                f"kernel {name} launched with {num_threads} threads a block: it takes at most {most}"
            )
        core = loaded.core
        try:
            core.Device(place.device).set_current()  # in this thread: autograd's threads launch too
            stream = self._streams.get(place)
            if stream is None:
                stream = self._streams[place] = core.Stream.from_handle(place.stream or _LEGACY_STREAM)
            shape = (*grid, num_threads, shared_bytes)
            config = self._configs.get(shape)
            if config is None:
                config = self._configs[shape] = core.LaunchConfig(grid, block=num_threads, shmem_size=shared_bytes)
            core.launch(stream, config, loaded.kernels[name], *values)
        except Exception as error:
            raise CieraKernelError(f"kernel {name}, {grid} blocks of {num_threads} threads: {error}") from error

    def _probe(self, driver: ctypes.CDLL, index: int) -> str | None:
        version = _ask(driver, "cuDriverGetVersion")
        needed = _DRIVER_OF_PTX.get(self.ptx_version)
        ptx_version = "{}.{}".format(*self.ptx_version)
        if needed is None:
            return f"the kernels are PTX {ptx_version}, which this version of fsdp_ciera does not know"
        if version < needed:
            return (
                f"the NVIDIA driver supports CUDA {_dotted(version)}; the kernels are PTX {ptx_version} and need a driver for "
                f"CUDA {_dotted(needed)} or newer: update the driver, until then {WITHOUT_KERNELS}"
            )
        handle = _ask(driver, "cuDeviceGet", index)
        found = tuple(
            _ask(driver, "cuDeviceGetAttribute", attribute, handle)
            for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
        )
        if found < self.least_capability:
            return "cuda:{} has compute capability {}.{}; the kernels need {}.{} or newer: {}".format(
                index, *found, *self.least_capability, WITHOUT_KERNELS
            )
        try:
            from cuda.core import LaunchConfig, ObjectCode, launch  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            return f"the kernels are launched with cuda-python, which cannot be imported ({error}): pip install cuda-python"
        return None

    def _load(self, index: int) -> _Loaded:
        from cuda import core  # type: ignore[import-untyped]
        from cuda.bindings import driver  # type: ignore[import-untyped]

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        kernels, most_threads = {}, {}
        try:
            core.Device(index).set_current()
            code = core.ObjectCode.from_ptx(self._ptx, name="fsdp_ciera")
            for name in self.entries:
                kernels[name] = code.get_kernel(name)
                status, function = driver.cuKernelGetFunction(kernels[name].handle)  # loads it
                if not status:
                    status, most_threads[name] = driver.cuFuncGetAttribute(attribute, function)
                if status:
                    raise CieraKernelError(f"kernel {name} does not load on cuda:{index}: {status!r}")
        except CieraKernelError:
            raise
        except Exception as error:
            raise CieraKernelError(f"the driver does not load the kernels' PTX on cuda:{index}: {error}") from error
        return _Loaded(core, kernels, most_threads)

    def _pack(self, name: str, args: Sequence[Argument], device: torch.device) -> list[int | np.generic]:
        parameters = self.entries.get(name)
        if parameters is None:
            raise CieraKernelError(f"no kernel is called {name}: there are {', '.join(self.entries)}")
        if len(args) != len(parameters):
            raise CieraKernelError(f"kernel {name} takes {len(parameters)} arguments, got {len(args)}")
        values: list[int | np.generic] = []
        for position, (arg, num_bytes) in enumerate(zip(args, parameters, strict=True)):
            value = _value(arg, num_bytes, device)
            if value is None:
                got = f"a tensor on {arg.device}" if isinstance(arg, torch.Tensor) else repr(arg)
                raise CieraKernelError(
                    f"argument {position} of kernel {name} is {got}; the parameter has {num_bytes} bytes and takes "
                    + (f"a tensor on {device} or an int" if num_bytes == 8 else "an int")
                )
            values.append(value)
        return values


class _ShippedKernels:
    """The package's own kernels: the only state of this module."""

    def __init__(self) -> None:
        self._module: KernelModule | None = None
        self._lock = threading.Lock()

    def module(self) -> KernelModule:
        with self._lock:
            if self._module is None:
                try:
                    self._module = KernelModule(PTX_FILE.read_bytes())
                except OSError as error:
                    raise CieraKernelError(f"the package lacks its kernels ({error}): install it again") from error
            return self._module


_SHIPPED = _ShippedKernels()


def kernel_module(device: torch.device) -> KernelModule:
    """The shipped kernels, loaded on `device`. Raises `CieraKernelError`. Cost: see `KernelModule.load`; again is free."""
    module = _SHIPPED.module()
    module.load(device)
    return module


def why_not_available(device: torch.device) -> str | None:
    """The reason why the shipped kernels cannot run on `device`, or `None`. Cost: one probe of the driver per device."""
    try:
        return _SHIPPED.module().why_not_loadable(device)
    except CieraKernelError as error:
        return str(error)


def _value(arg: Argument, num_bytes: int, device: torch.device) -> int | np.generic | None:
    """What `cuda.core.launch` must get so that it passes `num_bytes` bytes: it passes a Python int as 8. None: misfit."""
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr() if num_bytes == 8 and arg.device == device else None
    if type(arg) is not int or not -(1 << 8 * num_bytes - 1) <= arg < 1 << 8 * num_bytes:
        return None
    if num_bytes == 4:
        return np.int32(arg) if arg < 0 else np.uint32(arg)
    return arg if arg < 1 << 63 else np.uint64(arg)


def _header(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise CieraKernelError(f"the PTX text has no line {pattern}")
    return tuple(map(int, found.groups()))


def _parameter_bytes(name: str, parameters: str) -> tuple[int, ...]:
    """Bytes of the parameters of one `.entry`. Only integers and pointers of 4 and 8 bytes can be passed by `launch`."""
    sizes = []
    for parameter in filter(None, map(str.strip, parameters.split(","))):
        size = [_PARAMETER_BYTES[word] for word in parameter.split() if word in _PARAMETER_BYTES]
        if len(size) != 1 or "[" in parameter:
            raise CieraKernelError(f"kernel {name} has a parameter that cannot be passed: {parameter}")
        sizes += size
    return tuple(sizes)


def _open_driver() -> ctypes.CDLL:
    """The driver library, initialised. Raises `CieraKernelError`. See [Note: Probing]."""
    try:
        driver = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        raise CieraKernelError(f"there is no NVIDIA driver on this machine ({error})") from error
    status = driver.cuInit(0)
    if status:
        raise CieraKernelError(f"the NVIDIA driver does not start: cuInit returned {status}")
    return driver


def _ask(driver: ctypes.CDLL, name: str, *args: int) -> int:
    """The int that driver function `name` writes to its first argument."""
    answer = ctypes.c_int()
    status = driver[name](ctypes.byref(answer), *args)
    if status:
        raise CieraKernelError(f"the NVIDIA driver fails: {name} returned {status}")
    return answer.value


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
