"""Sizes settled ahead: one collective a gather while promises hold, and exact bits whatever breaks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_ciera import CieraDesyncError, CieraPolicy, invalidate, settle_sizes, stats
from fsdp_ciera.gather import exchange, sizes
from ranks import run_ranks
from tiny_moe import PAPERS_CODEC, VOCAB, Case, bits, build, reshard

MIX = ("value_delta", "exponent_delta", "exponent_block", "entropy")
FLAT = {codec: CieraPolicy(codecs=(codec,)) for codec in (*MIX, "raw")}
PAIRS = {
    f"{codec}, pairs": CieraPolicy(codecs=(codec,), topology="hierarchical", ranks_per_node=2, verify="every")
    for codec in ("value_delta", "exponent_block")
}
Disturbance = Callable[[torch.nn.Module, int], None]


def nothing(model: torch.nn.Module, rank: int) -> None:
    return None


def write_on_rank_1(model: torch.nn.Module, rank: int) -> None:
    if rank == 1:
        for parameter in model.parameters():
            parameter.data.to_local().mul_(1.001)


def invalidate_rank_1(model: torch.nn.Module, rank: int) -> None:
    if rank == 1 and hasattr(model, "ciera"):
        invalidate(model)


def settle_again(model: torch.nn.Module, rank: int) -> None:
    if hasattr(model, "ciera"):
        settle_sizes(model)


def flip_signs(model: torch.nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        parameter.data.to_local().neg_()


DISTURBANCES = {f.__name__: f for f in (nothing, write_on_rank_1, flip_signs, invalidate_rank_1, settle_again)}


def losses_and_weights(policy: CieraPolicy | None, settle: tuple[int, ...], disturb: str, after: str) -> list[Any]:
    """Four steps of two micro-batches; sizes are settled before the steps in `settle`, and then the disturbance comes:
    "settle" right after, "forward" between two micro-batches."""
    rank = torch.distributed.get_rank()
    model = build(Case(), policy)
    if policy is not None:
        model.ciera = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    seen: list[Any] = []
    for step in range(4):
        if step in settle and policy is not None:
            settle_sizes(model)
        if step in settle and after == "settle":
            DISTURBANCES[disturb](model, rank)
        for micro_batch in range(2):
            loss = model(torch.randint(VOCAB, (29,), generator=generator))
            loss.backward()
            seen.append(loss.detach().clone())
            if step in settle and after == "forward" and micro_batch == 0:
                DISTURBANCES[disturb](model, rank)
        optimizer.step()
        optimizer.zero_grad()
        seen += [parameter.detach().to_local().clone() for parameter in model.parameters()]
    return seen if policy is None else [seen, stats(model)]


def compare(
    rank: int, world_size: int, policies: dict[str, CieraPolicy], settle: tuple[int, ...], disturb: str, after: str
) -> dict[str, Any]:
    expected = losses_and_weights(None, settle, disturb, after)
    reports = {}
    for name, policy in policies.items():
        got, reports[name] = losses_and_weights(policy, settle, disturb, after)
        assert len(expected) == len(got) > 0
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(bits(a), bits(b)), f"rank {rank}: tensor {index} differs under {name}"
    return reports


@pytest.mark.parametrize("after", ["settle", "forward"])
@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_exact_whatever_happens_to_a_promise(disturb: str, after: str) -> None:
    run_ranks(compare, 4, FLAT | PAIRS, (1, 3), disturb, after)  # step 2 comes without a new settlement


def test_a_settled_gather_sends_no_header() -> None:
    settled = run_ranks(compare, 2, FLAT, (1, 2, 3), "nothing", "settle")[0]
    announced = run_ranks(compare, 2, FLAT, (), "nothing", "settle")[0]
    num_groups = 3
    for codec in MIX:
        with_epochs, without = settled[codec], announced[codec]
        assert with_epochs.num_gathers == without.num_gathers
        settling = with_epochs.by_phase["settle"].wire_bytes
        assert settling == 3 * (1 + num_groups) * 64  # a header that says which groups, and one a group, to one peer
        gathers_in_epochs = with_epochs.num_gathers * 3 // 4
        saved = without.wire_bytes - (with_epochs.wire_bytes - settling)
        assert saved == gathers_in_epochs * (64 - 8), codec
    assert "settle" not in settled["raw"].by_phase


def collectives_per_gather(rank: int, world_size: int) -> list[int]:
    """How many collectives the gathers of a step make, without and with sizes that were settled ahead."""
    counts = []
    plain = {
        module: (module.all_gather_bytes if module is sizes else module.all_gather_flat) for module in (sizes, exchange)
    }
    calls = []

    def counted(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(fn)
            return fn(*arguments, **keywords)

        return call

    sizes.all_gather_bytes = counted(plain[sizes])  # type: ignore[attr-defined]
    exchange.all_gather_flat = counted(plain[exchange])  # type: ignore[attr-defined]
    model = build(Case(), PAPERS_CODEC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ahead in (False, False, True):
        if ahead:
            assert settle_sizes(model) == 3
        calls.clear()
        model(torch.arange(29)).backward()
        counts.append(len(calls))
        optimizer.step()
    return counts


def test_a_settled_gather_is_one_collective() -> None:
    num_gathers = 5  # two layers in forward and backward, and the root
    assert run_ranks(collectives_per_gather, 2) == [[2 * num_gathers, 2 * num_gathers, num_gathers]] * 2


def settle_beside_a_gather(rank: int, world_size: int) -> str:
    model = build(Case(), PAPERS_CODEC)
    model(torch.arange(29)).backward()
    reshard(model)
    try:
        if rank == 0:
            settle_sizes(model)
        else:
            model(torch.arange(29))
    except CieraDesyncError as error:
        return str(error)
    return ""


def test_a_rank_that_settles_while_another_gathers() -> None:
    for text in run_ranks(settle_beside_a_gather, 2):
        assert "the ranks are not at the same gather" in text
        assert "settle_sizes" in text


def early(rank: int, world_size: int) -> list[int]:
    model = build(Case(), PAPERS_CODEC)
    counts = [settle_sizes(model)]
    model(torch.arange(29))
    counts.append(settle_sizes(model))  # the root keeps its parameters after a forward without backward
    reshard(model)
    counts.append(settle_sizes(model))
    return counts


def test_only_what_has_been_gathered_and_is_sharded_is_settled() -> None:
    assert run_ranks(early, 2) == [[0, 2, 3]] * 2
