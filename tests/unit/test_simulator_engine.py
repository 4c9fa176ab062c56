"""The event engine and the graphs: schedules by hand, and what must hold of every schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ciera.errors import SimulationError
from fsdp_ciera.profiling.trace import Event, Trace, TracedGroup
from fsdp_ciera.simulator.engine import Node, simulate
from fsdp_ciera.simulator.graph import build, priced
from fsdp_ciera.simulator.network import Network, Wire

LINK = Wire(seconds_per_byte=1.0)
NETWORK = Network(between={"any": LINK}, inside={"any": LINK})


def step(num_groups: int, *, coded: bool = False, world_size: int = 2, repeats_hash: bool = True) -> Trace:
    """Compute of 4 s a layer forward and 8 s backward; gathers of 3 s (coded: 1 s, Hash, Cmp, Decmp of 0.5 s), reduce 6 s."""
    events = []

    def gather(phase: str, group: int) -> None:
        if coded and (phase == "forward" or repeats_hash):
            events.append(Event(node="Hash", phase=phase, group=group, seconds=0.5))
            events.append(Event(node="Cmp", phase=phase, group=group, seconds=0.5))
        events.append(
            Event(
                node="AllGather",
                phase=phase,
                group=group,
                seconds=0,
                payload_bytes=1 if coded else 3,
                num_collectives=1,
            )
        )
        if coded:
            events.append(Event(node="PreDecmp", phase=phase, group=group, seconds=0.25))
            events.append(Event(node="Decmp", phase=phase, group=group, seconds=0.5))

    for group in range(num_groups):
        gather("forward", group)
        events.append(Event(node="Compute", phase="forward", group=group, seconds=4))
    for group in reversed(range(num_groups)):
        gather("backward", group)
        events.append(Event(node="Compute", phase="backward", group=group, seconds=8))
        events.append(
            Event(node="ReduceScatter", phase="backward", group=group, seconds=0, payload_bytes=6, num_collectives=1)
        )
    events.append(Event(node="Compute", phase="optimizer", group=None, seconds=2))
    return Trace(
        contender="fsdp2", world_size=world_size, ranks_per_host=1, num_cores=0, rate_bits_per_second=None, is_serial=False,
        item_bytes=1, reduce_item_bytes=2, num_parameters=1, iteration_seconds=(),
        groups=tuple(TracedGroup(name=f"layers.{group}", values_per_rank=3) for group in range(num_groups)),
        events=tuple(events),
    )  # fmt: skip


def times(trace: Trace, is_serial: bool, settles: bool = False) -> dict[tuple[str, str, str], tuple[float, float]]:
    found = simulate(build(priced(trace, NETWORK), is_serial, settles))
    return {
        (node.kind, node.phase, node.label): (start, end)
        for node, start, end in zip(found.nodes, found.starts, found.ends, strict=True)
    }


def test_streams_run_in_order_and_nodes_wait() -> None:
    found = simulate(
        [
            Node("Compute", 2.0, ("a",)),
            Node("AllGather", 1.0, ("b",)),
            Node("Compute", 3.0, ("a",), waits_for=(1,)),
            Node("AllGather", 1.0, ("b", "c"), waits_for=(0,)),
            Node("Decmp", 1.0, ("c",)),
            Node("Compute", 1.0, ("a",), waits_for=(4,)),
        ]
    )
    assert found.starts == (0.0, 0.0, 2.0, 2.0, 3.0, 5.0)
    assert found.ends == (2.0, 1.0, 5.0, 3.0, 4.0, 6.0)
    assert found.seconds == 6.0 and found.busy_seconds("c") == 2.0 and found.kind_seconds("Compute") == 6.0


def test_a_node_may_wait_for_one_listed_later() -> None:
    found = simulate([Node("Compute", 1.0, ("a",), waits_for=(1,)), Node("Compute", 2.0, ("b",))])
    assert found.starts == (2.0, 0.0)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([Node("Compute", 1.0, ("a",), waits_for=(1,)), Node("Compute", 1.0, ("a",))], "circle"),
        ([Node("Compute", -1.0, ("a",))], "at least 0"),
        ([Node("Compute", float("nan"), ("a",))], "at least 0"),
        ([Node("Compute", 1.0, ("a",), waits_for=(7,))], "allowed: 0 to 0"),
    ],
)
def test_what_cannot_run_is_refused(nodes: list[Node], says: str) -> None:
    with pytest.raises(SimulationError, match=says):
        simulate(nodes)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_schedule_beats_its_critical_path_or_its_streams(size: int, num_streams: int, dice: random.Random) -> None:
    nodes = [
        Node(
            "Compute",
            dice.uniform(0, 3),
            tuple({f"s{dice.randrange(num_streams)}" for _ in range(dice.choice((1, 1, 2)))}),
            tuple({dice.randrange(place) for _ in range(dice.randrange(3))} if place else ()),
        )
        for place in range(size)
    ]
    found = simulate(nodes)
    longest: list[float] = []
    for node in nodes:
        longest.append(node.seconds + max((longest[place] for place in node.waits_for), default=0.0))
    loads = [found.busy_seconds(f"s{number}") for number in range(num_streams)]
    assert found.seconds >= max(*longest, *loads) - 1e-9
    assert found.seconds <= sum(node.seconds for node in nodes) + 1e-9
    for place, node in enumerate(nodes):
        assert all(found.starts[place] >= found.ends[awaited] for awaited in node.waits_for)
    for number in range(num_streams):
        on_it = [place for place, node in enumerate(nodes) if f"s{number}" in node.streams]
        assert all(found.starts[b] >= found.ends[a] for a, b in pairwise(on_it))


def test_serial_is_the_sum() -> None:
    trace = step(3, coded=True)
    found = simulate(build(priced(trace, NETWORK), is_serial=True))
    assert found.seconds == sum(node.seconds for node in found.nodes) == 3 * 4 + 3 * 8 + 2 + 6 * (1 + 1.75) + 3 * 6


def test_forward_gathers_overlap_compute_by_hand() -> None:
    found = times(step(3), is_serial=False)
    gathers = [found["AllGather", "forward", f"layers.{group}"] for group in range(3)]
    computes = [found["Compute", "forward", f"layers.{group}"] for group in range(3)]
    # the third waits until the first has left its buffer, at 3, but its stream is busy until 6
    assert gathers == [(0, 3), (3, 6), (6, 9)]
    assert computes == [(3, 7), (7, 11), (11, 15)]


def test_a_forward_gather_waits_for_room_in_the_buffer() -> None:
    trace = step(4)
    quick = replace(
        trace, events=tuple(replace(e, payload_bytes=1) if e.node == "AllGather" else e for e in trace.events)
    )
    found = times(quick, is_serial=False)
    # gather 3 may start when block 1 has been copied out: it arrived at 2, and compute of block 0 ends at 5
    assert found["AllGather", "forward", "layers.2"] == (2, 3)
    assert found["AllGather", "forward", "layers.3"] == (5, 6)


def test_backward_prefetches_one_ahead_and_shares_the_link_with_reduce_scatters() -> None:
    found = times(step(3), is_serial=False)
    phase = "backward"
    # forward ends at 15; the first backward gather is not prefetched
    assert found["AllGather", phase, "layers.2"] == (15, 18)
    assert found["Compute", phase, "layers.2"] == (18, 26)
    assert found["AllGather", phase, "layers.1"] == (18, 21)  # beside compute of layer 2
    assert found["Compute", phase, "layers.1"] == (26, 34)
    # launched before the next gather, which the link therefore runs after it
    assert found["ReduceScatter", phase, "layers.2"] == (26, 32)
    assert found["AllGather", phase, "layers.0"] == (32, 35)
    assert found["Compute", phase, "layers.0"] == (35, 43)
    assert found["ReduceScatter", phase, "layers.1"] == (35, 41)
    assert found["ReduceScatter", phase, "layers.0"] == (43, 49)
    assert found["Compute", "optimizer", ""] == (49, 51)


def test_a_recorded_prefetch_is_the_same_step() -> None:
    trace = step(3)
    order = [(event.node, event.phase, event.group) for event in trace.events]
    events = list(trace.events)
    for group in (1, 0):  # FSDP2 calls the gather of the next layer before it computes with this one
        place = order.index(("AllGather", "backward", group))
        before = order.index(("Compute", "backward", group + 1))
        events.insert(before, events.pop(place))
        order.insert(before, order.pop(place))
    recorded = replace(trace, events=tuple(events))
    assert recorded != trace
    assert times(recorded, is_serial=False) == times(trace, is_serial=False)


def test_the_root_is_gathered_first_and_reduced_last() -> None:
    trace = step(3)
    root = replace(trace.events[0], phase="backward")
    kept = [event for event in trace.events if (event.node, event.phase, event.group) != ("AllGather", "backward", 0)]
    first = next(place for place, event in enumerate(kept) if event.phase == "backward")
    found = times(replace(trace, events=(*kept[:first], root, *kept[first:])), is_serial=False)
    assert found["AllGather", "backward", "layers.2"] == (18, 21)  # right behind the root's, whose gradients come last


def test_compute_waits_for_the_gradient_buffer_of_two_blocks_before() -> None:
    trace = step(3)
    slow = replace(
        trace, events=tuple(replace(e, payload_bytes=20) if e.node == "ReduceScatter" else e for e in trace.events)
    )
    kept = replace(slow, events=tuple(e for e in slow.events if e.node != "AllGather" or e.phase == "forward"))
    found = times(kept, is_serial=False)
    assert found["ReduceScatter", "backward", "layers.2"] == (23, 43)
    assert found["Compute", "backward", "layers.1"] == (23, 31)
    assert found["Compute", "backward", "layers.0"] == (43, 51)


def test_only_decoding_is_on_the_critical_path() -> None:
    found = times(step(2, coded=True), is_serial=False)
    assert found["Hash", "forward", "layers.0"] == (0, 0.5)
    assert found["Cmp", "forward", "layers.0"] == (0.5, 1)
    assert found["AllGather", "forward", "layers.0"] == (1, 2)
    assert found["Decmp", "forward", "layers.0"] == (2, 2.5)
    assert found["Compute", "forward", "layers.0"] == (2.5, 6.5)
    # hashed and compared during the first gather; gathered during the first decode
    assert found["Cmp", "forward", "layers.1"] == (1.5, 2)
    assert found["AllGather", "forward", "layers.1"] == (2, 3)
    assert found["Compute", "forward", "layers.1"] == (6.5, 10.5)


def test_compute_between_the_stages_of_a_gather_belongs_to_its_block() -> None:
    trace = step(2, coded=True)
    events = [
        with_glue
        for event in trace.events
        for with_glue in (event, Event(node="Compute", phase=event.phase, group=event.group, seconds=0.0))
    ]
    assert times(replace(trace, events=tuple(events)), is_serial=False) | glue(trace) == times(trace, is_serial=False)


def glue(trace: Trace) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Compute has more nodes then, of which `times` knows the last."""
    found = times(trace, is_serial=False)
    return {key: found[key] for key in found if key[0] == "Compute"}


def test_settled_sizes_come_before_the_first_gather() -> None:
    found = times(step(2, coded=True, repeats_hash=False), is_serial=False, settles=True)
    assert found["Cmp", "forward", "layers.1"] == (1.5, 2)
    assert found["AllGather", "forward", "layers.0"] == (2, 3)


def test_overlap_never_loses_and_never_beats_the_streams() -> None:
    for coded in (False, True):
        trace = priced(step(5, coded=coded), NETWORK)
        serial = simulate(build(trace, is_serial=True))
        overlapped = simulate(build(trace, is_serial=False))
        assert overlapped.seconds < serial.seconds
        assert overlapped.seconds >= max(overlapped.busy_seconds("link"), overlapped.busy_seconds("compute"))
        assert sorted(n.seconds for n in overlapped.nodes) == sorted(n.seconds for n in serial.nodes)


def test_an_unknown_node_is_refused_in_one_line() -> None:
    trace = step(1)
    strange = replace(trace, events=(replace(trace.events[0], node="Teleport"),))
    with pytest.raises(SimulationError, match="'Teleport', allowed: Hash, Cmp") as caught:
        priced(strange, NETWORK)
    assert "\n" not in str(caught.value)


def test_a_hundred_thousand_nodes() -> None:
    trace = priced(step(8_000, coded=True), NETWORK)
    nodes = build(trace, is_serial=False)
    assert len(nodes) > 100_000
    found = simulate(nodes)
    assert found.seconds == pytest.approx(found.busy_seconds("compute"), rel=0.01)
