"""What users and their editors see."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import fsdp_ciera
import fsdp_ciera.planning
import fsdp_ciera.testing
from fsdp_ciera._compat import torch_fully_shard


@pytest.mark.parametrize(
    "package", [fsdp_ciera, fsdp_ciera.planning, fsdp_ciera.testing], ids=lambda one: str(one.__name__)
)
def test_every_public_name_is_there_and_documented(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert list(names) == sorted(set(names))
    for name in names:
        value = getattr(package, name)
        assert name.startswith("__") or not callable(value) or inspect.getdoc(value), name
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        package.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_fully_shard_shows_torchs_arguments() -> None:
    ours = inspect.signature(fsdp_ciera.fully_shard).parameters
    torchs = inspect.signature(torch_fully_shard).parameters
    newer = {"dp_mesh_dims"}  # of torch 2.12; passed on
    assert torchs.keys() - newer <= ours.keys()
    assert ours.keys() - torchs.keys() == {"ciera_policy", "newer_arguments"}
    assert fsdp_ciera.fully_shard.state is torch_fully_shard.state  # type: ignore[attr-defined]


def test_names_come_without_torch() -> None:
    code = "import sys, fsdp_ciera, fsdp_ciera.planning; assert 'torch' not in sys.modules; fsdp_ciera.CieraPolicy"
    subprocess.run([sys.executable, "-c", code], check=True)
