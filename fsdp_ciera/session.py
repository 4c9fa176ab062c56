"""`Session`: one FSDP root with one policy. It owns the plan and the channels, and knows when to plan, to agree and to renew.

    the first gather over a process group      plan its groups (planning/cohort.py), if they have no plan
    the first gather of a pass over it         agree on all its channels at once (gather/agreement.py); renew the plan, if due
    every other gather                         nothing: what was agreed on holds until the next pass

A *pass* is a forward of the root (or of a part of the model that is called alone) with its backward. Where the root has
parameters of its own, its gather is the first one: the session agrees when the root's forward begins.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_ciera._compat import (
    gather_dtype,
    gather_groups,
    gather_input,
    gather_length,
    get_comm,
    is_in_pass,
    makes_own_inputs,
    next_process_group,
    param_names_and_sizes,
    sibling_groups,
    watch_passes,
)
from fsdp_ciera.backends import Backend, PlainBackend, backend_of
from fsdp_ciera.backends.cuda import DamageWatch
from fsdp_ciera.errors import CieraDesyncError
from fsdp_ciera.gather.agreement import ShardOf, agree, said_of_damage
from fsdp_ciera.gather.channel import Changes, Channel, describe
from fsdp_ciera.gather.collective import CieraAllGather
from fsdp_ciera.gather.layout import Layout, build_layout
from fsdp_ciera.gather.presence import wait_for_peers
from fsdp_ciera.gather.topology import cut_of, ranks_per_node_of
from fsdp_ciera.planning.cohort import Cohort, PlannedGroup, next_groups
from fsdp_ciera.planning.plan import Plan


class Session:
    """The groups under one FSDP root that carry equal policies, in the root's order.

    [Note: Agreements are among those who gather] An agreement is collective. It is made in a gather, over that gather's own
    process group: whoever is in it is in the agreement, whatever else the ranks do. Nothing is assumed of process groups that
    come later in the pass, of ranks that hold other modules, or of roots without parameters. Test: test_faults.py, towers; a
    root without parameters; other modules.

    [Note: Never slower] Where a policy that could have chosen a codec chose none, gathers run as in stock FSDP2, without
    agreements: all ranks have the same plan. Test: test_planner.py, a fast link.

    [Note: One state per channel] FSDP2 calls one collective for different process groups and lengths (with
    `reshard_after_forward=<int>` backward gathers over a smaller group), so state is kept per (process group, dtype, length).
    Test: test_bit_identity.py, reshard_after_forward=2.

    [Note: Gathers out of a pass] Users gather by `unshard()` between passes, after weights changed or not. Where the host may
    look they agree on their channel alone. On CUDA that would wait for the device, so the shards travel as they are, in their
    slots, and the next agreement goes on from there. Test: test_agreement.py, unshard between passes.
    """

    def __init__(self, first: CieraAllGather) -> None:
        self.policy = first.policy
        self.backend: Backend = backend_of(first.param_group.device)
        self.groups: list[CieraAllGather] = []
        self.cohorts: list[Cohort] = []
        self._cohort_of: dict[int, Cohort] = {}
        self._pass_number = 1
        self._agreed_pass: dict[str, int] = {}  # by name of the process group
        self._end_watch = watch_passes(first.param_group, self._begin_pass)
        self._notes: set[str] = set()
        self._watch = DamageWatch()
        """Of flags that the host may not read in a gather."""
        if not self.backend.checks_at_once:
            before_optimizer = weakref.WeakMethod(self._before_optimizer)
            hook = register_optimizer_step_pre_hook(lambda *_: (before_optimizer() or _nothing)())
            self._end_hook = weakref.finalize(self, hook.remove)  # a hook of all optimizers must not keep a model alive

    # who belongs to it

    @classmethod
    def of(cls, group: CieraAllGather) -> Session:
        """The session of a group, whose root must have run its first forward; made when it is first asked for."""
        if isinstance(group.session, Session):
            return group.session
        siblings = [get_comm(sibling) for sibling in sibling_groups(group.param_group)]
        equal = [s for s in siblings if isinstance(s, CieraAllGather) and s.policy == group.policy]
        known = [s.session for s in equal if isinstance(s.session, Session)]
        session = known[0] if known else cls(group)
        session.groups = [s for s in equal if s.session in (None, session)]  # the root's order
        for sibling in session.groups:
            sibling.session = session
        return session

    def remove(self, group: CieraAllGather) -> None:
        """The group gathers as stock FSDP2 from now on."""
        self.groups = [other for other in self.groups if other is not group]
        group.session = None
        if not self.groups:
            self._end_watch()
            if not self.backend.checks_at_once:
                self._end_hook()

    @property
    def plans(self) -> list[Plan]:
        """The plans in force."""
        in_force = {id(cohort): cohort for group, cohort in self._with_cohorts(self.groups)}
        return [cohort.plan for cohort in in_force.values() if cohort.plan is not None]

    def _with_cohorts(self, groups: Iterable[CieraAllGather]) -> list[tuple[CieraAllGather, Cohort]]:
        return [(group, self._cohort_of[id(group)]) for group in groups if id(group) in self._cohort_of]

    # what gathers ask

    def before_gather(
        self, group: CieraAllGather, process_group: dist.ProcessGroup, dtype: torch.dtype, num_values: int
    ) -> Channel | None:
        """The channel of the gather that comes now, with what is settled for it; `None` for a plain gather.

        May plan and agree: then collective over `process_group` (planning also over the process groups of other groups that it
        plans). Raises what these raise, on all ranks together.
        """
        if group.planned_codecs is None:
            self._plan(group)
        channel = self._channel(group, process_group, dtype, num_values)
        if channel is None:
            return None
        if is_in_pass(group.param_group):
            if self._agreed_pass.get(process_group.group_name) != self._pass_number:
                self._agree(process_group, group)
                channel = self._channel(group, process_group, dtype, num_values)  # a renewed plan makes new ones
            elif channel.settled is None and self.backend.checks_at_once:
                self._agree_alone(channel, group)
        elif not self.backend.checks_at_once:
            channel.settled = None  # See [Note: Gathers out of a pass]
        elif channel.settled is None or channel.settled.num_gathers:
            self._agree_alone(channel, group)
        return channel

    def after_gather(self, group: CieraAllGather, channel: Channel) -> None:
        """A gather of this channel is complete."""
        if not self.backend.checks_at_once:
            self._watch.tell(channel.where, channel.damage)

    def invalidate(self, group: CieraAllGather) -> None:
        """Drops the state of a group: at once, or, where the host may not look in a gather, at the next agreement: until then
        this rank must send what was agreed on."""
        for channel in group.channels.values():
            if self.backend.checks_at_once:
                channel.forget()
            else:
                channel.is_touched = True

    def _before_optimizer(self) -> None:
        """See [Note: Told before the optimizer] in backends/cuda.py."""
        for where, flags in self._watch.read().items():
            for group in self.groups:
                for channel in group.channels.values():
                    channel.is_touched = channel.is_told = True
            raise CieraDesyncError(f"{where}: {said_of_damage(flags)}")

    def settle(self, process_group: dist.ProcessGroup) -> int:
        """Agrees on all channels of a process group now, and for the next pass where the host may look in a gather: a rank
        whose weights change after this says so then. -> channels that are settled. Collective over it."""
        num_settled = self._agree(process_group, None)
        if self.backend.checks_at_once:
            self._agreed_pass[process_group.group_name] = self._pass_number + 1
        return num_settled

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Those over which a group that has a plan and is gathered at all would be gathered next."""
        found: dict[str, dist.ProcessGroup] = {}
        for group in self.groups:
            process_group = next_process_group(group.param_group)
            if group.planned_codecs is not None and process_group is not None and group.channels:
                found.setdefault(process_group.group_name, process_group)
        return list(found.values())

    def _begin_pass(self) -> None:
        self._pass_number += 1

    # planning

    def _plan(self, group: CieraAllGather) -> None:
        """Makes the plan of a group, and of those that its whole process group can plan with it."""
        process_group = gather_groups(group.param_group)[0][0]
        module, _, _ = param_names_and_sizes(group.param_group, gather_dtype(group.param_group))
        wait_for_peers(process_group, module)
        if isinstance(self.backend, PlainBackend):
            self._note(group, f"gathers on {self.backend.device.type} run as in stock FSDP2: {self.backend.reason}")
        fresh = [other for other in self.groups if other.planned_codecs is None]
        members = cast(Sequence[CieraAllGather], next_groups(fresh, process_group, self.backend))
        cohort = Cohort(members, process_group, self.backend)
        cohort.decide(self._spent_bytes())
        self.cohorts.append(cohort)
        for member in members:
            self._cohort_of[id(member)] = cohort
        for text in cohort.notes:
            self._note(members[0], text)

    def _note(self, group: CieraAllGather, text: str) -> None:
        """Once in `stats`, and once as a warning."""
        if text not in self._notes:
            self._notes.add(text)
            group.counts.note(text)
            warnings.warn(f"fsdp_ciera: {text}", stacklevel=2)

    def _spent_bytes(self, but_for: Cohort | None = None) -> int:
        """What the cohorts have of the budget, on this rank."""
        return sum(
            cohort.cost_bytes(group) for group, cohort in self._with_cohorts(self.groups) if cohort is not but_for
        )

    # agreements

    def _agree(self, process_group: dist.ProcessGroup, group: CieraAllGather | None) -> int:
        """Agrees on all channels of a process group; `group` counts the bytes."""
        channels = self._channels_over(process_group)
        num_settled = 0
        if channels:
            agreed = agree([channel for _, channel in channels], self._shard_of(channels), process_group)
            num_settled = agreed.num_settled
            (group or channels[0][0]).counts.count_overhead("agreement", agreed.sent_bytes, _link_of(channels[0][1]))
            if self._renew(process_group, agreed.num_changes):
                return self._agree(process_group, group)
        self._agreed_pass[process_group.group_name] = self._pass_number
        return num_settled

    def _agree_alone(self, channel: Channel, group: CieraAllGather) -> None:
        """Agrees on one channel, in its gather."""
        agreed = agree([channel], self._shard_of([(group, channel)]), channel.process_group)
        group.counts.count_overhead("agreement", agreed.sent_bytes, _link_of(channel))

    def _shard_of(self, channels: Sequence[tuple[CieraAllGather, Channel]]) -> ShardOf:
        groups = {id(channel): group for group, channel in channels}

        def shard_of(channel: Channel) -> torch.Tensor | None:
            param_group = groups[id(channel)].param_group
            process_group = next_process_group(param_group)
            if process_group is None or process_group.group_name != channel.process_group.group_name:
                return None
            return gather_input(param_group, channel.layout.dtype, channel.layout.num_values)

        return shard_of

    def _renew(self, process_group: dist.ProcessGroup, num_changes: int) -> bool:
        """Lets the cohort of a process group know of the step, and renew its plan where that is due. -> whether it did."""
        for cohort in self.cohorts:
            if cohort.process_group.group_name != process_group.group_name:
                continue
            cohort.note_step(num_changes, _whole_shard)
            if cohort.is_due:
                left = [group for group, its in self._with_cohorts(self.groups) if its is cohort]
                cohort.renew(left, self._spent_bytes(but_for=cohort))
                return True
        return False

    # channels

    def _channels_over(self, process_group: dist.ProcessGroup) -> list[tuple[CieraAllGather, Channel]]:
        """The channels of a process group, the same on all its ranks: of every group that has a plan and whose next
        gather, or an earlier one, is over it."""
        name = process_group.group_name
        found: list[tuple[CieraAllGather, Channel]] = []
        for group in self.groups:
            if group.planned_codecs is None:
                continue
            coming = next_process_group(group.param_group)
            if coming is not None and coming.group_name == name and not makes_own_inputs(group.param_group):
                dtype = gather_dtype(group.param_group)
                num_values = gather_length(group.param_group, dtype)
                if num_values:
                    self._channel(group, process_group, dtype, num_values)
            found += [(group, channel) for (its, _, _), channel in group.channels.items() if its == name]
        return found

    def _channel(
        self, group: CieraAllGather, process_group: dist.ProcessGroup, dtype: torch.dtype, num_values: int
    ) -> Channel | None:
        """See [Note: One state per channel]. `None` where the plan chose no codec."""
        key = (process_group.group_name, dtype, num_values)
        if key in group.channels:
            return group.channels[key]
        if (dtype, num_values) in group.plain_layouts:
            return None
        module, layout = self._layout(group, dtype, num_values)
        is_plain = isinstance(self.backend, PlainBackend)
        if layout.is_raw and (is_plain or self.policy.may_go_plain):  # See [Note: Never slower]
            group.plain_layouts[dtype, num_values] = layout
            return None
        cohort = self._cohort_of[id(group)]
        cut = cut_of(dist.get_process_group_ranks(process_group), cohort.placed_policy)
        if self.policy.topology == "hierarchical" and cut.is_flat:
            group.counts.note(
                f"nodes of {ranks_per_node_of(self.policy)} ranks do not cut a group of {process_group.size()} ranks into "
                "several equal parts of several ranks, so it is gathered flat"
            )
        descriptor = describe(module, self.policy, layout, cut, self.backend)
        group.channels[key] = Channel(
            descriptor, layout, process_group, cut, self.backend, self.policy.block_size,
            cohort.decodes_in_place(group), group.changes.setdefault(key, Changes()), group.stage_seconds,
        )  # fmt: skip
        return group.channels[key]

    def _layout(self, group: CieraAllGather, dtype: torch.dtype, num_values: int) -> tuple[str, Layout]:
        """The module's name, and the runs of a shard [num_values]."""
        module, names, sizes = param_names_and_sizes(group.param_group, dtype)
        assert group.planned_codecs is not None
        codecs = [codec if self.backend.supports(codec, dtype) else "raw" for codec in group.planned_codecs]
        layout = build_layout(names, sizes, codecs, num_values, dtype)
        wants_codecs = any(codec != "raw" for codec in self.policy.codecs)
        if layout.is_raw and wants_codecs and dtype == torch.uint8:
            group.counts.note(f"{module}: a group of mixed dtypes is gathered as bytes, so it goes raw")
        elif wants_codecs and sum(sizes) != num_values:
            group.counts.note(
                f"{module}: its parameters make their own gather inputs ({num_values} values where {sum(sizes)} are known), "
                "so nobody knows what lies where, and it goes raw"
            )
        return module, layout


def _nothing() -> None:
    """Of a session that is gone."""


def _link_of(channel: Channel) -> str:
    return "flat" if channel.cut.is_flat else "between_nodes"


def _whole_shard(group: PlannedGroup) -> torch.Tensor | None:
    """What a group gathers in forward, [num_values]; `None` while it is gathered, or gathered over a part of its ranks."""
    whole = gather_groups(group.param_group)[0][0]
    coming = next_process_group(group.param_group)
    if coming is None or coming.group_name != whole.group_name:
        return None
    dtype = gather_dtype(group.param_group)
    return gather_input(group.param_group, dtype, gather_length(group.param_group, dtype))
