"""Faults that the CUDA path once had, on its backend with the kernels in torch: what plans count with, and what is said."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from backends_under_test import use_backend
from fsdp_ciera import CieraPolicy, CieraStats, fully_shard, invalidate, settle_sizes, stats
from fsdp_ciera import session as session_module
from fsdp_ciera.backends import PlainBackend, backend_of
from fsdp_ciera.backends.cuda import CudaBackend
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import CieraKernelError
from fsdp_ciera.kernels import cuda, launch, reference_tiles
from fsdp_ciera.planning import conditions, measure
from fsdp_ciera.testing import run_ranks

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
GPU = torch.device("cuda", 0)


def layers(policy: CieraPolicy) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer, ciera_policy=policy, mp_policy=HALF)
    return fully_shard(model, ciera_policy=policy, mp_policy=HALF)


def run(model: nn.Module, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        model(torch.ones(2, 64).bfloat16()).float().square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1 + 1e-3)  # type: ignore[attr-defined]


# The budget of caches on a GPU is a share of the GPU's memory


def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 141 << 30))
    assert measure.free_memory_bytes(GPU) == 80 << 30
    assert measure.free_memory_bytes(torch.device("cpu")) != 80 << 30


def asked_devices(rank: int, world_size: int) -> list[str]:
    backend = use_backend("tiles")
    asked = []
    real = measure.free_memory_bytes

    def free(device: torch.device) -> int:
        asked.append(device)
        return real(device)

    conditions.__dict__["free_memory_bytes"] = free
    run(layers(CieraPolicy(codecs=("value_delta",))), 1)
    assert asked and all(device == backend.device for device in asked)
    return [str(device) for device in asked]


def test_a_budget_is_a_share_of_the_memory_that_caches_are_in() -> None:
    assert run_ranks(asked_devices, 2) == [["cpu"]] * 2


# Plans hold only what can run, and every codec can


def sent_by_codec(rank: int, world_size: int) -> dict[str, tuple[list[str], CieraStats]]:
    found = {}
    for codec in ("entropy", "exponent_block", "exponent_delta", "value_delta"):
        use_backend("tiles")
        model = layers(CieraPolicy(codecs=(codec,)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(model)
        report = stats(model)
        found[codec] = [row.codec for plan in report.plans for row in plan.rows], report
    return found


def test_every_codec_runs_on_cuda_and_plans_say_so() -> None:
    for found in run_ranks(sent_by_codec, 2):
        for codec, (planned, report) in found.items():
            assert set(planned) == {codec}
            sent = report.by_codec[codec]
            assert 0 < sent.wire_bytes < 0.9 * sent.raw_bytes, codec


def without_value_delta(rank: int, world_size: int) -> CieraStats:
    """A backend that lacks a codec: the next best is planned instead, and all of it runs."""
    backend = use_backend("tiles")
    real = CudaBackend.supports
    backend.supports = lambda codec, dtype: codec != "value_delta" and real(backend, codec, dtype)  # type: ignore
    model = layers(CieraPolicy(codecs=("value_delta", "exponent_delta"), link="1MB/s"))
    run(model)
    return stats(model)


def test_what_a_device_lacks_is_not_planned() -> None:
    for report in run_ranks(without_value_delta, 2):
        assert {row.codec for plan in report.plans for row in plan.rows} <= {"exponent_delta", "raw", "overhead"}
        assert any("value_delta cannot run" in note for note in report.notes)
        assert set(report.by_codec) <= {"exponent_delta", "raw", "overhead"}


# Groups that the plan leaves raw cost nothing at `settle_sizes`


def casts_of_raw_groups(rank: int, world_size: int) -> tuple[int, int]:
    use_backend("tiles")
    model = layers(CieraPolicy(link="1000GB/s"))
    run(model, 1)
    with mock.patch.object(session_module, "gather_input", side_effect=AssertionError("a cast")) as casts:
        num_settled = settle_sizes(model)
    return num_settled, casts.call_count


def test_settling_casts_no_shard_of_a_raw_group() -> None:
    assert run_ranks(casts_of_raw_groups, 2) == [(0, 0)] * 2


# "auto" on several nodes


def on_two_nodes(rank: int, world_size: int) -> CieraStats:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    use_backend("tiles")
    model = layers(CieraPolicy(codecs=("value_delta",), topology="auto"))
    run(model)
    return stats(model)


def test_auto_is_hierarchical_on_several_nodes() -> None:
    for report in run_ranks(on_two_nodes, 4):
        between = report.by_link["between_nodes"]
        assert 0 < between.wire_bytes < 0.7 * between.raw_bytes


# The advice of an error is right, kernels are loaded before the first gather, and an old driver means stock FSDP2


def test_the_advice_about_kernels_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FSDP_CIERA_KERNELS=reference" in launch.WITHOUT_KERNELS
    monkeypatch.setenv("FSDP_CIERA_KERNELS", "reference")
    backend = backend_of(GPU)
    assert isinstance(backend, CudaBackend) and not isinstance(backend, PlainBackend)
    assert backend._kernels is reference_tiles
    assert all(backend.supports(codec, torch.bfloat16) for codec in CODECS if codec != "raw")


def test_kernels_are_loaded_with_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.delenv("FSDP_CIERA_KERNELS", raising=False)
    monkeypatch.setattr(launch, "why_not_available", lambda device: None)
    monkeypatch.setattr(launch, "kernel_module", loaded.append)
    backend = backend_of(GPU)
    assert loaded == [GPU] and isinstance(backend, CudaBackend) and backend._kernels is cuda

    def fail(device: torch.device) -> None:
        raise CieraKernelError("the PTX does not load")

    monkeypatch.setattr(launch, "kernel_module", fail)
    plain = backend_of(GPU)
    assert isinstance(plain, PlainBackend) and "does not load" in plain.reason


# What is said is said once for a model


def warnings_of_layers(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    session_module.__dict__["backend_of"] = lambda device: PlainBackend(device, "the driver is too old")
    torch.manual_seed(0)
    model = layers(CieraPolicy(codecs=("value_delta",)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    return [str(w.message) for w in caught if "fsdp_ciera" in str(w.message)], stats(model).notes


def test_one_warning_for_all_layers() -> None:
    for said, notes in run_ranks(warnings_of_layers, 2):
        assert len(said) == len(notes) == 1 and "the driver is too old" in said[0]


# `invalidate` on CUDA


def invalidated(rank: int, world_size: int) -> tuple[int, int, int]:
    use_backend("tiles")
    model = layers(CieraPolicy(codecs=("value_delta",)))
    run(model, 2)
    model(torch.ones(2, 64).bfloat16())  # agreed
    before = stats(model).gathers_by_phase.get("cold/forward", 0)
    if rank == 0:
        invalidate(model)
    for layer in model.children():
        layer.reshard()  # type: ignore[operator]
    model(torch.ones(2, 64).bfloat16())
    after = stats(model).gathers_by_phase.get("cold/forward", 0)
    invalidate(model)
    settle_sizes(model)
    return before, after, stats(model).cache_bytes


def test_invalidate_makes_full_gathers_from_the_next_agreement_on() -> None:
    for before, after, cache_bytes in run_ranks(invalidated, 2):
        assert after == before + 3  # three layers; the root has no parameters of its own
        assert cache_bytes == 0
