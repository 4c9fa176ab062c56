"""Agreements: when they are made, what they settle, and exact bits whatever happens between them and the gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from fsdp_ciera import CieraDesyncError, CieraPeerError, CieraPolicy, invalidate, settle_sizes, stats
from fsdp_ciera.gather import agreement, exchange
from fsdp_ciera.gather.agreement import ROW_BYTES
from fsdp_ciera.gather.channel import Channel
from fsdp_ciera.gather.layout import build_layout
from fsdp_ciera.testing import run_ranks
from loops import make_loop
from tiny_moe import PAPERS_CODEC, VOCAB, Case, bits, build, reshard

MIX = ("value_delta", "exponent_delta", "exponent_block", "entropy")
FLAT = {codec: CieraPolicy(codecs=(codec,)) for codec in (*MIX, "raw")}
PAIRS = {
    f"{codec}, pairs": CieraPolicy(codecs=(codec,), topology="hierarchical", ranks_per_node=2, verify="every")
    for codec in ("value_delta", "exponent_block")
}
VALUE_DELTA = CieraPolicy(codecs=("value_delta",))
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
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


@pytest.mark.rotating
@pytest.mark.parametrize("after", ["settle", "forward"])
@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_exact_whatever_happens_to_a_promise(disturb: str, after: str, cover_seed: int | None) -> None:
    """`make test` takes three of the seven policies, others every day."""
    policies = FLAT | PAIRS
    if cover_seed is not None:
        first = cover_seed + list(DISTURBANCES).index(disturb)
        names = [list(policies)[(first + 3 * number) % len(policies)] for number in range(3)]
        policies = {name: policies[name] for name in names}
    run_ranks(compare, 4, policies, (1, 3), disturb, after)  # step 2 comes without a new settlement


def test_a_pass_agrees_once_for_all_groups() -> None:
    reports = run_ranks(compare, 2, FLAT, (), "nothing", "settle")[0]
    num_groups, num_passes = 3, 8  # four steps of two micro-batches
    for codec, report in reports.items():
        agreed = report.by_phase["agreement"].wire_bytes
        assert agreed == num_passes * num_groups * ROW_BYTES, codec  # a ring of two ranks sends each number once
        assert report.num_gathers == num_passes * 5  # two layers in forward and backward, and the root
        assert sum(report.gathers_by_phase.values()) == report.num_gathers


def test_settling_ahead_takes_the_place_of_an_agreement() -> None:
    ahead = run_ranks(compare, 2, FLAT, (1, 2, 3), "nothing", "settle")[0]
    at_once = run_ranks(compare, 2, FLAT, (), "nothing", "settle")[0]
    for codec in FLAT:
        assert ahead[codec].wire_bytes == at_once[codec].wire_bytes, codec


def collectives_per_step(rank: int, world_size: int) -> list[tuple[int, int]]:
    """How many all-gathers and agreements a step makes, without and with sizes that were settled ahead."""
    counts = []
    calls: list[str] = []

    def counted(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return fn(*arguments, **keywords)

        return call

    exchange.all_gather_flat = counted(exchange.all_gather_flat, "gather")  # type: ignore[attr-defined]
    agreement.all_reduce_max = counted(agreement.all_reduce_max, "agree")  # type: ignore[attr-defined]
    agreement.all_gather_bytes = counted(agreement.all_gather_bytes, "other")  # type: ignore[attr-defined]
    model = build(Case(), PAPERS_CODEC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ahead in (False, False, True):
        calls.clear()
        if ahead:
            assert settle_sizes(model) == 3
        model(torch.arange(29)).backward()
        counts.append((calls.count("gather"), calls.count("agree")))
        if len(counts) > 1:
            assert "other" not in calls
        optimizer.step()
    return counts


def test_a_gather_is_one_collective_and_a_pass_agrees_once() -> None:
    num_gathers = 5  # two layers in forward and backward, and the root
    assert run_ranks(collectives_per_step, 2) == [[(num_gathers, 1)] * 3] * 2


def settle_on_one_rank(rank: int, world_size: int) -> None:
    """One rank settles ahead, the other one in its forward: both are in the same agreement."""
    seen = []
    for policy in (None, PAPERS_CODEC):
        model = build(Case(), policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.arange(29)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and policy is not None:
                settle_sizes(model)
        seen.append([parameter.to_local().detach().clone() for parameter in model.parameters()])
        if rank == 1 and policy is not None:
            settle_sizes(model)  # the last one
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*seen, strict=True))


def test_a_rank_that_settles_while_another_begins_its_forward() -> None:
    run_ranks(settle_on_one_rank, 2)


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


# What begins a pass


def agreements_of(model: torch.nn.Module, run: Callable[[], Any]) -> int:
    """How many agreements a call makes, over the one process group of this model."""
    plain, count = agreement.all_reduce_max, 0

    def counted(*arguments: Any) -> None:
        nonlocal count
        count += 1
        plain(*arguments)

    agreement.all_reduce_max = counted  # type: ignore[attr-defined]
    try:
        run()
    finally:
        agreement.all_reduce_max = plain  # type: ignore[attr-defined]
    reshard(model)
    return count


def passes(rank: int, world_size: int) -> dict[str, int]:
    tokens = torch.arange(29)
    model = build(Case(checkpointing=True, tied=False), VALUE_DELTA)
    model(tokens).backward()
    found = {"forward and backward": agreements_of(model, lambda: model(tokens).backward())}
    with torch.no_grad():
        found["eval"] = agreements_of(model, lambda: model(tokens))
        layer = model.model.layers[0]
        found["a layer alone"] = agreements_of(model, lambda: layer(torch.randn(29, 20)))
        found["two layers"] = agreements_of(model, lambda: [each(torch.randn(29, 20)) for each in model.model.layers])

    def method(x: torch.Tensor) -> torch.Tensor:
        return model.model.norm(x)

    model.normalise = method
    register_fsdp_forward_method(model, "normalise")
    with torch.no_grad():
        found["another method"] = agreements_of(model, lambda: model.normalise(torch.randn(29, 20)))

    def two_passes() -> None:
        losses = [model(tokens), model(tokens.flip(0))]
        sum(losses).backward()  # type: ignore[union-attr]

    found["two forwards, one backward"] = agreements_of(model, two_passes)
    return found


def test_what_begins_a_pass() -> None:
    for found in run_ranks(passes, 2):
        assert found == {
            "forward and backward": 1,  # though the layers are computed once more in backward
            "eval": 1,
            "a layer alone": 1,
            "two layers": 2,
            "another method": 1,
            "two forwards, one backward": 2,
        }


def between_passes(rank: int, world_size: int) -> tuple[list[str], int]:
    """Gathers by hand, between passes: each agrees on its own channel, and sends what changed. -> their phases, and how many
    agreements there were."""
    model = build(Case(tied=False), VALUE_DELTA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(29)).backward()
    optimizer.step()
    layer = model.model.layers[0]
    kinds = []

    def gather() -> str:
        before = dict(stats(model).gathers_by_phase)
        layer.unshard()
        weight = layer.mlp.gate.weight.detach().clone()
        layer.reshard()
        assert torch.equal(weight, layer.mlp.gate.weight.full_tensor().bfloat16())
        after = stats(model).gathers_by_phase
        return next(phase for phase in after if after[phase] > before.get(phase, 0))

    def gathers() -> None:
        kinds.append(gather())
        kinds.append(gather())
        write_on_rank_1(model, rank)
        kinds.append(gather())
        settle_sizes(model)
        kinds.append(gather())  # as settled
        settle_sizes(model)
        write_on_rank_1(model, rank)
        kinds.append(gather())  # not as settled: the shards travel as they are

    return kinds, agreements_of(model, gathers)


def test_unshard_between_passes() -> None:
    for kinds, num_agreements in run_ranks(between_passes, 2):
        assert kinds == ["first/other", "repeat/other", "first/other", "repeat/other", "cold/other"]
        assert num_agreements == 3 + 2


# What an agreement concludes, from the table alone


def always(shard: torch.Tensor) -> Callable[[Channel], torch.Tensor]:
    return lambda _: shard


def concluded(prepare: Callable[[list[Channel]], None], shards: torch.Tensor) -> tuple[Any, ...]:
    """Three ranks announce their shards after a first gather and `prepare` -> what is settled, as (kind, is raw), or the
    error."""
    layout = build_layout(["w"], [300], ["value_delta"], 300, torch.bfloat16)
    loop = make_loop(layout, 3, may_go_raw=True)
    before = torch.arange(900).view(3, 300).to(torch.int16).view(torch.bfloat16)
    loop.gather(list(before), [torch.zeros_like(before) for _ in range(3)])
    prepare(loop.channels)
    failures: list[dict[int, Exception]] = [{} for _ in range(3)]
    rows = [
        agreement._row_of(channel, always(shard), failed, 0)
        for channel, shard, failed in zip(loop.channels, shards, failures, strict=True)
    ]
    row = agreement._Row(*torch.stack(rows).max(dim=0).values.tolist())
    found = []
    for channel, failed in zip(loop.channels, failures, strict=True):
        try:
            agreement._conclude(channel, row, None, failed.get(0))  # type: ignore[arg-type]
        except Exception as error:
            return type(error).__name__, str(error)
        settled = channel.settled
        found.append(None if settled is None else (settled.kind, settled.first_bytes >= channel.raw_payload_bytes))
    assert found[0] == found[1] == found[2], found
    return found[0] or ()


def step(share: float) -> torch.Tensor:
    words = torch.arange(900).view(3, 300)
    return (words + (words % 100 < 100 * share)).to(torch.int16).view(torch.bfloat16)


def test_what_the_table_means(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[bytes]] = []
    monkeypatch.setattr(agreement, "exchange_texts", lambda text, group: answers.pop(0) if answers else [text] * 3)
    monkeypatch.setattr(agreement, "any_rank", lambda mine, group: mine)

    def touch(which: int, name: str, value: Any) -> Callable[[list[Channel]], None]:
        return lambda channels: setattr(channels[which], name, value)

    def forget(*which: int) -> Callable[[list[Channel]], None]:
        return lambda channels: [channels[number].forget() for number in which] and None  # type: ignore

    def fail(channels: list[Channel]) -> None:
        channels[1].codecs = [None]  # type: ignore[list-item]

    assert concluded(forget(), step(0.02)) == ("first", False)
    assert concluded(forget(), step(0.0)) == ("repeat", False)
    assert concluded(forget(1), step(0.02)) == ("cold", True)  # nobody knows how large full payloads would be
    assert concluded(forget(0, 1, 2), step(0.02))[0] == "cold"
    assert concluded(touch(2, "is_touched", True), step(0.02)) == ("cold", True)
    assert concluded(touch(1, "sequence", 7), step(0.02)) == ("first", False)
    name, text = concluded(touch(1, "base", torch.tensor([5])), step(0.02))
    assert name == CieraDesyncError.__name__ and "met another module's of the same shape" in text
    answers[:] = [[b"{}"] * 3, [b"2", b"9", b"2"]]
    name, text = concluded(touch(1, "base", torch.tensor([5])), step(0.02))
    assert "rank 0: 2, rank 1: 9, rank 2: 2; most are at 2" in text
    name, text = concluded(touch(0, "damage", torch.tensor([5], dtype=torch.int32)), step(0.02))
    assert name == CieraDesyncError.__name__
    assert "parts of a payload do not fit together: it was damaged" in text and "shard changed after" in text
    answers[:] = [[b"", b"AttributeError()", b""]]
    name, text = concluded(fail, step(0.02))
    assert name == CieraPeerError.__name__ and "rank 1: AttributeError" in text
    answers[:] = [[b'{"module": "a"}', b'{"module": "b"}', b'{"module": "a"}']]
    name, text = concluded(touch(1, "fingerprint", 5), step(0.02))
    assert name == CieraDesyncError.__name__ and 'module: "a" on ranks [0, 2]; "b" on ranks [1]' in text
