"""What goes wrong between ranks: the same named error on every rank, within seconds."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_ciera
from fsdp_ciera import CieraPolicy
from fsdp_ciera.codecs import ExponentBlock
from fsdp_ciera.errors import CieraDesyncError, CieraMismatchError, CieraPeerError, CieraVerifyError
from fsdp_ciera.gather import agreement, presence
from fsdp_ciera.gather import channel as channels
from fsdp_ciera.gather.channel import Channel
from fsdp_ciera.testing import run_ranks
from tiny_moe import PAPERS_CODEC, VOCAB, Case, bits, build, run

SECONDS = 20


def one_step(model: torch.nn.Module) -> None:
    model(torch.arange(29) % VOCAB).backward()
    for parameter in model.parameters():
        parameter.grad = None


def outcome_of_step(rank: int, world_size: int, prepare: str, argument: Any) -> tuple[str, str, float]:
    """(type and text of the error, seconds) of two forward/backward passes after `prepare` did its damage."""
    policy = CieraPolicy(codecs=("exponent_block",), verify=argument.get("verify"))
    if prepare == "policy":
        policy = CieraPolicy(**{"codecs": ("exponent_block",), **argument["on rank 1"]}) if rank == 1 else PAPERS_CODEC
    if prepare == "version" and rank == 1:
        channels.__version__ = "9.9.9"
    model = build(Case(), policy)
    start = time.monotonic()
    try:
        if prepare == "wire version" and rank == 1:
            change_header(slice(4, 6), b"\x63\x00")
        if prepare == "magic" and rank == 1:
            change_header(slice(0, 4), b"ABCD")
        one_step(model)
        start = time.monotonic()
        if prepare == "wrong module":
            model.model.layers[1 if rank == 1 else 0].unshard()
        if prepare == "no memory for caches" and rank == 1:
            ExponentBlock.prepare = fail_to_decode  # type: ignore[method-assign]
        if prepare == "encode" and rank == 1:

            def fail(self: ExponentBlock, values: torch.Tensor, sections: Any, is_full: bool) -> None:
                raise MemoryError("no memory for the planes")

            ExponentBlock.encode = fail  # type: ignore[method-assign]
        if prepare == "fill" and rank == 1:
            ExponentBlock.fill = fail_to_decode  # type: ignore[method-assign]
        if prepare == "decode" and rank == 1:
            Channel.decode = fail_to_decode  # type: ignore[method-assign]
        if prepare == "sequence" and rank == 1:
            for comm in comms_of(model):
                for opened in comm.channels.values():
                    opened.sequence += 3
                    opened.base = opened.base + 1
        if prepare == "damage" and rank == 1:
            plain = Channel.decode

            def damaged(self: Channel, payloads: torch.Tensor, row_ok: torch.Tensor, output: torch.Tensor) -> None:
                payloads[2, self.payload_plan.fixed_at[0]] ^= 1  # a sign+mantissa byte of rank 2's shard
                plain(self, payloads, row_ok, output)

            Channel.decode = damaged  # type: ignore[method-assign]
        one_step(model)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def comms_of(model: torch.nn.Module) -> list[Any]:
    return list(fsdp_ciera.attach.__globals__["_comms"](model))


def change_header(where: slice, value: bytes) -> None:
    plain = agreement.hello

    def changed(descriptor: Any) -> torch.Tensor:
        header = plain(descriptor)
        header[where] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return header

    agreement.hello = changed


@pytest.mark.parametrize(
    ("prepare", "argument", "error", "texts"),
    [
        ("policy", {"on rank 1": {"block_size": 256}}, CieraMismatchError,
         ["policy.block_size: 512 on ranks [0, 2]; 256 on ranks [1]", "same CieraPolicy"]),
        ("policy", {"on rank 1": {"codecs": ("raw",)}}, CieraMismatchError,
         ['policy.codecs: ["exponent_block"] on ranks [0, 2]; ["raw"] on ranks [1]']),
        ("policy", {"on rank 1": {"categories": ("expert_ffn",)}}, CieraMismatchError, ["policy.categories"]),
        ("policy", {"on rank 1": {"verify": "every"}}, CieraMismatchError, ['null on ranks [0, 2]; "every" on ranks [1]']),
        ("version", {}, CieraMismatchError, ["fsdp_ciera version", '"9.9.9" on ranks [1]']),
        ("wire version", {}, CieraMismatchError, []),
        ("magic", {}, CieraDesyncError, ["ranks [1] of the group sent no fsdp_ciera header"]),
        ("wrong module", {}, CieraDesyncError, ["the ranks are not at the same gather", "module: "]),
        ("encode", {}, CieraPeerError, ["rank 1: MemoryError('no memory for the planes')"]),
        ("no memory for caches", {}, CieraPeerError, ["rank 1: MemoryError('no memory for the payload')"]),
        ("fill", {}, CieraPeerError, ["rank 1: MemoryError('no memory for the payload')"]),
        ("sequence", {}, CieraDesyncError, ["rank 0: 2, rank 1: 5, rank 2: 2; most are at 2"]),
        ("damage", {"verify": "every"}, CieraVerifyError, ["rank 1 decoded rank 2's shard wrongly: checksum"]),
        ("decode", {"verify": "every"}, CieraVerifyError, ["rank 1 could not decode"]),
        ("decode", {"verify": 2}, CieraVerifyError, ["rank 1 could not decode"]),
        ("damage", {"verify": 1}, CieraVerifyError, ["rank 1 decoded rank 2's shard wrongly: value"]),
    ],
)  # fmt: skip
def test_the_same_error_on_every_rank(prepare: str, argument: Any, error: type[Exception], texts: list[str]) -> None:
    outcomes = run_ranks(outcome_of_step, 3, prepare, argument, timeout_s=60)
    for name, message, seconds in outcomes:
        assert name == error.__name__, (name, message)
        assert seconds < SECONDS
        for text in texts:
            assert text in message
    # each rank names its own module first; the rest is the same text
    assert len({message.split(": ", 1)[1] for _, message, _ in outcomes}) == 1


def fail_to_decode(self: object, *arguments: Any) -> None:
    raise MemoryError("no memory for the payload")


def recover(rank: int, world_size: int) -> None:
    """An exception in one rank's forward, reset_iter_state on all, then steps that equal stock FSDP2's."""
    case = Case(operations=("train", "train"))
    expected, _ = run(case, None)
    model = build(case, PAPERS_CODEC)
    snapshot = {name: value.clone() for name, value in model.state_dict().items()}
    one_step(model)

    plain = Channel.decode
    if rank == 1:
        Channel.decode = fail_to_decode  # type: ignore[method-assign]
    raised = False
    try:
        model.model.layers[0].unshard()
    except MemoryError:
        raised = True
    assert raised == (rank == 1)
    Channel.decode = plain  # type: ignore[method-assign]
    dist.barrier()
    model.reset_iter_state()
    model.load_state_dict(snapshot)

    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr)
    generator = torch.Generator().manual_seed(100 + rank)
    got = []
    for _ in range(2):
        loss = model(torch.randint(VOCAB, (29,), generator=generator))
        got.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        got += [parameter.detach().to_local().clone() for parameter in model.parameters()]
    assert len(got) == len(expected)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(expected, got, strict=True))


def test_an_exception_on_one_rank_ends_in_a_full_gather_and_exact_steps() -> None:
    if not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        pytest.skip("reset_iter_state came with torch 2.13")
    assert run_ranks(recover, 3) == [None] * 3


def gathers_by_phase(rank: int, world_size: int, operations: tuple[str, ...]) -> dict[str, int]:
    _, report = run(Case(operations=operations), PAPERS_CODEC)
    assert report is not None
    return report.gathers_by_phase


def test_phases_are_told_apart_by_bytes() -> None:
    # 3 groups: two layers (gathered in forward and backward) and the root (kept for backward)
    [phases, _] = run_ranks(gathers_by_phase, 2, ("train", "train", "accumulate"))
    assert phases == {
        "cold/forward": 3, "repeat/backward": 2 * 4, "first/forward": 3 * 2, "repeat/forward": 3,
    }  # fmt: skip
    [phases, _] = run_ranks(gathers_by_phase, 2, ("train", "invalidate_rank_0", "train"))
    assert phases == {"cold/forward": 6, "repeat/backward": 4}


def step_without_policy_on_rank_1(rank: int, world_size: int, log: Path) -> None:
    presence.PATIENCE_SECONDS = 1.0
    warnings.simplefilter("always")

    def keep(message: Warning | str, *arguments: Any) -> None:
        (log / f"{rank}.txt").write_text(str(message))

    warnings.showwarning = keep
    build(Case(), PAPERS_CODEC if rank != 1 else None)(torch.arange(29))


def test_a_rank_without_a_policy_is_named_before_gloo_ends_the_processes(tmp_path: Path) -> None:
    run_ranks(step_without_policy_on_rank_1, 3, tmp_path, timeout_s=60, expect_failure=True)
    for rank in (0, 2):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert "module 'FSDPTinyMoe': ranks [1] of its group have not come to its first gather for 1 s" in text


def late_rank(rank: int, world_size: int) -> tuple[int, list[str]]:
    presence.PATIENCE_SECONDS = 0.5
    model = build(Case(), PAPERS_CODEC)
    if rank == 2:
        time.sleep(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.arange(29))
    return fsdp_ciera.stats(model).num_gathers, [str(w.message) for w in caught if "fsdp_ciera" in str(w.message)]


def test_a_late_rank_costs_one_warning_and_nothing_else() -> None:
    on_time, _, late = run_ranks(late_rank, 3)
    assert on_time[0] == late[0] == 3
    assert ["ranks [2] of its group have not come" in text for text in on_time[1]] == [True]
    assert late[1] == []


def swapped_roots(rank: int, world_size: int) -> str:
    first, second = (build(Case(tied=False, lr=seed), PAPERS_CODEC) for seed in (1.0, 2.0))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.data.to_local().mul_(-1.5)
    tokens = torch.arange(29)
    order = (first, second) if rank == 0 else (second, first)
    for model in order:  # the ranks meet each other's module: wrong in stock FSDP2 as well, and nobody can tell
        model(tokens).backward()
    try:
        for model in (first, second):
            model(tokens).backward()
    except CieraDesyncError as error:
        return str(error)
    return ""


def test_two_roots_in_different_order_are_found_out_at_the_next_gather() -> None:
    for text in run_ranks(swapped_roots, 2):
        assert "an earlier gather of it met another module's of the same shape" in text
