"""Agrees on the conditions of a plan among the ranks that plan together: links (the slowest rank counts), codec costs (the
slowest machine counts), and free memory (the smallest counts). The ranks exchange numbers once, and the largest of each holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist

from fsdp_ciera._compat import FSDPParamGroup, gather_groups
from fsdp_ciera.backends.base import Backend
from fsdp_ciera.gather.topology import cut_of, node_groups_of
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.planning.measure import agree_on_largest, free_memory_bytes, measure_costs, measure_link
from fsdp_ciera.planning.plan import Conditions
from fsdp_ciera.planning.shapes import GroupShape
from fsdp_ciera.policies.costs import CodecCost, StageCost
from fsdp_ciera.policies.links import Link
from fsdp_ciera.policy import CieraPolicy

COST_IN_A_STEP = 2.0
"""[Note: Codecs cost more in a step] The time that a codec adds to an iteration, divided by the time that it takes by itself.
In an iteration its caches are cold, its rank shares cores and memory with others, and every gather waits for the rank that
codes last: on links without a limit 0.17 s of codecs came with 0.16 s of waiting, and plans that counted only the former were
slower than stock FSDP2.
Test: test_planner.py, a codec must pay twice over."""


def agree_on_conditions(
    param_groups: Sequence[FSDPParamGroup],
    shapes: Sequence[GroupShape],
    policy: CieraPolicy,
    process_group: dist.ProcessGroup,
    backend: Backend,
    spent_bytes: int,
) -> tuple[Conditions, int | None]:
    """The conditions of a plan for these parameter groups, and the policy's whole budget in bytes. The budget in the conditions
    is what `spent_bytes` leave of it.

    Collective over `process_group`, which holds all their ranks, and, where links are measured, over the process groups that
    the parameter groups are gathered over. All ranks get the same result.
    """
    links = _links(param_groups, policy, backend) if len(policy.codecs) > 1 else None
    costs = _codec_costs(policy, shapes, backend)
    free_bytes = free_memory_bytes(backend.device) if policy.is_share_of_memory else 0
    own_numbers = [
        number for spans in links or () for link in spans for number in (link.latency_seconds, -link.bytes_per_second)
    ]
    for cost in costs.values():
        for stage in (cost.hash, cost.cmp, cost.decmp):
            own_numbers += [stage.fixed, stage.per_value, stage.per_changed, stage.per_gather]
    agreed = iter(agree_on_largest([*own_numbers, -float(free_bytes), float(spent_bytes)], process_group))
    if links is not None:
        links = [[Link(next(agreed), -next(agreed)) for _ in spans] for spans in links]
    costs = {codec: CodecCost(hash=_stage(agreed), cmp=_stage(agreed), decmp=_stage(agreed)) for codec in costs}
    budget_bytes = policy.cache_budget_bytes(int(-next(agreed)))
    left_bytes = left_of(budget_bytes, int(next(agreed)))
    return Conditions(links=links, costs=costs, budget_bytes=left_bytes), budget_bytes


def left_of(budget_bytes: int | None, spent_bytes: int) -> int | None:
    """Bytes of a budget that are left; never below 0. `None`: no limit."""
    return None if budget_bytes is None else max(0, budget_bytes - spent_bytes)


def _stage(agreed: Iterator[float]) -> StageCost:
    return StageCost(fixed=next(agreed), per_value=next(agreed), per_changed=next(agreed), per_gather=next(agreed))


def _links(param_groups: Sequence[FSDPParamGroup], policy: CieraPolicy, backend: Backend) -> list[list[Link]]:
    """Links by parameter group and span. Each process group is measured once, in the order of `param_groups`, which is the same
    on all ranks."""
    measured: dict[str, Link] = {}
    links_of_param_groups = []
    for param_group in param_groups:
        links = []
        for process_group, _ in gather_groups(param_group):
            if process_group.size() == 1:
                continue
            if isinstance(policy.link, Link):
                links.append(policy.link)
                continue
            if process_group.group_name not in measured:
                cut = cut_of(dist.get_process_group_ranks(process_group), policy)
                exchanging = process_group if cut.is_flat else node_groups_of(process_group, cut).between_nodes
                measured[process_group.group_name] = measure_link(exchanging, backend)
            links.append(measured[process_group.group_name])
        links_of_param_groups.append(links)
    return links_of_param_groups


def _codec_costs(policy: CieraPolicy, shapes: Sequence[GroupShape], backend: Backend) -> dict[str, CodecCost]:
    """Costs by codec, in the order of `policy.codecs`: the policy's, or measured for the dtype of most gathered bytes."""
    if len(policy.codecs) == 1:
        return {}
    codecs = [codec for codec in policy.codecs if codec != "raw"]
    if policy.codec_costs is not None:
        return {codec: policy.codec_costs[codec] for codec in codecs}
    gathered_bytes = {dtype: sum(shape.shard_bytes for shape in shapes if shape.dtype == dtype) for dtype in FORMATS}
    dtype = max(gathered_bytes, key=lambda dtype: gathered_bytes[dtype])
    costs = measure_costs(codecs, dtype, policy.block_size, backend)
    if policy.selection == "greedy":  # as published
        return costs
    return {codec: cost.scaled(COST_IN_A_STEP) for codec, cost in costs.items()}
