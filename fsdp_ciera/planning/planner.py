"""Planning live groups: all ranks agree on what they know, rank 0 decides, all hear of it; and again while training runs.

plan_for     at the first gather under a root: cohorts of groups, each planned over the process group that holds its ranks
Cohort       the plan that is in force, and when to renew it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.console import Console

from fsdp_ciera._compat import (
    all_gather_bytes,
    gather_dtype,
    gather_groups,
    get_comm,
    param_names_and_sizes,
    sibling_groups,
)
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.gather.handshake import check_same
from fsdp_ciera.gather.presence import wait_for_peers
from fsdp_ciera.gather.stream import common_fields
from fsdp_ciera.gather.topology import check_node_size, ranks_per_node_of
from fsdp_ciera.planning.choose import make_plan
from fsdp_ciera.planning.conditions import agree_on_conditions, left_of
from fsdp_ciera.planning.plan import Conditions, Plan
from fsdp_ciera.planning.probe import Probe
from fsdp_ciera.planning.shapes import GroupShape, shape_of
from fsdp_ciera.policies.tables import DEFAULT_TABLE, Table, load_table

if TYPE_CHECKING:
    from fsdp_ciera.gather.collective import CieraAllGather

_WIDTH = 120
"""Of the plan's table, where it does not go to a terminal."""


class Cohort:
    """Groups under one FSDP root that are planned together: with equal policies, all their ranks in one process group.

    [Note: One process group decides] Groups may be gathered over different process groups (experts on a mesh of their own).
    The largest one decides for all groups whose ranks it holds; what is left over forms cohorts of its own, with what is
    left of the budget. Test: test_planner.py, experts on a mesh of their own.

    [Note: Steps are counted in headers] Nobody tells a gather that the optimizer has run, and a rank may fail where others go
    on. So every header says how often its rank has seen its own shard change, and the largest such count among the groups of
    this process group is the number of steps: a function of headers, and so the same on all ranks. A plan that is due is
    renewed at the next forward gather over the whole process group, behind its payloads and whether or not they were decoded.
    Test: test_planner.py, adaptive; a rank that fails.
    """

    def __init__(self, comms: Sequence[CieraAllGather], group: dist.ProcessGroup | None) -> None:
        self.comms = list(comms)
        self.policy = comms[0].policy
        self.group = group
        self.plan: Plan | None = None
        self._table: Table | None = None  # on the rank that plans
        self._shapes: dict[int, GroupShape] = {}
        self._probes: dict[int, Probe] = {}
        self._steps: dict[int, int] = {}
        self._due_step = self.policy.warmup_steps + (self.policy.adapt_every or 0)
        self._conditions = Conditions()
        self._budget_bytes: int | None = None

    @property
    def step(self) -> int:
        """Optimizer steps since the first gather. See [Note: Steps are counted in headers]."""
        return max(self._steps.values(), default=0)

    def decide(self, spent_bytes: int) -> None:
        """Makes the first plan, when `spent_bytes` of the budget are gone already. Collective over the process group.

        Raises `CieraMismatchError` on all ranks when they do not plan the same, `CieraPolicyError` on all when rank 0
        cannot (no such table) or nobody says how large a node is.
        """
        if self.group is not None:
            _check_same_plan(self, self.group)
        check_node_size(self.policy)
        self._shapes = {id(comm): shape_of(comm.param_group, self.policy) for comm in self.comms}
        shapes = list(self._shapes.values())
        self._conditions, self._budget_bytes = agree_on_conditions(
            self.comms, shapes, self.policy, self.group, spent_bytes
        )
        self._adopt(self._from_first_rank(self._conditions))

    def cost_bytes(self, comm: CieraAllGather) -> int:
        """The share of the budget that a group has in the plan that is in force."""
        if comm.planned_codecs is None or id(comm) not in self._shapes:
            return 0
        shape = self._shapes[id(comm)]
        caches = sum(
            shape.cost_bytes(codec, size, self.policy.block_size)
            for codec, size in zip(comm.planned_codecs, shape.sizes, strict=True)
        )
        return caches + (shape.held_output_bytes(comm.planned_codecs) if self._has_room_for_outputs else 0)

    def decodes_in_place(self, comm: CieraAllGather) -> bool:
        """Whether a group's output is held between gathers. See [Note: The output is the cache]."""
        return self._held_output_bytes(comm) > 0 and self._has_room_for_outputs

    @property
    def _has_room_for_outputs(self) -> bool:
        assert self.plan is not None
        return self.plan.has_room_for(sum(map(self._held_output_bytes, self.comms)))

    def _held_output_bytes(self, comm: CieraAllGather) -> int:
        return self._shapes[id(comm)].held_output_bytes(comm.planned_codecs or ())

    def note_gather(
        self, comm: CieraAllGather, group: dist.ProcessGroup, step: int, is_forward: bool, local: torch.Tensor
    ) -> None:
        """`comm` has gathered over `group`, whose headers count `step` changes; `local` [num_values] is this rank's shard.

        Keeps and measures shards when a new plan is due, and makes it: then collective over the process group.
        """
        if self.policy.adapt_every is None or self.group is None:
            return
        is_whole = group.size() == self.group.size()
        if is_whole:
            self._steps[id(comm)] = step
        if self.step >= self._due_step - 1:
            self._probe_of(comm).look_at(local, step)
        if is_whole and is_forward and self.step > self._due_step:
            self._renew()

    def _renew(self) -> None:
        assert self.plan is not None and self.group is not None
        before = {id(comm): codecs for comm, codecs in zip(self.comms, self.plan.codecs, strict=True)}
        self.comms = [comm for comm in self.comms if get_comm(comm.param_group) is comm]  # the others were detached
        self._shapes = {id(comm): self._shapes[id(comm)] for comm in self.comms}
        found = [self._probe_of(comm).take() for comm in self.comms]
        spent_bytes = _spent_bytes(self.comms[0], but_for=self)
        flat = np.concatenate([*(table.reshape(-1) for table in found), [spent_bytes]]).astype("<f8")
        everyones = all_gather_bytes(torch.from_numpy(flat.view(np.uint8)), self.group).numpy().view("<f8")
        measured: list[npt.NDArray[np.float64]] = []
        start = 0
        for table in found:
            stretch = everyones[:, start : start + table.size]
            measured.append(stretch.reshape(len(everyones), *table.shape).astype(np.float64))
            start += table.size
        links = self._conditions.links
        if links is not None:
            by_comm = dict(zip(before, links, strict=True))
            links = [by_comm[id(comm)] for comm in self.comms]
        self._conditions = replace(
            self._conditions, links=links, budget_bytes=left_of(self._budget_bytes, int(everyones[:, -1].max()))
        )
        self._due_step += self.policy.adapt_every or 0
        current = [before[id(comm)] for comm in self.comms]
        self._adopt(self._from_first_rank(replace(self._conditions, measured=measured, current=current)))

    def _probe_of(self, comm: CieraAllGather) -> Probe:
        if id(comm) not in self._probes:
            self._probes[id(comm)] = Probe(self._shapes[id(comm)], self.policy.codecs, self.policy.block_size)
        return self._probes[id(comm)]

    def _adopt(self, plan: Plan) -> None:
        before, self.plan = self.plan, plan
        for comm, codecs in zip(self.comms, plan.codecs, strict=True):
            comm.adopt(codecs)
        is_news = before is None or before.codecs != plan.codecs
        if len(self.policy.codecs) > 1 and is_news and self.group is not None and dist.get_rank() == 0:
            console = Console(file=sys.stderr)
            if not console.is_terminal:
                console = Console(file=sys.stderr, width=_WIDTH)
            console.print(plan.summary(f"fsdp_ciera: the plan from optimizer step {plan.step + 1} on"))

    def _from_first_rank(self, conditions: Conditions) -> Plan:
        """The plan as rank 0 of the process group makes it: tables are read there, and only there, and only once."""
        box: list[Any] = [None]
        if self.group is None or self.group.rank() == 0:
            try:
                if self._table is None:
                    self._table = load_table(self.policy.tables or DEFAULT_TABLE)
                shapes = list(self._shapes.values())
                plan = make_plan(shapes, self.policy, replace(conditions, table=self._table))
                box = [replace(plan, step=self.step)]
            except Exception as error:  # the others must hear of it, or they would wait for ever
                box = [error]
        if self.group is not None:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        if isinstance(box[0], CieraPolicyError):
            raise CieraPolicyError(str(box[0]))
        if isinstance(box[0], Exception):
            raise box[0]
        made: Plan = box[0]
        return made


def plan_for(first: CieraAllGather, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Plans all groups under the root of `first` that carry an equal policy and have no plan yet: they share a `cache_budget`.

    Waits a little for the peers in the process group `group` (gather.presence). A group that is planned keeps its share of
    the budget. Collective over the process groups of the cohorts, in their order.
    """
    module, _, _ = param_names_and_sizes(first.param_group, dtype)
    wait_for_peers(group, module)
    while fresh := [comm for comm in _siblings(first) if comm.cohort is None]:
        process_group, members = _next_members(fresh)
        cohort = Cohort(members, process_group)
        cohort.decide(_spent_bytes(first))
        for comm in members:
            comm.cohort = cohort


def _siblings(comm: CieraAllGather) -> list[CieraAllGather]:
    """The groups under the same root that share a budget with `comm`."""
    found = [get_comm(group) for group in sibling_groups(comm.param_group)]
    return [other for other in found if isinstance(other, type(comm)) and other.policy == comm.policy]


def _spent_bytes(comm: CieraAllGather, but_for: Cohort | None = None) -> int:
    """What the cohorts under the same root have of the budget, on this rank."""
    cohorts = [(other, other.cohort) for other in _siblings(comm)]
    return sum(cohort.cost_bytes(other) for other, cohort in cohorts if cohort is not None and cohort is not but_for)


def _next_members(comms: Sequence[CieraAllGather]) -> tuple[dist.ProcessGroup | None, list[CieraAllGather]]:
    """See [Note: One process group decides]."""
    found = {id(comm): [pg for pg, _ in gather_groups(comm.param_group)] for comm in comms}
    largest = max((pgs[0] for pgs in found.values() if pgs), key=lambda pg: pg.size(), default=None)
    if largest is None:
        return None, list(comms)
    ranks = set(dist.get_process_group_ranks(largest))
    inside = [comm for comm in comms if all(ranks >= set(dist.get_process_group_ranks(pg)) for pg in found[id(comm)])]
    return largest, inside


def _check_same_plan(cohort: Cohort, group: dist.ProcessGroup) -> None:
    """All ranks must plan the same groups under the same policy, and cut them into the same nodes: what they measure and
    exchange next depends on it."""
    modules = []
    for comm in cohort.comms:
        module, names, sizes = param_names_and_sizes(comm.param_group, gather_dtype(comm.param_group))
        modules.append(f"{module}: {len(names)} parameters, {sum(sizes)} values")
    fields = common_fields(modules[0].partition(":")[0], cohort.policy)
    if cohort.policy.topology != "flat":
        fields["ranks per node"] = ranks_per_node_of(cohort.policy)
    check_same({**fields, "groups": modules}, group)
