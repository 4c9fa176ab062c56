"""Decoding in place under FSDP2: who holds an output between gathers, within which budget, and that no bit suffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from fsdp_ciera import CieraPolicy, detach, invalidate, stats
from fsdp_ciera._compat import get_comm, param_groups
from fsdp_ciera.gather.channel import Channel
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.testing import run_ranks
from tiny_moe import BY_BYTES, Case, bits, build, compare_with_stock

VALUE_DELTA = CieraPolicy(codecs=("value_delta",))


def comms_of(model: torch.nn.Module) -> list[CieraAllGather]:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    comms = [get_comm(group) for module in modules for group in param_groups(module)]
    return [comm for comm in comms if isinstance(comm, CieraAllGather)]


def channels_of(model: torch.nn.Module) -> list[Channel]:
    return [channel for comm in comms_of(model) for channel in comm.channels.values()]


def train(model: torch.nn.Module) -> None:
    model(torch.arange(29)).backward()


def outputs_are_reused(rank: int, world_size: int, policy: CieraPolicy, case: Case) -> tuple[int, int, int, int]:
    """How many channels hold an output; caches; the rest of held outputs; bytes of all gathered groups."""
    model = build(case, policy)
    train(model)
    channels = channels_of(model)
    held = [channel.held for channel in channels]
    gathered_bytes = sum(channel.layout.num_values * channel.cut.num_nodes * channel.layout.dtype.itemsize
                         for channel in channels)  # fmt: skip
    report = stats(model)
    train(model)
    for channel, output in zip(channels, held, strict=True):
        assert (channel.held is None) == (output is None)
        assert output is None or (channel.held is not None and channel.held.data_ptr() == output.data_ptr())
    found = sum(output is not None for output in held), report.cache_bytes, report.held_output_bytes, gathered_bytes
    invalidate(model)
    assert all(channel.held is None for channel in channels_of(model))
    train(model)
    comms = comms_of(model)
    detach(model)
    assert all(not comm.channels for comm in comms)
    return found


@pytest.mark.parametrize(
    ("policy", "case", "world_size", "num_channels"),
    [
        (VALUE_DELTA, Case(), 2, 3),
        (replace(VALUE_DELTA, topology="hierarchical", ranks_per_node=2), Case(), 4, 3),
        (
            VALUE_DELTA,
            Case(reshard_after_forward=2),
            4,
            5,
        ),  # two layers have outputs of one size over two process groups
    ],
    ids=["flat", "hierarchical", "two process groups"],
)
def test_the_output_is_held_and_handed_out_again(
    policy: CieraPolicy, case: Case, world_size: int, num_channels: int
) -> None:
    for num_held, cache_bytes, rest_bytes, gathered_bytes in run_ranks(outputs_are_reused, world_size, policy, case):
        assert num_held == num_channels
        assert cache_bytes == gathered_bytes and rest_bytes == 0


def test_who_holds_no_output() -> None:
    for num_held, cache_bytes, rest_bytes, _ in run_ranks(
        outputs_are_reused, 2, CieraPolicy(codecs=("exponent_delta",)), Case()
    ):
        assert (num_held, cache_bytes > 0, rest_bytes) == (0, True, 0)


def test_other_codecs_in_held_outputs_count_against_the_budget() -> None:
    mix = replace(VALUE_DELTA, categories=("expert_ffn", "embedding"), cache_budget=None)
    ((num_held, cache_bytes, rest_bytes, gathered_bytes), *_) = run_ranks(outputs_are_reused, 2, mix, Case())
    assert num_held and rest_bytes > 0 and cache_bytes + rest_bytes == gathered_bytes
    for budget, expected in ((cache_bytes + rest_bytes, True), (cache_bytes + rest_bytes - 1, False)):
        policy = replace(mix, cache_budget=budget)
        for held, cached, rest, _ in run_ranks(outputs_are_reused, 2, policy, Case()):
            assert (held > 0, cached, rest) == (expected, cache_bytes, rest_bytes if expected else 0)


MIX = CieraPolicy(codecs=("value_delta", "exponent_delta", "entropy"), cache_budget=None, **BY_BYTES)


@pytest.mark.parametrize(
    "policy", [VALUE_DELTA, MIX, replace(VALUE_DELTA, verify="every")], ids=["one", "mix", "verify"]
)
def test_no_bit_differs(policy: CieraPolicy) -> None:
    run_ranks(compare_with_stock, 3, Case(operations=("train",) * 4), policy)


def scribbles_do_not_stay(rank: int, world_size: int) -> None:
    """Whoever gets a gather's output elsewhere (another allocator, say) gets right values, and so does the next gather."""
    model = build(Case(), VALUE_DELTA)
    train(model)
    for comm in comms_of(model):
        (channel,) = comm.channels.values()
        held = channel.held
        assert held is not None
        right = held.clone()
        elsewhere = torch.full_like(held, 7.0).view(-1)
        own = elsewhere.view(world_size, -1)[rank]
        own.copy_(right[rank])
        comm(elsewhere, own, channel.process_group)
        assert torch.equal(bits(elsewhere), bits(right.view(-1)))
        assert channel.held is not None and channel.held.data_ptr() == elsewhere.data_ptr()


def test_an_output_elsewhere_gets_a_copy() -> None:
    run_ranks(scribbles_do_not_stay, 2)


def test_a_full_gather_goes_into_memory_that_was_held() -> None:
    operations = ("train", "invalidate", "train", "eval", "mutate", "detach_attach", "train")
    run_ranks(compare_with_stock, 2, Case(operations=operations), VALUE_DELTA)
