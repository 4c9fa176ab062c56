"""CUDA source to PTX with nvcc, for tests that compile what they run."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

NVCC = shutil.which("nvcc")
NVCC_MISSING = "nvcc is not on the path"


@functools.cache
def compile_ptx(source: str, architecture: str, flags: tuple[str, ...] = ()) -> str:
    """PTX of a CUDA source for an architecture such as compute_80; compiled once per process."""
    assert NVCC is not None, NVCC_MISSING
    with tempfile.TemporaryDirectory() as directory:
        file, ptx = Path(directory, "kernels.cu"), Path(directory, "kernels.ptx")
        file.write_text(source)
        command = [NVCC, "-w", "-ptx", f"-arch={architecture}", *flags, "-o", str(ptx), str(file)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"nvcc: {result.stdout}{result.stderr}")
        return ptx.read_text()
