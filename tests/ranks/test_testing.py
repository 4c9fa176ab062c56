"""`fsdp_ciera.testing`: ranks that are kept and cleaned, comparisons that see one bit, faults that end as they should."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_ciera
from backends_under_test import use_backend
from fsdp_ciera import CieraDecodeError, CieraDesyncError, CieraPeerError, CieraPolicy, CieraStats, fully_shard, stats
from fsdp_ciera.testing import FAULTS, RankFailure, ShardFunction, check_equal, compare_with_stock, inject, run_ranks
from tiny_moe import recover

VALUE_DELTA = CieraPolicy(codecs=("value_delta",))
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


# ---- run_ranks


def told(rank: int, world_size: int, number: int) -> tuple[int, int, int, str, int]:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return rank, world_size, number, os.environ["RANK"], int(total)


def test_ranks_get_what_torchrun_would_set() -> None:
    assert run_ranks(told, 3, 7) == [(rank, 3, 7, str(rank), 3) for rank in range(3)]


def process_of(rank: int, world_size: int) -> int:
    return os.getpid()


def leave_a_mess(rank: int, world_size: int) -> int:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    os.environ["LEFT_BEHIND"] = "1"
    fsdp_ciera.stats = None  # type: ignore[assignment]
    fsdp_ciera.CieraPolicy.left_behind = 1  # type: ignore[attr-defined]
    global MARK
    MARK = 1
    return os.getpid()


MARK = 0


def clean(rank: int, world_size: int) -> tuple[int, list[bool]]:
    return os.getpid(), [
        torch.get_default_dtype() == torch.float32,
        torch.empty(0).device.type == "cpu",
        "LEFT_BEHIND" not in os.environ,
        fsdp_ciera.stats is stats,
        not hasattr(fsdp_ciera.CieraPolicy, "left_behind"),
        MARK == 0,
    ]


def test_processes_are_kept_and_cleaned() -> None:
    before = set(run_ranks(leave_a_mess, 2))
    after = run_ranks(clean, 2)
    assert {pid for pid, _ in after} == before
    assert all(all(checks) for _, checks in after), after
    assert not before & set(run_ranks(process_of, 2, is_fresh=True))


def fail_on(rank: int, world_size: int, failing: int) -> int:
    if rank == failing:
        raise KeyError(f"rank {rank} has had enough")
    return rank


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def hang(rank: int, world_size: int) -> None:
    if rank == 1:
        import time

        time.sleep(60)


def test_ranks_that_fail_die_or_hang() -> None:
    with pytest.raises(RankFailure, match="rank 1 has had enough"):
        run_ranks(fail_on, 2, 1)
    outcome = run_ranks(fail_on, 2, 0, expect_failure=True)
    assert isinstance(outcome[0], KeyError)
    with pytest.raises(RankFailure, match="rank 1 died without a word"):
        run_ranks(die, 2)
    with pytest.raises(RankFailure, match=r"rank 1 had not ended after 3 s"):
        run_ranks(hang, 2, timeout_s=3)
    assert run_ranks(fail_on, 2, -1) == [0, 1]


# ---- compare_with_stock


def build(shard: ShardFunction) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        shard(layer, mp_policy=HALF)
    return shard(model, mp_policy=HALF)


def train(model: nn.Module) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = model(torch.ones(2, 64).bfloat16()).float().square().mean()
        loss.backward()
        yield loss
        optimizer.step()
        optimizer.zero_grad()


TRAININGS: list[str] = []


def one_bit_off(model: nn.Module) -> Iterator[torch.Tensor]:
    """Only in the second training, only in a parameter, and only on rank 1."""
    TRAININGS.append("one bit off")
    yield from train(model)
    weight: Any = model[0].weight  # type: ignore[index]
    if dist.get_rank() == 1 and len(TRAININGS) == 2:
        with torch.no_grad():
            weight.to_local().view(torch.int32)[0, 0] ^= 1


def comparisons(rank: int, world_size: int) -> tuple[CieraStats, str]:
    report = compare_with_stock(build, train, VALUE_DELTA)
    assert compare_with_stock(build, train).num_gathers == report.num_gathers
    try:
        compare_with_stock(build, one_bit_off, VALUE_DELTA)
    except AssertionError as error:
        return report, str(error)
    return report, ""


def test_a_comparison_finds_one_bit() -> None:
    (report, no_error), (_, error) = run_ranks(comparisons, 2)
    assert report.wire_bytes < report.raw_bytes and not no_error
    assert "0.weight differs from stock FSDP2's in 1 of 8192 bytes" in error


def test_equal_is_equal_in_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    check_equal([("a", nan)], [("a", nan.clone())], "here")
    with pytest.raises(AssertionError, match="a differs"):
        check_equal([("a", zero)], [("a", -zero)], "here")
    with pytest.raises(AssertionError, match=r"\['b'\] where stock FSDP2 gives \['a'\]"):
        check_equal([("a", zero)], [("b", zero)], "here")
    with pytest.raises(AssertionError, match="8 bytes"):
        check_equal([("a", zero)], [("a", torch.zeros(2))], "here")


# ---- inject


def drill(rank: int, world_size: int, fault: str, backend: str) -> tuple[list[str], str, bool]:
    """Faults of rank 1 in the second step. -> modules in whose gathers it had them, the error, and whether the bits are right
    afterwards."""
    use_backend(backend)
    torch.manual_seed(0)
    model = build(lambda module, **kwargs: fully_shard(module, ciera_policy=VALUE_DELTA, **kwargs))

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1 + 1e-3)  # type: ignore[attr-defined]
            model(torch.ones(2, 64).bfloat16())

    step()
    text, done = "", []
    try:
        if rank == 1:
            with inject(fault, modules="1") as done:
                step()
        else:
            step()
    except (CieraDecodeError, CieraDesyncError, CieraPeerError, torch.OutOfMemoryError) as error:
        text = f"{type(error).__name__}: {error}"
    dist.barrier()
    recover(model)
    local = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        model(torch.ones(2, 64).bfloat16())
    is_right = all(
        torch.equal(parameter.to_local(), own)  # type: ignore[attr-defined]
        for parameter, own in zip(model.parameters(), local, strict=True)
    )
    return list(done), text, is_right


SAID = {
    "cannot_encode": ("CieraPeerError", "CieraPeerError"),
    "cannot_decode": ("^$", "OutOfMemoryError"),
    "damaged_payload": ("^$", "CieraDecodeError"),
    "damaged_head": ("^$", "CieraDecodeError"),
    "late_write": ("^$", "^$"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_end_in_an_error_or_in_right_values(fault: str) -> None:
    outcomes = run_ranks(drill, 2, fault, "cpu", timeout_s=60)
    import re

    for (_, text, is_right), expected in zip(outcomes, SAID[fault], strict=True):
        assert is_right
        assert re.search(expected, text), (fault, text)
    assert outcomes[1][0] and set(outcomes[1][0]) == {"1"}


def test_a_fault_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="fault='fire' is not one of cannot_encode, "), inject("fire"):
        pass
