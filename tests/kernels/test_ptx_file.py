"""The committed PTX file: it is what the source compiles to, ptxas assembles it, and older drivers read it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fsdp_ciera.kernels.launch import PTX_FILE, KernelModule
from places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

from ptx_registers import ARCHITECTURES, PtxasError, Usage, assemble, table_of, with_table

NVCC = shutil.which("nvcc")
RELEASE = "release 13.0"
MOST_REGISTERS = 40  # then an SM has six CTAs at once
needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on PATH: the PTX cannot be assembled")


@cache
def nvcc_release() -> str:
    assert NVCC is not None
    version = subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release \d+\.\d+", version)
    return found.group() if found else version


@cache
def usage_on(architecture: str) -> dict[str, Usage]:
    return assemble(PTX_FILE, architecture)


def test_file_is_what_the_source_compiles_to(tmp_path: Path) -> None:
    if NVCC is None:
        pytest.skip("no nvcc on PATH: the PTX cannot be compiled again")
    if nvcc_release() != RELEASE:
        pytest.skip(f"nvcc is {nvcc_release()}: only {RELEASE} writes the committed file")
    subprocess.run(["make", "ptx", f"PTX_DIR={tmp_path}"], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / PTX_FILE.name).read_bytes() == PTX_FILE.read_bytes(), "run `make ptx` and commit what it writes"


def test_header_suits_old_drivers() -> None:
    text = PTX_FILE.read_text()
    assert re.findall(r"(?m)^\.target\s+(.*)$", text) == ["sm_80"]
    assert re.findall(r"(?m)^\.address_size\s+(.*)$", text) == ["64"]
    [version] = re.findall(r"(?m)^\.version\s+(.*)$", text)
    assert KernelModule(PTX_FILE.read_bytes()).ptx_version <= (8, 0)
    utils = pytest.importorskip("cuda.bindings.utils", reason="no cuda-bindings: PTX versions cannot be looked up")
    assert utils.get_minimal_required_cuda_ver_from_ptx_ver(version) <= 12000


def test_kernels_are_those_of_the_source(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or NVCC
    if compiler is None:
        pytest.skip("no g++ and no nvcc on PATH: the source's macros cannot be expanded")
    source = (ROOT / "kernels" / "native" / "kernels.cu").read_text()
    (tmp_path / "kernels.cpp").write_text(re.sub(r"(?m)^#include.*$", "", source))
    command = [compiler, "-E", "kernels.cpp"]
    expanded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    of_source = re.findall(r'extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\(', expanded)
    in_file = re.findall(r"\.entry\s+(\w+)", PTX_FILE.read_text())
    assert len(of_source) == 47 and of_source == in_file
    assert len(set(in_file)) == len(in_file)
    assert not re.findall(r"(?m)^\s*\.(?:visible\s+|weak\s+)*\.?func\b.*", PTX_FILE.read_text())


@needs_ptxas
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_assembles_without_spills(architecture: str) -> None:
    usages = usage_on(architecture)
    assert list(usages) == re.findall(r"\.entry\s+(\w+)", PTX_FILE.read_text())
    spilling = {name: usage for name, usage in usages.items() if usage.spill_bytes or usage.stack_bytes}
    assert not spilling
    assert max(usage.registers for usage in usages.values()) <= MOST_REGISTERS


@needs_ptxas
def test_does_not_assemble_for_older_gpus() -> None:
    with pytest.raises(PtxasError, match="SM version"):
        assemble(PTX_FILE, "sm_75")


@needs_ptxas
def test_register_table_is_what_ptxas_says() -> None:
    if NVCC is None or nvcc_release() != RELEASE:
        pytest.skip(f"the table is what ptxas of {RELEASE} says")
    document = (ROOT / "docs" / "kernels.md").read_text()
    table = table_of({architecture: usage_on(architecture) for architecture in ARCHITECTURES})
    assert with_table(document, table) == document, "run `python benchmarks/ptx_registers.py --write docs/kernels.md`"
