"""Runs a function in a process that finds the stand-in driver: the loader reads LD_LIBRARY_PATH only when a process starts."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from places import python_path


@functools.cache
def _driver_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder with the stand-in libcuda.so.1, removed when this process ends."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc on PATH: the stand-in CUDA driver cannot be compiled")
    folder = tempfile.TemporaryDirectory(prefix="fake-cuda-")
    source, library = Path(__file__).with_name("libcuda.c"), Path(folder.name) / "libcuda.so.1"
    flags = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *flags, "-o", library, source, "-ldl", "-lpthread"], check=True)
    return folder


def run_with_fake_cuda(
    function: Callable[..., object], *args: object, env: dict[str, str] | None = None, timeout: float = 300
) -> str:
    """Calls `function(*args)` in a new process under the stand-in driver. -> what it printed. Fails when it raises.

    function: of a module's top level, found by name in the new process; args are pickled. env: added to the environment;
    FAKE_CUDA_CAPABILITY ("80") and FAKE_CUDA_DRIVER ("13000") choose the device. Cost: a start of Python and torch.
    """
    libraries = [_driver_folder().name, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", "from fake_cuda.run import main; main()"],
        input=pickle.dumps((function.__module__, function.__qualname__, args)),
        capture_output=True,
        timeout=timeout,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            **(env or {}),
        },
    )
    printed, errors = done.stdout.decode(), done.stderr.decode()
    if done.returncode:
        pytest.fail(
            f"{function.__qualname__} under the stand-in driver: exit {done.returncode}\n{printed}{errors}", False
        )
    return printed


def main() -> None:
    """What the new process does."""
    module, name, args = pickle.load(sys.stdin.buffer)
    function: Any = getattr(importlib.import_module(module), name)
    function(*args)
