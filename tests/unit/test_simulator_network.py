"""Bytes and seconds of rings, steps moved to other world sizes, and contenders derived from a stock step."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from fsdp_ciera.gather.agreement import ROW_BYTES
from fsdp_ciera.kernels.heads import HEAD_BYTES
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policies.machines import MACHINES
from fsdp_ciera.policies.tables import shipped_tables
from fsdp_ciera.profiling.trace import Event, Trace
from fsdp_ciera.simulator.network import Network, Place, Ring, Wire, hops, sent_bytes
from fsdp_ciera.simulator.place import Machine, hierarchical, hierarchical_param_groups, move, ring_of
from fsdp_ciera.simulator.schemes import BY_KEY, Assumptions, derive
from simulated_stand import CORES, LAYERS, OURS, STOCK, VALUES, record

GIVEN = Assumptions(
    table=shipped_tables()["smollm2-moe"],
    learning_rate=1e-5,
    costs=MACHINES["a100"],
    between=Link(3e-5, 8e9),
    inside=Link(1.5e-5, 230e9),
    overlap=True,
)


def gathered(trace: Trace, phase: str) -> list[int]:
    return [event.payload_bytes for event in trace.events if event.node == "AllGather" and event.phase == phase]


def test_flat_and_hierarchical_bytes_out_of_a_host() -> None:
    shard, hosts, local = 1000, 4, 8
    flat = Ring(ranks=32, hosts=4)
    nodes = Ring(ranks=hosts, hosts=hosts, side_by_side=local)
    assert sent_bytes("AllGather", shard, flat) == 31 * shard
    assert sent_bytes("AllGather", shard, nodes) == (hosts - 1) * local * shard == 24 * shard
    assert sent_bytes("InNode", hosts * shard, Ring(ranks=local)) == (local - 1) * hosts * shard
    assert sent_bytes("ReduceScatter", shard, flat) == 31 * shard
    assert sent_bytes("AllReduce", shard, flat) == pytest.approx(2 * 31 / 32 * shard)
    assert hops("AllGather", flat) == (3, 28) and hops("AllReduce", flat) == (6, 56)


def test_seconds_by_hand() -> None:
    network = Network(
        between={"any": Wire(call_seconds=1.0, hop_seconds=0.1, seconds_per_byte=0.01, copy_seconds_per_byte=0.001)},
        inside={"any": Wire(call_seconds=0.5, hop_seconds=0.01, seconds_per_byte=0.001)},
    )
    ring = Ring(ranks=4, hosts=2)
    # two calls of 1 s, 1 hop between and 2 inside; 3 x 100 bytes
    assert network.seconds("AllGather", 100, 2, ring) == pytest.approx(2 * (1 + 0.1 + 0.02) + 3.0)
    assert network.seconds("AllGather", 100, 1, Ring(ranks=4)) == pytest.approx(0.5 + 0.03 + 0.3)
    assert network.seconds("AllGather", 100, 1, Ring(ranks=1)) == 0.0
    assert network.seconds("AllGather", 0, 0, ring) == 0.0


def test_without_hops_it_is_the_link_that_policies_plan_with() -> None:
    link = Link(2e-3, 25e6)
    network = Network.of_links(link, link, 0.0, 0.0)
    for ranks in (1, 2, 5):
        for num_bytes in (0, 1000, 1e9):
            seconds = network.seconds("AllGather", num_bytes, int(num_bytes > 0), Ring(ranks=ranks, hosts=ranks))
            assert seconds == pytest.approx(link.seconds(num_bytes, ranks))


def test_a_throttled_link_lets_a_burst_through() -> None:
    wire = Wire(seconds_per_byte=1 / 95)
    network = Network(between={"any": wire}, inside={"any": wire}, burst_bytes=50, rate_bytes_per_second=100)
    ring = Ring(ranks=3, hosts=3)
    assert network.seconds("AllGather", 100, 1, ring, idle_seconds=0.0) == pytest.approx(200 / 95)
    assert network.seconds("AllGather", 100, 1, ring, idle_seconds=0.2) == pytest.approx(180 / 95)
    assert network.seconds("AllGather", 100, 1, ring, idle_seconds=inf) == pytest.approx(150 / 95)
    assert network.seconds("AllGather", 10, 1, ring, idle_seconds=inf) == 0.0


def test_moving_a_step_scales_each_part_by_its_own_rule() -> None:
    machine = Machine(num_cores=CORES, contention=STOCK.contention)
    moved = move(record(OURS, "value_delta", 2, 1e8), Place(world_size=8), machine, machine)
    there = record(OURS, "value_delta", 8, 1e8)
    for event, wanted in zip(moved.events, there.events, strict=True):
        assert (event.node, event.phase, event.group) == (wanted.node, wanted.phase, wanted.group)
        assert event.payload_bytes == wanted.payload_bytes
        if not event.num_collectives:
            assert event.seconds == pytest.approx(wanted.seconds)
    assert [group.values_per_rank for group in moved.groups] == [VALUES // LAYERS // 8] * LAYERS


def test_devices_of_their_own_do_not_slow_each_other() -> None:
    trace = record(STOCK, "fsdp2", 4, 1e8)
    alone = move(trace, Place(world_size=4), Machine(num_cores=CORES, contention=STOCK.contention), Machine())
    first = next(event for event in alone.events if event.node == "Compute")
    assert first.seconds == pytest.approx(0.05)


def test_one_rank_has_no_collectives_and_no_codec() -> None:
    machine = Machine()
    moved = move(record(OURS, "value_delta", 2, 1e8), Place(world_size=1), machine, machine)
    assert {event.node for event in moved.events} == {"Compute"}


def test_a_reshard_to_a_part_is_told_from_its_payload() -> None:
    machine = Machine()
    stock = record(STOCK, "fsdp2", 8, 1e8)
    place = Place(world_size=8)
    part = derive(stock, BY_KEY["fsdp2-int"], [], place, GIVEN)
    assert gathered(part, "backward")[0] == 2 * gathered(stock, "backward")[0]
    (backward, *_) = [event for event in part.events if event.node == "AllGather" and event.phase == "backward"]
    assert ring_of(part, backward, frozenset()) == Ring(ranks=4, hosts=4)
    moved = move(part, Place(world_size=16), machine, machine)
    (backward, *_) = [event for event in moved.events if event.node == "AllGather" and event.phase == "backward"]
    assert ring_of(moved, backward, frozenset()) == Ring(ranks=8, hosts=8)
    nodes = move(part, Place(world_size=32, ranks_per_host=8), machine, machine)
    (backward, *_) = [event for event in nodes.events if event.node == "AllGather" and event.phase == "backward"]
    assert ring_of(nodes, backward, frozenset()) == Ring(ranks=8, hosts=1)


def test_a_recorded_step_made_hierarchical() -> None:
    trace = replace(record(OURS, "value_delta", 8, 1e8), ranks_per_host=4)
    made = hierarchical(trace)
    inside = [event for event in made.events if event.node == "InNode"]
    assert len(inside) == 2 * LAYERS and hierarchical_param_groups(made) == frozenset(range(LAYERS))
    assert inside[0].payload_bytes == 2 * trace.groups[0].values_per_rank * trace.item_bytes
    nodes = [event.node for event in made.events[:4]]
    assert nodes == ["AllGather", "Decmp", "InNode", "Compute"]
    first, decode, *rest = trace.events
    copies = Event(node="Compute", phase="forward", group=0, seconds=0.001)
    copied = hierarchical(replace(trace, events=(first, first, copies, decode, *rest)))
    assert [e.node for e in copied.events[:6]] == ["AllGather", "AllGather", "Compute", "Decmp", "InNode", "Compute"]
    assert made.events[1].seconds == pytest.approx(trace.events[1].seconds / 7)  # one peer of seven is left
    assert ring_of(made, made.events[0], hierarchical_param_groups(made)) == Ring(ranks=2, hosts=2, side_by_side=4)


def test_derived_contenders_by_hand() -> None:
    place = Place(world_size=4)
    stock = record(STOCK, "fsdp2", 4, 1e8)
    shard = VALUES // LAYERS // 4
    groups = [(["layers.0.mlp.experts.down_proj"], [VALUES // LAYERS])] * LAYERS
    kept = derive(stock, BY_KEY["fsdp2-keep"], groups, place, GIVEN)
    assert gathered(kept, "forward") == gathered(stock, "forward") and gathered(kept, "backward") == []
    zero3 = derive(replace(stock, reduce_item_bytes=4), BY_KEY["zero3"], groups, place, GIVEN)
    reduced = [event.payload_bytes for event in zero3.events if event.node == "ReduceScatter"]
    assert reduced == [shard] * LAYERS  # half of the 2 bytes that the stand recorded
    zstd = derive(stock, BY_KEY["zstd"], groups, place, GIVEN)
    assert gathered(zstd, "backward") == [round(shard * 12.4 / 8) + HEAD_BYTES] * LAYERS
    block = derive(stock, BY_KEY["exponent_block"], groups, place, GIVEN)
    assert gathered(block, "backward") == pytest.approx([shard * (8 + 1 / 512) / 8 + HEAD_BYTES] * LAYERS, abs=1)
    assert gathered(block, "forward")[0] > gathered(block, "backward")[0]
    agreements = [
        event.payload_bytes for event in block.events if event.node == "AllReduce" and event.phase == "forward"
    ]
    assert agreements == [ROW_BYTES * LAYERS]
    delta = derive(stock, BY_KEY["value_delta"], groups, place, GIVEN)
    assert gathered(delta, "backward") == [0] * LAYERS
    assert 0 < gathered(delta, "forward")[0] < 2 * shard / 16
    blocking = derive(stock, BY_KEY["value_delta"], groups, place, replace(GIVEN, overlap=False))
    assert gathered(blocking, "backward") == [HEAD_BYTES] * LAYERS  # heads alone


def test_a_choosing_policy_goes_raw_where_nothing_pays() -> None:
    stock = record(STOCK, "fsdp2", 4, 1e8)
    groups = [(["layers.0.mlp.experts.down_proj"], [VALUES // LAYERS])] * LAYERS
    fast = replace(GIVEN, between=Link(0.0, 1e15), inside=Link(0.0, 1e15))
    made = derive(stock, BY_KEY["default"], groups, Place(world_size=4), fast)
    assert replace(made, contender="fsdp2") == stock
    slow = derive(stock, BY_KEY["default"], groups, Place(world_size=4), replace(GIVEN, between=Link(0.0, 1e7)))
    assert gathered(slow, "backward") == [0] * LAYERS
