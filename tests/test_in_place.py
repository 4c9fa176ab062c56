"""Decoding in place under FSDP2: who holds an output between gathers, within which budget, and that no bit suffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from fsdp_ciera import CieraPolicy, detach, invalidate, stats
from fsdp_ciera._compat import get_comm, param_groups
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.gather.stream import Stream
from ranks import run_ranks
from tiny_moe import BY_BYTES, Case, bits, build, compare_with_stock

VALUE_DELTA = CieraPolicy(codecs=("value_delta",))


def comms_of(model: torch.nn.Module) -> list[CieraAllGather]:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    comms = [get_comm(group) for module in modules for group in param_groups(module)]
    return [comm for comm in comms if isinstance(comm, CieraAllGather)]


def streams_of(model: torch.nn.Module) -> list[Stream]:
    return [stream for comm in comms_of(model) for stream in comm._streams.values()]


def train(model: torch.nn.Module) -> None:
    model(torch.arange(29)).backward()


def outputs_are_reused(rank: int, world_size: int, policy: CieraPolicy, case: Case) -> tuple[bool, int, int, int]:
    """Whether gathers decode in place; caches; the rest of held outputs; bytes of all gathered groups."""
    model = build(case, policy)
    train(model)
    streams = streams_of(model)
    held = [stream.state.held for stream in streams]
    gathered_bytes = sum(stream.layout.num_values * stream.cut.world_size * stream.layout.dtype.itemsize
                         for stream in streams)  # fmt: skip
    report = stats(model)
    for comm in comms_of(model):
        for stream in comm._streams.values():
            output = stream.state.held
            asked = comm.allocate((stream.layout.num_values * world_size,), dtype=stream.layout.dtype,
                                  device=torch.device("cpu"))  # fmt: skip
            other = comm.allocate((stream.layout.num_values * world_size,), dtype=torch.float64,
                                  device=torch.device("cpu"))  # fmt: skip
            if output is not None:
                assert asked.data_ptr() == output.data_ptr() != other.data_ptr()
    train(model)
    assert [stream.state.held is None for stream in streams] == [output is None for output in held]
    for stream, output in zip(streams, held, strict=True):
        assert output is None or (stream.state.held is not None and stream.state.held.data_ptr() == output.data_ptr())
    found = any(output is not None for output in held), report.cache_bytes, report.held_output_bytes, gathered_bytes
    invalidate(model)
    assert all(stream.state.held is None for stream in streams_of(model))
    train(model)
    comms = comms_of(model)
    detach(model)
    assert all(not comm._streams for comm in comms)
    return found


def test_the_output_is_held_and_handed_out_again() -> None:
    for is_held, cache_bytes, rest_bytes, gathered_bytes in run_ranks(outputs_are_reused, 2, VALUE_DELTA, Case()):
        assert is_held
        # own shards and one peer's are caches; both slots of the outputs are held, and the own shards besides
        assert cache_bytes == gathered_bytes and rest_bytes == gathered_bytes // 2


@pytest.mark.parametrize(
    ("policy", "case", "world_size"),
    [
        (replace(VALUE_DELTA, topology="hierarchical", ranks_per_node=2), Case(), 4),
        (VALUE_DELTA, Case(reshard_after_forward=2), 4),
        (CieraPolicy(codecs=("exponent_delta",)), Case(), 2),
    ],
    ids=["hierarchical", "two process groups with outputs of one size", "another codec"],
)
def test_who_holds_no_output(policy: CieraPolicy, case: Case, world_size: int) -> None:
    for is_held, cache_bytes, rest_bytes, _ in run_ranks(outputs_are_reused, world_size, policy, case):
        root_has_one_group = policy is VALUE_DELTA  # the root is never resharded to fewer ranks
        assert (is_held, cache_bytes > 0) == (root_has_one_group, True)
        assert (rest_bytes > 0) == root_has_one_group


def test_outputs_count_against_the_budget() -> None:
    ((_, cache_bytes, rest_bytes, _), *_) = run_ranks(outputs_are_reused, 2, VALUE_DELTA, Case())
    for budget, expected in ((cache_bytes + rest_bytes, True), (cache_bytes + rest_bytes - 1, False)):
        policy = replace(VALUE_DELTA, cache_budget=budget)
        for is_held, cached, rest, _ in run_ranks(outputs_are_reused, 2, policy, Case()):
            assert (is_held, cached, rest) == (expected, cache_bytes, rest_bytes if expected else 0)


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
        (stream,) = comm._streams.values()
        held = stream.state.held
        assert held is not None
        right = held.clone()
        elsewhere = torch.full_like(held, 7.0).view(-1)
        own = elsewhere.view(world_size, -1)[rank]
        own.copy_(right[rank])
        comm(elsewhere, own, stream.group)
        assert torch.equal(bits(elsewhere), bits(right.view(-1)))
        assert stream.state.held is not None and stream.state.held.data_ptr() == elsewhere.data_ptr()


def test_an_output_elsewhere_gets_a_copy() -> None:
    run_ranks(scribbles_do_not_stay, 2)


def test_a_full_gather_goes_into_memory_that_was_held() -> None:
    operations = ("train", "invalidate", "train", "eval", "mutate", "detach_attach", "train")
    run_ranks(compare_with_stock, 2, Case(operations=operations), VALUE_DELTA)
