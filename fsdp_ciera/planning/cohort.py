"""`Cohort`: parameter groups that are planned together. All ranks agree on the conditions, rank 0 makes the plan, and all ranks
receive it. The same happens again when a plan is renewed during training.
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
    """A parameter group with a policy: the part of `fsdp_ciera.gather.collective.CieraAllGather` that planning needs."""

    param_group: FSDPParamGroup
    policy: CieraPolicy
    planned_codecs: tuple[str, ...] | None

    def adopt(self, codecs: tuple[str, ...]) -> None: ...


class Cohort:
    """Parameter groups under one FSDP root that are planned together: its members. They have equal policies, and one process
    group holds all their ranks.

    [Note: The first process group decides] Planning is collective, so only those ranks can take part that are there: the ranks
    of the process group whose gather came first. The parameter groups that are gathered over it are planned then, and with them
    those over a part of its ranks (experts on a mesh of their own), if all ranks hold the same ones. A later gather plans the
    others, with the rest of the budget. Test: test_planner.py, experts on a mesh of their own; test_faults.py, towers.

    [Note: Steps are counted at agreements] Nobody tells a gather that the optimizer has run, and a rank may fail where others
    go on. So ranks say at every agreement how often they have seen a shard change, and the largest such count is the number
    of steps: the same on all ranks. A plan that is due is renewed right after an agreement of the cohort's own process group.
    Test: test_planner.py, adaptive; a rank that fails.
    """

    def __init__(self, members: Sequence[PlannedGroup], process_group: dist.ProcessGroup, backend: Backend) -> None:
        self.members = list(members)
        self.policy = members[0].policy
        self.process_group = process_group
        self.backend = backend
        self.plan: Plan | None = None
        self.placed_policy = self.policy
        """The policy with the topology and the node size that all ranks agree on; see `_place`."""
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
        """Makes the first plan. `spent_bytes` of the budget are gone already. Collective over the process group.

        Raises on all ranks together: `CieraMismatchError` if the ranks do not plan the same, and `CieraPolicyError` if rank 0
        cannot plan (no such table) or if the node size is not known.
        """
        meet(describe_members(self.members, self.policy, self.backend), self.process_group)
        self._place()
        self._shapes = {id(member): shape_of(member.param_group, self.placed_policy) for member in self.members}
        self._conditions, self._budget_bytes = agree_on_conditions(
            [member.param_group for member in self.members], list(self._shapes.values()), self.placed_policy,
            self.process_group, self.backend, spent_bytes,
        )  # fmt: skip
        missing = [codec for codec in self.policy.codecs if not self.backend.supports(codec, torch.bfloat16)]
        missing = [codec for codec in missing if codec != "raw"]
        self._conditions = replace(self._conditions, missing_codecs=frozenset(missing))
        if missing and not isinstance(self.backend, PlainBackend):
            device_type = self.backend.device.type
            self.notes.append(
                f"{' and '.join(missing)} cannot run on {device_type} yet: what has that codec alone goes raw"
            )
        self._adopt(self._from_first_rank(self._conditions))

    def _place(self) -> None:
        """Sets `placed_policy`. Nodes cut process groups only if all ranks know the same node size. If they do not,
        `topology="auto"` means flat, and "hierarchical" raises `CieraPolicyError`. Collective over the process group."""
        if self.policy.topology == "flat":
            return
        ranks_per_node = ranks_per_node_of(self.policy) or 0
        agreed = agree_on_largest([float(ranks_per_node), -float(ranks_per_node)], self.process_group)
        largest, smallest = agreed[0], -agreed[1]
        if largest == smallest > 0:
            self.placed_policy = replace(self.policy, ranks_per_node=ranks_per_node)
            return
        if self.policy.topology == "hierarchical":
            if largest == 0:
                check_node_size(self.policy)
            raise CieraPolicyError(
                'topology="hierarchical" needs the same number of ranks on every node, but LOCAL_WORLD_SIZE is '
                f"{smallest:g} to {largest:g} (0: not set) on the ranks: give CieraPolicy(ranks_per_node=...)"
            )
        self.placed_policy = replace(self.policy, topology="flat", ranks_per_node=None)
        if largest:
            self.notes.append(
                f"the ranks say that nodes have {smallest:g} to {largest:g} ranks (0: not said), so gathers are flat"
            )

    # what the plan costs

    def cost_bytes(self, member: PlannedGroup) -> int:
        """Bytes of the budget that a member takes under the plan in force."""
        if member.planned_codecs is None or id(member) not in self._shapes:
            return 0
        shape = self._shapes[id(member)]
        cache_bytes = sum(
            shape.cost_bytes(codec, size, self.policy.block_size)
            for codec, size in zip(member.planned_codecs, shape.sizes, strict=True)
        )
        return cache_bytes + (shape.held_output_bytes(member.planned_codecs) if self._has_room_for_outputs else 0)

    def decodes_in_place(self, member: PlannedGroup) -> bool:
        """Whether a member's output may stay between gathers. See [Note: The output is the cache] in codecs/value_delta.py."""
        return self._held_output_bytes(member) == 0 or self._has_room_for_outputs

    @property
    def _has_room_for_outputs(self) -> bool:
        assert self.plan is not None
        return self.plan.has_room_for(sum(map(self._held_output_bytes, self.members)))

    def _held_output_bytes(self, member: PlannedGroup) -> int:
        return self._shapes[id(member)].held_output_bytes(member.planned_codecs or ())

    # renewal

    def note_step(self, step: int, shard_of: Callable[[PlannedGroup], torch.Tensor | None]) -> None:
        """Takes note that the weights have changed `step` times, as the agreement of the process group says. Keeps and measures
        shards when a new plan is due; `shard_of` returns what a member would gather now, [num_values], or `None`."""
        if self.policy.adapt_every is None:
            return
        self.step = max(self.step, step)
        if self.step < self._due_step - 1:
            return
        for member in self.members:
            probe = self._probe_of(member)
            if probe.wants(self.step):
                values = shard_of(member)
                if values is not None:
                    probe.look_at(values, self.step)

    @property
    def is_due(self) -> bool:
        """Whether the plan must be renewed now; the same on all ranks."""
        return self.policy.adapt_every is not None and self.step > self._due_step

    def renew(self, members: Sequence[PlannedGroup], spent_bytes: int) -> None:
        """Makes a new plan for `members`, those that are left. Other cohorts take `spent_bytes` of the budget. Collective over
        the process group."""
        assert self.plan is not None
        old_codecs = {id(member): codecs for member, codecs in zip(self.members, self.plan.codecs, strict=True)}
        self.members = list(members)
        self._shapes = {id(member): self._shapes[id(member)] for member in self.members}
        own_tables = [self._probe_of(member).take() for member in self.members]
        own_row = np.concatenate([*(table.reshape(-1) for table in own_tables), [spent_bytes]]).astype("<f8")
        rows = all_gather_bytes(torch.from_numpy(own_row.view(np.uint8)), self.process_group).numpy().view("<f8")
        measured: list[npt.NDArray[np.float64]] = []
        start = 0
        for table in own_tables:
            columns = rows[:, start : start + table.size]
            measured.append(columns.reshape(len(rows), *table.shape).astype(np.float64))
            start += table.size
        links = self._conditions.links
        if links is not None:
            links_of_members = dict(zip(old_codecs, links, strict=True))
            links = [links_of_members[id(member)] for member in self.members]
        self._conditions = replace(
            self._conditions, links=links, budget_bytes=left_of(self._budget_bytes, int(rows[:, -1].max()))
        )
        self._due_step += self.policy.adapt_every or 0
        current = [old_codecs[id(member)] for member in self.members]
        self._adopt(self._from_first_rank(replace(self._conditions, measured=measured, current=current)))

    def _probe_of(self, member: PlannedGroup) -> Probe:
        if id(member) not in self._probes:
            shape = self._shapes[id(member)]
            self._probes[id(member)] = Probe(shape, self.policy.codecs, self.policy.block_size, self.backend)
        return self._probes[id(member)]

    def _adopt(self, plan: Plan) -> None:
        old_plan, self.plan = self.plan, plan
        for member, codecs in zip(self.members, plan.codecs, strict=True):
            member.adopt(codecs)
        has_changed = old_plan is None or old_plan.codecs != plan.codecs
        if len(self.policy.codecs) > 1 and has_changed and dist.get_rank() == 0:
            _LOGGER.info("%s", plan.describe(f"the plan from optimizer step {plan.step + 1} on"))

    def _from_first_rank(self, conditions: Conditions) -> Plan:
        """The plan that rank 0 of the process group makes. Only rank 0 reads tables, and only once. Raises on all ranks what
        making the plan raises on rank 0. Collective over the process group."""
        message = b""
        if self.process_group.rank() == 0:
            outcome: Plan | Exception
            try:
                if self._table is None:
                    self._table = load_table(self.policy.tables or DEFAULT_TABLE)
                shapes = list(self._shapes.values())
                plan = make_plan(shapes, self.placed_policy, replace(conditions, table=self._table))
                outcome = replace(plan, step=self.step)
            except Exception as error:  # the other ranks must get it, or they would wait for ever
                outcome = error
            message = pickle.dumps(outcome)
        received = pickle.loads(broadcast_bytes(message, self.process_group))
        if isinstance(received, Exception):
            raise received
        assert isinstance(received, Plan)
        return received


def next_groups(
    fresh: Sequence[PlannedGroup], process_group: dist.ProcessGroup, backend: Backend
) -> list[PlannedGroup]:
    """The members of the next cohort: those of `fresh`, which have no plan, that `process_group` plans now. Collective over it.
    See [Note: The first process group decides]."""
    ranks = set(dist.get_process_group_ranks(process_group))
    over_all_ranks, over_some_ranks = [], []
    for candidate in fresh:
        rank_sets = [
            set(dist.get_process_group_ranks(spanned_process_group))
            for spanned_process_group, _ in gather_groups(candidate.param_group)
            if spanned_process_group.size() > 1
        ]
        if rank_sets and rank_sets[0] == ranks:
            over_all_ranks.append(candidate)
        elif rank_sets and all(rank_set < ranks for rank_set in rank_sets):
            over_some_ranks.append(candidate)
    fingerprint = 0
    if over_some_ranks:
        fingerprint = fingerprint_of(describe_members(over_some_ranks, fresh[0].policy, backend))
    own_bytes = torch.from_numpy(np.array([fingerprint], "<i8").view(np.uint8))
    fingerprints = all_gather_bytes(own_bytes, process_group).numpy().view("<i8")
    is_same = len(set(fingerprints.reshape(-1).tolist())) == 1
    chosen_ids = {id(candidate) for candidate in (*over_all_ranks, *(over_some_ranks if is_same else ()))}
    return [candidate for candidate in fresh if id(candidate) in chosen_ids]


def describe_members(members: Sequence[PlannedGroup], policy: CieraPolicy, backend: Backend) -> dict[str, Any]:
    """The facts that must be equal on all ranks that plan together: what they measure and exchange next depends on them."""
    modules = []
    for member in members:
        module, names, sizes = param_names_and_sizes(member.param_group, gather_dtype(member.param_group))
        modules.append(f"{module}: {len(names)} parameters, {sum(sizes)} values")
    return {**common_fields(modules[0].partition(":")[0], policy), "kernels": backend.name, "groups": modules}
