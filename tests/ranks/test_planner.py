"""Plans of live groups: all ranks agree, rank 0 decides; where nothing pays gathers are stock; and plans are renewed."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ciera import CieraPolicy, CieraStats, attach, detach, invalidate, stats
from fsdp_ciera._compat import get_comm, param_groups
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.errors import CieraFileError, CieraMismatchError, CieraPolicyError
from fsdp_ciera.gather.channel import Channel
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.planning import CodecCost, Link, StageCost, conditions, measure
from fsdp_ciera.planning.choose import make_plan
from fsdp_ciera.planning.measure import free_memory_bytes, measure_costs
from fsdp_ciera.planning.plan import Conditions
from fsdp_ciera.planning.probe import Probe, first_payload_bytes
from fsdp_ciera.planning.shapes import GroupShape, spans_of
from fsdp_ciera.policies.payloads import Payload
from fsdp_ciera.testing import run_ranks
from loops import CPU
from tiny_moe import BY_BYTES, Case, build, compare_with_stock, reshard, run

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
FREE = {name: CodecCost() for name in CODECS}
SLOW_CODECS = {name: CodecCost(decmp=StageCost(fixed=1.0)) for name in CODECS}


def codecs_of(report: CieraStats) -> set[str]:
    return {codec for codec, amount in report.by_codec.items() if amount.raw_bytes}


def test_a_fast_link_selects_nothing_and_gathers_as_stock_fsdp2() -> None:
    policy = CieraPolicy(link="450GB/s", codec_costs=SLOW_CODECS)
    case = Case(operations=("train",) * 3)
    for report in run_ranks(compare_with_stock, 2, case, policy):
        assert codecs_of(report) == {"raw"}
        assert report.cache_bytes == 0
        assert report.wire_bytes == report.raw_bytes  # no headers
        assert {phase.partition("/")[0] for phase in report.gathers_by_phase} == {"plain"}
        (plan,) = report.plans
        assert plan.gain_seconds == 0 and plan.raw_bytes == plan.wire_bytes


def test_a_slow_link_selects_what_sends_the_fewest_bytes() -> None:
    for report in run_ranks(compare_with_stock, 2, Case(operations=("train",) * 3), CieraPolicy(**BY_BYTES)):
        assert codecs_of(report) == {"value_delta"}
        (plan,) = report.plans
        assert plan.gain_seconds > 0 and plan.wire_bytes < plan.raw_bytes / 2
        assert report.cache_bytes <= plan.cache_bytes


def plan_and_stats(rank: int, world_size: int, case: Case, policy: CieraPolicy) -> CieraStats:
    _, report = run(case, policy)
    assert report is not None
    return report


def test_the_paper_weighs_its_codec_against_raw() -> None:
    case = Case(operations=("train",) * 2)
    for costs, expected in ((FREE, {"exponent_block"}), (SLOW_CODECS, {"raw"})):
        policy = CieraPolicy.paper(link=Link(0.0, 1e6), codec_costs=costs)
        assert [codecs_of(report) for report in run_ranks(plan_and_stats, 2, case, policy)] == [expected] * 2


def test_a_measured_plan_is_the_same_on_all_ranks_and_stays_within_the_budget() -> None:
    """Whatever it measures: links and codecs of this machine, on three ranks that share its cores."""
    policy = CieraPolicy(cache_budget=20_000)
    first, *others = run_ranks(plan_and_stats, 3, Case(operations=("train",) * 2), policy)
    (plan,) = first.plans
    assert all(report.plans == [plan] for report in others)
    assert plan.link is not None and 1e3 < plan.link.bytes_per_second < 1e13
    assert plan.cache_bytes <= 20_000 and plan.budget_bytes == 20_000
    assert max(report.cache_bytes for report in (first, *others)) <= plan.cache_bytes
    assert any("no learning_rate in the policy" in note for note in plan.notes)
    json.dumps(first.to_dict())


def shares(rank: int, world_size: int, free: list[int]) -> tuple[int | None, int]:
    conditions.free_memory_bytes = lambda device: free[rank]  # type: ignore[attr-defined]
    reports = [plan_and_stats(rank, world_size, Case(operations=("train",)), CieraPolicy(cache_budget=budget, **BY_BYTES))
               for budget in ("auto", 0.5)]  # fmt: skip
    assert reports[1].plans[0].budget_bytes == min(free) // 2
    return reports[0].plans[0].budget_bytes, reports[0].plans[0].cache_bytes


def test_a_share_of_memory_is_that_of_the_rank_with_least_of_it() -> None:
    for budget_bytes, cache_bytes in run_ranks(shares, 2, [100_000, 40_000]):
        assert budget_bytes == 10_000
        assert 0 < cache_bytes <= 10_000


def table_on_rank_0(rank: int, world_size: int, folder: str, exists: bool) -> str:
    path = Path(folder) / "table.json"
    if rank == 0 and exists:
        rates = {"value_change": 0.01, "exponent_change": 0.001, "value_change_entropy_bits": 0.1}
        entries = [{"lr": 1e-3, "categories": {"all": rates}}]
        content = {"format": 1, "name": "mine", "model": "M", "provenance": {}, "entries": entries}
        path.write_text(json.dumps(content))
    policy = CieraPolicy.from_table(str(path), learning_rate=1e-3, **BY_BYTES)
    if exists:
        report = plan_and_stats(rank, world_size, Case(operations=("train",)), policy)
        return report.plans[0].table
    with pytest.raises(CieraFileError) as caught:
        plan_and_stats(rank, world_size, Case(operations=("train",)), policy)
    return str(caught.value)


def test_only_rank_0_reads_tables_and_its_error_is_everybodys(tmp_path: Path) -> None:
    errors = run_ranks(table_on_rank_0, 2, str(tmp_path), False)
    assert errors[0] == errors[1] and "table.json' cannot be read: No such file" in errors[0]
    assert run_ranks(table_on_rank_0, 2, str(tmp_path), True) == ["mine", "mine"]


def different_policies(rank: int, world_size: int) -> str:
    """One rank would measure, the other would not: they must not meet in different collectives."""
    policy = CieraPolicy() if rank else CieraPolicy(codecs=("exponent_block",))
    with pytest.raises(CieraMismatchError) as caught:
        build(Case(), policy)(torch.arange(29))
    return str(caught.value)


def test_ranks_that_would_plan_differently_raise_the_same_error() -> None:
    texts = run_ranks(different_policies, 2)
    assert texts[0] == texts[1] and "policy.codecs" in texts[0]


def experts_apart(rank: int, world_size: int, budget: int) -> list[Any]:
    case = Case(experts_mesh=True, operations=("train",) * 2)
    report = compare_with_stock(rank, world_size, case, CieraPolicy(cache_budget=budget, **BY_BYTES))
    return [len(report.plans), report.plans[0].codecs, report.plans[0].cache_bytes, report.cache_bytes]


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="parameters on meshes of their own came with torch 2.12")
def test_experts_on_a_mesh_of_their_own_share_one_plan() -> None:
    first, *others = run_ranks(experts_apart, 4, 25_000)
    assert first[0] == 1 and others == [first] * 3
    assert first[3] <= first[2] <= 25_000
    assert {codec for group in first[1] for codec in group} > {"value_delta"}


# Adaptive


def adapting(rank: int, world_size: int, case: Case, policy: CieraPolicy) -> list[Any]:
    """Bits as stock, and what the plan was after each step."""
    compare_with_stock(rank, world_size, case, policy)
    model = build(case, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr)
    history = []
    for step in range(9):
        torch.manual_seed(100 + step)
        model(torch.randint(37, (29,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        report = stats(model)
        history.append((report.plans[0].step, codecs_now(model), report.plans[0].wire_bytes, report.wire_bytes))
    return history


def codecs_now(model: torch.nn.Module) -> set[str]:
    found: set[str] = set()
    for layer in model.model.layers:
        comm = get_comm(param_groups(layer)[0])
        assert isinstance(comm, CieraAllGather)
        found |= set(comm.planned_codecs or ())
    return found


def wrong_table(tmp_path: Path) -> str:
    """Says that every bf16 value changes in each step, and no exponent."""
    rates = {"value_change": 1.0, "exponent_change": 0.0, "value_change_entropy_bits": 16.0}
    entries = [{"lr": 1e-3, "categories": {"all": rates}}]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"format": 1, "name": "wrong", "model": "M", "provenance": {}, "entries": entries}))
    return str(path)


def test_adaptive_renews_the_plan_from_measured_rates_without_losing_a_bit(tmp_path: Path) -> None:
    """Without repeats (parameters stay gathered) a table that says "all values change" rules value_delta out; measured
    rates of a small learning rate bring it in."""
    policy = CieraPolicy(
        codecs=("value_delta", "exponent_delta"),
        tables=wrong_table(tmp_path),
        adapt_every=3,
        warmup_steps=1,
        **BY_BYTES,
    )
    case = Case(lr=1e-5, reshard_after_forward=False, operations=("train", "eval", "accumulate", "load", "train") * 2)
    histories = run_ranks(adapting, 3, case, policy)
    assert all(history == histories[0] for history in histories)
    steps, codecs, expected, _ = zip(*histories[0], strict=True)
    # gathers see 0, 1, 2, ... changes; the shards of changes 3 and 4 are compared, and the plan is renewed at the 5th
    assert steps == (0, 0, 0, 0, 0, 5, 5, 5, 8)
    assert codecs[0] == {"exponent_delta"} and "value_delta" in codecs[-1]
    assert expected[-1] < expected[0]


def switching(gain_steps: int) -> tuple[str, ...]:
    """A plan that is renewed every `gain_steps` steps, when value_delta has turned out to send nothing."""
    policy = CieraPolicy(codecs=("value_delta", "exponent_delta"), adapt_every=gain_steps, **BY_BYTES)
    shape = GroupShape(("mlp.experts.down_proj",), (1_000_000,), torch.bfloat16, 2, spans_of([([0, 1], 1)], policy))
    first = make_plan([shape], policy, Conditions(links=[[Link(0.0, 1e6)]]))
    assert first.codecs == (("value_delta",),)
    measured = [np.full((2, 1, 2), 1_000_000.0)]
    measured[0][:, :, 0] = 0.0
    again = Conditions(links=[[Link(0.0, 1e6)]], measured=measured, current=(("exponent_delta",),))
    (codecs,) = make_plan([shape], policy, again).codecs
    return codecs


def test_a_change_of_codec_must_repay_its_full_gather() -> None:
    """A step gains 1 MB, the full gather costs 2 MB."""
    assert switching(2) == ("exponent_delta",)
    assert switching(3) == ("value_delta",)


def test_adaptive_leaves_caches_alone_where_the_plan_stays() -> None:
    policy = CieraPolicy(
        codecs=("value_delta", "raw"), categories=("expert_ffn", "embedding"), adapt_every=1, warmup_steps=0, **BY_BYTES
    )
    for report in run_ranks(plan_and_stats, 2, Case(lr=1e-4, operations=("train",) * 6), policy):
        assert report.plans[0].step > 0
        assert {phase.partition("/")[0] for phase in report.gathers_by_phase} == {"cold", "first", "repeat"}
        assert report.gathers_by_phase["cold/forward"] == 3  # each group once


def test_a_measured_plan_predicts_what_the_next_steps_send() -> None:
    """Sizes as measured, paddings and headers as they will be: the next step is off by what the rates drift."""
    for codecs in (("value_delta", "raw"), ("exponent_delta", "exponent_block", "entropy")):
        policy = CieraPolicy(codecs=codecs, adapt_every=2, warmup_steps=0, **BY_BYTES)
        for history in run_ranks(predicting, 2, Case(hidden=256, intermediate=256), policy):
            for expected, sent in history:
                assert sent == pytest.approx(expected, rel=0.05), (codecs, history)


def predicting(rank: int, world_size: int, case: Case, policy: CieraPolicy) -> list[tuple[float, int]]:
    """Steps that change as much every time: what is expected of a step, and what it sends."""
    model = build(case, policy)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for step in range(8):
        expected = stats(model).plans[0].wire_bytes if step else 0.0
        before = stats(model).wire_bytes if step else 0
        model(torch.arange(29)).backward()
        found.append((expected, stats(model).wire_bytes - before))
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local()
                local.add_(torch.randn(local.shape, generator=generator), alpha=1e-4)
    return found[6:]


def all_steps(rank: int, world_size: int, policy: CieraPolicy) -> list[int]:
    """The root is frozen after two steps: its gathers see no changes any more."""
    model = build(Case(tied=False), policy)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(8):
        if step == 2:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("layers" in name)
        model(torch.randint(37, (29,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(stats(model).plans[0].step)
    return found


def test_a_frozen_root_does_not_stop_the_count_of_steps() -> None:
    policy = CieraPolicy(codecs=("value_delta", "raw"), adapt_every=2, warmup_steps=0, **BY_BYTES)
    first, second = run_ranks(all_steps, 2, policy)
    assert first == second and max(first) >= 5, first


def failing(rank: int, world_size: int, policy: CieraPolicy) -> list[int]:
    """A payload cannot be decoded on one rank while the others go on: they must not count steps apart."""
    model = build(Case(tied=False), policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> int:
        model(torch.arange(29)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return stats(model).plans[0].step

    step()
    decode = Channel.decode
    if rank == 1:
        Channel.decode = no_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError) if rank == 1 else nullcontext():
        model.unshard()
    Channel.decode = decode  # type: ignore[method-assign]
    torch.distributed.barrier()
    model.reset_iter_state()
    invalidate(model)
    reshard(model)
    return [step() for _ in range(7)]


def no_memory(*arguments: Any) -> None:
    raise MemoryError


def test_a_rank_that_fails_counts_the_same_steps() -> None:
    policy = CieraPolicy(codecs=("value_delta", "exponent_delta"), adapt_every=2, warmup_steps=0, **BY_BYTES)
    first, second = run_ranks(failing, 2, policy)
    assert first == second and max(first) > 3, first


def late_layer(rank: int, world_size: int, table: str) -> list[tuple[int, float]]:
    """A first plan that hardly uses the budget is renewed when another cohort has taken the rest of it."""
    policy = CieraPolicy(
        codecs=("value_delta", "entropy"), tables=table, cache_budget=12_000, adapt_every=2, warmup_steps=0, **BY_BYTES
    )
    model = build(Case(reshard_after_forward=False), None)
    attach(model.model.layers[0], policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found = []
    for step in range(8):
        if step == 1:
            attach(model.model.layers[1], policy)
        model(torch.randint(37, (29,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        report = stats(model)
        found.append((report.cache_bytes, sum(plan.cache_bytes for plan in report.plans)))
        if step == 1 and rank == 0:
            Path(table).unlink()  # a renewal must not need it
    return found  # type: ignore[return-value]


def test_renewed_plans_of_several_cohorts_share_the_budget(tmp_path: Path) -> None:
    for found in run_ranks(late_layer, 2, wrong_table(tmp_path)):
        assert all(held <= planned <= 12_000 for held, planned in found), found
        assert found[-1][0] > 0


def other_links(rank: int, world_size: int) -> list[int]:
    """Groups over crossing meshes: a cohort a mesh, and on each rank another one may have spent more."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    for layer, name in zip(model, ("columns", "rows"), strict=True):
        torch_fully_shard(layer, mesh=mesh[name])
    speeds = iter((1e12, 1e3) if rank < 2 else (1e3, 1e3))
    conditions.measure_link = lambda group, backend: Link(0.0, next(speeds))  # type: ignore[attr-defined]
    attach(model, CieraPolicy(codecs=("exponent_block", "raw"), codec_costs=SLOW_CODECS, cache_budget=5_000))
    torch_fully_shard(model, mesh=mesh["rows"])
    with torch.no_grad():
        model(torch.randn(2, 64))
    report = stats(model)
    return [report.cache_bytes, len(report.plans)]


def test_what_was_spent_is_agreed_on_by_all_ranks_of_a_cohort() -> None:
    results = run_ranks(other_links, 4)
    assert [plans for _, plans in results] == [2] * 4
    assert max(held for held, _ in results) > 0
    assert all(held <= 5_000 for held, _ in results), results


def node_sizes(rank: int, world_size: int, sizes: list[str | None], topology: str) -> str:
    size = sizes[rank]
    if size is None:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    else:
        os.environ["LOCAL_WORLD_SIZE"] = size
    model = build(Case(), CieraPolicy(codecs=("value_delta",), topology=topology))
    try:
        model(torch.arange(29))
    except CieraPolicyError as error:
        return str(error)
    report = stats(model)
    assert set(report.by_link) == {"flat"}
    return " ".join(report.notes)


@pytest.mark.parametrize(
    ("sizes", "topology", "said"),
    [
        (["2", "2", "4", "4"], "auto", "nodes have 2 to 4 ranks"),
        (["2", None, "2", "2"], "auto", "nodes have 0 to 2 ranks"),
        (["2", None, "2", "2"], "hierarchical", "LOCAL_WORLD_SIZE is 0 to 2 (0: not set) on the ranks"),
        ([None] * 4, "auto", ""),
    ],
)
def test_ranks_that_see_different_nodes_do_not_measure_apart(sizes: list[str | None], topology: str, said: str) -> None:
    texts = run_ranks(node_sizes, 4, sizes, topology, timeout_s=60)
    assert len(set(texts)) == 1 and said in texts[0]


def swapping(rank: int, world_size: int) -> tuple[int, int]:
    policy = CieraPolicy(cache_budget=30_000, **BY_BYTES)
    model = build(Case(), policy)
    for _ in range(4):
        model(torch.arange(29)).backward()
        held = stats(model).cache_bytes
        detach(model.model.layers[0])
        attach(model.model.layers[0], policy)
    model(torch.arange(29)).backward()
    return held, stats(model).cache_bytes


def test_a_group_that_is_detached_gives_its_share_back() -> None:
    for before, after in run_ranks(swapping, 2):
        assert before == after > 25_000


def entropy_bits(num_bytes: float) -> Payload:
    policy = CieraPolicy(codecs=("entropy", "raw"), micro_batches=3, **BY_BYTES)
    shape = GroupShape(("mlp.experts.down_proj",), (1_000_000,), torch.bfloat16, 2, spans_of([([0, 1], 2)], policy))
    measured = [np.full((2, 1, 2), num_bytes)]
    plan = make_plan([shape], policy, Conditions(links=[[Link(0.0, 1e6)]], measured=measured))
    (row,) = plan.rows
    return Payload(row.wire_bytes, row.raw_bytes)


def test_a_codec_must_pay_twice_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured alone counts twice, but not in the published system, and not what the policy says."""
    cost = CodecCost(hash=StageCost(fixed=1.0), decmp=StageCost(per_value=2.0, per_changed=3.0))
    monkeypatch.setattr(conditions, "measure_costs", lambda codecs, *_: dict.fromkeys(codecs, cost))
    policy = CieraPolicy(codecs=("entropy", "raw"))
    shape = GroupShape(("w",), (1_000,), torch.bfloat16, 2, spans_of([([0, 1], 2)], policy))
    twofold = CodecCost(hash=StageCost(fixed=2.0), decmp=StageCost(per_value=4.0, per_changed=6.0))
    for given, expected in (
        (policy, twofold),
        (replace(policy, selection="greedy"), cost),
        (replace(policy, codec_costs={"entropy": cost}), cost),
    ):
        assert conditions._codec_costs(given, [shape], CPU) == {"entropy": expected}


def test_a_codec_without_memory_sends_as_much_in_repeats() -> None:
    assert entropy_bits(1_300_000) == (6 * 1_300_000, 6 * 2_000_000)


def test_runs_are_measured_whole_and_each_parameter_has_its_part() -> None:
    """Two parameters of a category with the same changes, which value_delta codes once; the third is another run."""
    policy = CieraPolicy(codecs=("value_delta", "exponent_delta", "raw"), **BY_BYTES)
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight")
    shape = GroupShape(names, (6000, 6000, 500), torch.bfloat16, 2, spans_of([([0, 1], 2)], policy))
    last = torch.randn(6000, generator=torch.Generator().manual_seed(0)).bfloat16()
    fresh = last.clone()
    fresh[::7] *= 1.01
    probe = Probe(shape, policy.codecs, 512, CPU)
    assert np.isnan(probe.take()).all()
    for step, values in enumerate((last, fresh)):
        shard = torch.cat([values, values, values[:500]])
        probe.look_at(shard, step)
        probe.look_at(shard + 1, step)  # the same step again: ignored
    found = probe.take()
    for number, codec in enumerate(policy.codecs):
        whole = first_payload_bytes(codec, torch.cat([last, last]), torch.cat([fresh, fresh]), 512)
        assert found[:2, number].sum() == pytest.approx(whole)
        assert found[0, number] == pytest.approx(found[1, number])
        assert found[2, number] == first_payload_bytes(codec, last[:500], fresh[:500], 512)
    apart = first_payload_bytes("value_delta", last, fresh, 512)
    assert found[0, 0] < 0.9 * apart


# Measuring


def links(rank: int, world_size: int) -> list[Link]:
    group = torch.distributed.group.WORLD
    assert group is not None
    return [measure.measure_link(group, CPU) for _ in range(2)]


def test_all_ranks_measure_the_same_link() -> None:
    first, *others = run_ranks(links, 3)
    assert others == [first] * 2
    assert all(link.latency_seconds >= 0 and link.bytes_per_second > 1e4 for link in first)


def test_codecs_are_measured_once_for_every_dtype_and_block_size() -> None:
    known = dict(measure.MEASURED_COSTS)
    measure.MEASURED_COSTS.clear()
    try:
        costs = measure_costs(("value_delta", "entropy", "raw"), torch.bfloat16, 512, CPU)
        assert measure_costs(("value_delta",), torch.bfloat16, 512, CPU)["value_delta"] is costs["value_delta"]
        assert len(measure.MEASURED_COSTS) == 2  # raw costs nothing
    finally:
        measure.MEASURED_COSTS.update(known)
    assert costs["raw"] == CodecCost()
    assert costs["value_delta"].gather_seconds(1 << 20, 3, 0.1, overlap=False) > 0
    once = costs["value_delta"].per_gather_seconds(overlap=False)
    assert once > costs["value_delta"].per_gather_seconds(overlap=True) > 0  # a head, a checksum, a stamp
    hidden = costs["entropy"].gather_seconds(1 << 20, 3, 0.1, overlap=True)
    assert 0 < hidden < costs["entropy"].gather_seconds(1 << 20, 3, 0.1, overlap=False)


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_free_of_machine", lambda: 8000)
    monkeypatch.setattr(measure, "_free_of_containers", lambda: [6000])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_memory_bytes(torch.device("cpu")) == 6000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory_bytes(torch.device("cpu")) == 1500


def late_sibling(rank: int, world_size: int) -> tuple[float, float]:
    """A second policy, or a group that comes later, has a plan of its own and what is left of the budget."""
    policy = CieraPolicy(cache_budget=30_000, **BY_BYTES)
    model = build(Case(), None)
    first, second = model.model.layers
    attach(first, policy)
    model(torch.arange(29)).backward()
    attach(second, policy)
    model(torch.arange(29)).backward()
    report = stats(model)
    assert len(report.plans) == 2
    return sum(plan.cache_bytes for plan in report.plans), report.cache_bytes


def test_plans_of_one_root_share_the_budget() -> None:
    for planned, held in run_ranks(late_sibling, 2):
        assert 0 < held <= planned <= 30_000


def test_replacing_a_field_of_a_policy_keeps_it_valid() -> None:
    policy = CieraPolicy(link="8GB/s 2s", codec_costs=FREE)
    assert policy.link == Link(2.0, 8e9)
    assert replace(policy, block_size=64).link == policy.link
    assert json.loads(json.dumps(policy.to_dict()))["link"] == {"latency_seconds": 2.0, "bytes_per_second": 8e9}
