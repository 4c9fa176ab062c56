"""`Cohort`: groups that are planned together. All ranks agree on what they know, rank 0 decides, all hear of it; and again
while training runs.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fsdp_ciera._compat import (
    FSDPParamGroup,
    all_gather_bytes,
    broadcast_bytes,
    gather_dtype,
    gather_groups,
    param_names_and_sizes,
)
from fsdp_ciera.backends import Backend, PlainBackend
from fsdp_ciera.errors import CieraPolicyError
from fsdp_ciera.gather.agreement import meet
from fsdp_ciera.gather.channel import common_fields, fingerprint_of
from fsdp_ciera.gather.topology import check_node_size, ranks_per_node_of
from fsdp_ciera.planning.choose import make_plan
from fsdp_ciera.planning.conditions import agree_on_conditions, left_of
from fsdp_ciera.planning.measure import agree_on_largest
from fsdp_ciera.planning.plan import Conditions, Plan
from fsdp_ciera.planning.probe import Probe
from fsdp_ciera.planning.shapes import GroupShape, shape_of
from fsdp_ciera.policies.tables import DEFAULT_TABLE, Table, load_table
from fsdp_ciera.policy import CieraPolicy

_LOGGER = logging.getLogger("fsdp_ciera")


class PlannedGroup(Protocol):
    """A parameter group with a policy, as far as plans go: `fsdp_ciera.gather.collective.CieraAllGather`."""

    param_group: FSDPParamGroup
    policy: CieraPolicy
    planned_codecs: tuple[str, ...] | None

    def adopt(self, codecs: tuple[str, ...]) -> None: ...


class Cohort:
    """Groups under one FSDP root that are planned together: with equal policies, all their ranks in one process group.

    [Note: The first process group decides] Planning is collective, so it may take only those ranks that are there: those of the
    process group whose gather came first. Its groups are planned then, and with them the groups over a part of its ranks
    (experts on a mesh of their own), if all ranks hold the same ones. What is left over is planned by a later gather, with
    what is left of the budget. Test: test_planner.py, experts on a mesh of their own; test_faults.py, towers.

    [Note: Steps are counted at agreements] Nobody tells a gather that the optimizer has run, and a rank may fail where others
    go on. So ranks say at every agreement how often they have seen a shard change, and the largest such count is the number
    of steps: the same on all ranks. A plan that is due is renewed right after an agreement of the cohort's own process group.
    Test: test_planner.py, adaptive; a rank that fails.
    """

    def __init__(self, groups: Sequence[PlannedGroup], process_group: dist.ProcessGroup, backend: Backend) -> None:
        self.groups = list(groups)
        self.policy = groups[0].policy
        self.process_group = process_group
        self.backend = backend
        self.plan: Plan | None = None
        self.placed_policy = self.policy
        """The policy with what all ranks know of nodes; see `_place`."""
        self.step = 0
        """Optimizer steps since the first gather. See [Note: Steps are counted at agreements]."""
        self.notes: list[str] = []
        self._table: Table | None = None  # on the rank that plans
        self._shapes: dict[int, GroupShape] = {}
        self._probes: dict[int, Probe] = {}
        self._due_step = self.policy.warmup_steps + (self.policy.adapt_every or 0)
        self._conditions = Conditions()
        self._budget_bytes: int | None = None

    def decide(self, spent_bytes: int) -> None:
        """Makes the first plan, when `spent_bytes` of the budget are gone already. Collective over the process group.

        Raises, on all ranks together, `CieraMismatchError` when they do not plan the same, and `CieraPolicyError` when rank 0
        cannot (no such table) or nobody says how large a node is.
        """
        meet(describe_groups(self.groups, self.policy, self.backend), self.process_group)
        self._place()
        self._shapes = {id(group): shape_of(group.param_group, self.placed_policy) for group in self.groups}
        self._conditions, self._budget_bytes = agree_on_conditions(
            [group.param_group for group in self.groups], list(self._shapes.values()), self.placed_policy,
            self.process_group, self.backend, spent_bytes,
        )  # fmt: skip
        missing = [codec for codec in self.policy.codecs if not self.backend.supports(codec, torch.bfloat16)]
        missing = [codec for codec in missing if codec != "raw"]
        self._conditions = replace(self._conditions, missing_codecs=frozenset(missing))
        if missing and not isinstance(self.backend, PlainBackend):
            name = self.backend.device.type
            self.notes.append(f"{' and '.join(missing)} cannot run on {name} yet: what has that codec alone goes raw")
        self._adopt(self._from_first_rank(self._conditions))

    def _place(self) -> None:
        """Nodes cut process groups only where all ranks say the same of them: with an unequal or unknown number of ranks a
        node, `topology="auto"` means flat, and "hierarchical" is an error."""
        if self.policy.topology == "flat":
            return
        size = ranks_per_node_of(self.policy) or 0
        most, least = agree_on_largest([float(size), -float(size)], self.process_group)
        is_known = most == -least > 0
        if is_known:
            self.placed_policy = replace(self.policy, ranks_per_node=size)
            return
        if self.policy.topology == "hierarchical":
            if most == 0:
                check_node_size(self.policy)
            raise CieraPolicyError(
                f'topology="hierarchical" needs the same number of ranks on every node, but LOCAL_WORLD_SIZE is {-least:g} to '
                f"{most:g} (0: not set) on the ranks: give CieraPolicy(ranks_per_node=...)"
            )
        self.placed_policy = replace(self.policy, topology="flat", ranks_per_node=None)
        if most:
            self.notes.append(
                f"the ranks say that nodes have {-least:g} to {most:g} ranks (0: not said), so gathers are flat"
            )

    # what the plan costs

    def cost_bytes(self, group: PlannedGroup) -> int:
        """The share of the budget that a group has in the plan that is in force."""
        if group.planned_codecs is None or id(group) not in self._shapes:
            return 0
        shape = self._shapes[id(group)]
        caches = sum(
            shape.cost_bytes(codec, size, self.policy.block_size)
            for codec, size in zip(group.planned_codecs, shape.sizes, strict=True)
        )
        return caches + (shape.held_output_bytes(group.planned_codecs) if self._has_room_for_outputs else 0)

    def decodes_in_place(self, group: PlannedGroup) -> bool:
        """Whether a group's output is held between gathers. See [Note: The output is the cache] in codecs/value_delta.py."""
        return self._held_output_bytes(group) == 0 or self._has_room_for_outputs

    @property
    def _has_room_for_outputs(self) -> bool:
        assert self.plan is not None
        return self.plan.has_room_for(sum(map(self._held_output_bytes, self.groups)))

    def _held_output_bytes(self, group: PlannedGroup) -> int:
        return self._shapes[id(group)].held_output_bytes(group.planned_codecs or ())

    # renewal

    def note_step(self, step: int, shard_of: Callable[[PlannedGroup], torch.Tensor | None]) -> None:
        """The agreement of the process group says that the weights have changed `step` times. Keeps and measures shards when a
        new plan is due; `shard_of` gives what a group would gather now, [num_values]."""
        if self.policy.adapt_every is None:
            return
        self.step = max(self.step, step)
        if self.step < self._due_step - 1:
            return
        for group in self.groups:
            probe = self._probe_of(group)
            if probe.wants(self.step):
                values = shard_of(group)
                if values is not None:
                    probe.look_at(values, self.step)

    @property
    def is_due(self) -> bool:
        """Whether the plan must be renewed: the same on all ranks."""
        return self.policy.adapt_every is not None and self.step > self._due_step

    def renew(self, groups: Sequence[PlannedGroup], spent_bytes: int) -> None:
        """Makes a new plan for those of its groups that are left, when other cohorts have `spent_bytes` of the budget.
        Collective over the process group."""
        assert self.plan is not None
        before = {id(group): codecs for group, codecs in zip(self.groups, self.plan.codecs, strict=True)}
        self.groups = list(groups)
        self._shapes = {id(group): self._shapes[id(group)] for group in self.groups}
        found = [self._probe_of(group).take() for group in self.groups]
        flat = np.concatenate([*(table.reshape(-1) for table in found), [spent_bytes]]).astype("<f8")
        everyones = all_gather_bytes(torch.from_numpy(flat.view(np.uint8)), self.process_group).numpy().view("<f8")
        measured: list[npt.NDArray[np.float64]] = []
        start = 0
        for table in found:
            stretch = everyones[:, start : start + table.size]
            measured.append(stretch.reshape(len(everyones), *table.shape).astype(np.float64))
            start += table.size
        links = self._conditions.links
        if links is not None:
            by_group = dict(zip(before, links, strict=True))
            links = [by_group[id(group)] for group in self.groups]
        self._conditions = replace(
            self._conditions, links=links, budget_bytes=left_of(self._budget_bytes, int(everyones[:, -1].max()))
        )
        self._due_step += self.policy.adapt_every or 0
        current = [before[id(group)] for group in self.groups]
        self._adopt(self._from_first_rank(replace(self._conditions, measured=measured, current=current)))

    def _probe_of(self, group: PlannedGroup) -> Probe:
        if id(group) not in self._probes:
            shape = self._shapes[id(group)]
            self._probes[id(group)] = Probe(shape, self.policy.codecs, self.policy.block_size, self.backend)
        return self._probes[id(group)]

    def _adopt(self, plan: Plan) -> None:
        before, self.plan = self.plan, plan
        for group, codecs in zip(self.groups, plan.codecs, strict=True):
            group.adopt(codecs)
        is_news = before is None or before.codecs != plan.codecs
        if len(self.policy.codecs) > 1 and is_news and dist.get_rank() == 0:
            _LOGGER.info("%s", plan.describe(f"the plan from optimizer step {plan.step + 1} on"))

    def _from_first_rank(self, conditions: Conditions) -> Plan:
        """The plan as rank 0 of the process group makes it: tables are read there, and only there, and only once."""
        told = b""
        if self.process_group.rank() == 0:
            decided: Plan | Exception
            try:
                if self._table is None:
                    self._table = load_table(self.policy.tables or DEFAULT_TABLE)
                shapes = list(self._shapes.values())
                plan = make_plan(shapes, self.placed_policy, replace(conditions, table=self._table))
                decided = replace(plan, step=self.step)
            except Exception as error:  # the others must hear of it, or they would wait for ever
                decided = error
            told = pickle.dumps(decided)
        heard = pickle.loads(broadcast_bytes(told, self.process_group))
        if isinstance(heard, Exception):
            raise heard
        assert isinstance(heard, Plan)
        return heard


def next_groups(
    fresh: Sequence[PlannedGroup], process_group: dist.ProcessGroup, backend: Backend
) -> list[PlannedGroup]:
    """Those of the groups without a plan that `process_group` plans now. Collective over it. See [Note: The first process group
    decides]."""
    ranks = set(dist.get_process_group_ranks(process_group))
    whole, parts = [], []
    for group in fresh:
        spanned = [set(dist.get_process_group_ranks(pg)) for pg, _ in gather_groups(group.param_group) if pg.size() > 1]
        if spanned and spanned[0] == ranks:
            whole.append(group)
        elif spanned and all(span < ranks for span in spanned):
            parts.append(group)
    mine = fingerprint_of(describe_groups(parts, fresh[0].policy, backend)) if parts else 0
    told = all_gather_bytes(torch.from_numpy(np.array([mine], "<i8").view(np.uint8)), process_group)
    is_same = len(set(told.numpy().view("<i8").reshape(-1).tolist())) == 1
    chosen = {id(group) for group in (*whole, *(parts if is_same else ()))}
    return [group for group in fresh if id(group) in chosen]


def describe_groups(groups: Sequence[PlannedGroup], policy: CieraPolicy, backend: Backend) -> dict[str, Any]:
    """What ranks must have in common that plan together: what they measure and exchange next depends on it."""
    modules = []
    for group in groups:
        module, names, sizes = param_names_and_sizes(group.param_group, gather_dtype(group.param_group))
        modules.append(f"{module}: {len(names)} parameters, {sum(sizes)} values")
    return {**common_fields(modules[0].partition(":")[0], policy), "kernels": backend.name, "groups": modules}
