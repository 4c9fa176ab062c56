"""A device for machines without a GPU: the CUDA source, compiled by g++ with the shim (shim/shim.h), runs on CPU tensors of
this process, fast enough for whole training runs.

    with install() as device:                  # from here on kernels/cuda.py works on CPU tensors
        cuda.scan_values(...)
        device.launches                        # [("scan_values_bf16", (45, 1))]

Every launch has ended when it returns, so there are no streams here. That the kernels have no races, read nothing that was not
written and stay in their buffers is for test_kernels_shim.py and test_kernels_ptx.py to show.

The library is compiled once for each state of the sources (some 15 seconds), into a folder of the machine's temporary files;
processes that are forked later have it already.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from fsdp_ciera.kernels import launch as launching
from fsdp_ciera.kernels.launch import Argument, KernelModule, Place
from places import NATIVE, SHIM

FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing", "-DCIERA_SHIM", "-DSHIM_LIBRARY"]
NUM_THREADS = 256


def source_digest() -> str:
    """Names what the library is compiled from, and how."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*NATIVE.glob("*.cu*"), *SHIM.iterdir()]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels; compiled when nobody has yet. Skips the test that asks for it where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on PATH: the kernels cannot be compiled for the CPU")
    folder = Path(tempfile.gettempdir()) / f"ciera-shim-{os.getuid()}-{source_digest()}"
    path = folder / "kernels.so"
    if not path.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{os.getpid()}.so"  # others may compile at the same time
        command = [compiler, *FLAGS, f"-I{NATIVE}", f"-I{SHIM}", "-o", str(unfinished), str(SHIM / "library.cpp")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        unfinished.rename(path)
    assert path.stat().st_uid == os.getuid(), f"{path} is somebody else's"
    found = ctypes.CDLL(str(path))
    found.shim_launch.restype = None
    found.shim_launch.argtypes = [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64]
    return found


class ShimDevice:
    """What `install` gives; leaving it, or `uninstall`, brings the real launcher back."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int]]] = []
        """Names and grids of all launches so far; those that had no CTA are not among them."""
        self._module = KernelModule(launching.PTX_FILE.read_bytes())
        self._replaced: list[tuple[Any, str, Any]] = []

    def install(self) -> ShimDevice:
        """Puts the shim in the launcher's place."""
        library()
        device = self

        def launch(
            self: KernelModule, name: str, num_blocks: int | tuple[int, int], num_threads: int, *args: Argument,
            shared_bytes: int = 0, device: torch.device,
        ) -> None:  # fmt: skip
            shim_device.launch(self, name, num_blocks, num_threads, args, shared_bytes, device)

        shim_device = device
        self._replace(KernelModule, "launch", launch)
        self._replace(launching, "kernel_module", lambda device: self._module)
        self._replace(launching, "current_place", lambda device: Place(0, 0))
        self._replace(launching, "why_not_available", lambda device: None)
        return self

    def uninstall(self) -> None:
        """The launcher is what it was."""
        while self._replaced:
            owner, name, real = self._replaced.pop()
            setattr(owner, name, real)

    def launch(
        self, module: KernelModule, name: str, num_blocks: int | tuple[int, int], num_threads: int,
        args: tuple[Argument, ...], shared_bytes: int, device: torch.device,
    ) -> None:  # fmt: skip
        """As `KernelModule.launch`, with its checks of the arguments."""
        assert num_threads == NUM_THREADS and not shared_bytes
        values = module._pack(name, args, device)
        grid = (num_blocks, 1) if isinstance(num_blocks, int) else num_blocks
        if not all(grid):
            return
        self.launches.append((name, grid))
        words = (ctypes.c_uint64 * len(values))(*(int(value) & (1 << 64) - 1 for value in values))
        library().shim_launch(name.encode(), *grid, words, len(values))

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, by)

    def __enter__(self) -> ShimDevice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()


def install() -> ShimDevice:
    """From now on kernels are launched on the shim, on CPU tensors. For a while (`with`) or for good (a forked rank)."""
    return ShimDevice().install()
