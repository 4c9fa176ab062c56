"""What a user gets who installs the package: all rooms and data files, and an import that needs no extra."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from places import ROOT

EXTRAS = ("transformers", "matplotlib", "tensorboard", "gguf", "accelerate", "nvidia.nvcomp", "cuda", "cuda.core")


def test_import_needs_no_extra_no_gpu_and_no_driver() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in EXTRAS)
    modules = "fsdp_ciera, fsdp_ciera.cli.main, fsdp_ciera.recipes.models"
    program = f"import sys; {blocked}import {modules}; print(fsdp_ciera.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_wheel_holds_every_room(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for folder, package in (
        ("fsdp_ciera", ""),
        ("kernels", "kernels/"),
        ("policies", "policies/"),
        ("recipes", "recipes/"),
    ):
        for source in (ROOT / folder).glob("*.py"):
            assert f"fsdp_ciera/{package}{source.name}" in names
    for native in (ROOT / "kernels" / "native").iterdir():
        assert f"fsdp_ciera/kernels/native/{native.name}" in names
    assert "fsdp_ciera/kernels/ptx/ciera_compute_80.ptx" in names
    assert any(name.startswith("fsdp_ciera/kernels/_host") for name in names) or shutil.which("g++") is None
    for recipe in (ROOT / "recipes").glob("*.toml"):
        assert f"fsdp_ciera/recipes/{recipe.name}" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fsdp_ciera"}
