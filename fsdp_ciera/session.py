"""`Session`: one FSDP root with one policy. It owns the plan and the channels, and knows when to plan, to agree and to renew.

    the first gather over a process group      plan its parameter groups (planning/cohort.py), if they have no plan
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
    """The parameter groups under one FSDP root that carry equal policies. `comms` holds their all-gathers, in the root's order.

    [Note: Agreements are among those who gather] An agreement is collective. It is made in a gather, over that gather's own
    process group: whoever is in it is in the agreement, whatever else the ranks do. Nothing is assumed of process groups that
    come later in the pass, of ranks that hold other modules, or of roots without parameters. Test: test_faults.py, towers; a
    root without parameters; other modules.

    [Note: Never slower] Where a policy could have chosen a codec and chose none, gathers run as in stock FSDP2, without
    agreements: all ranks have the same plan. Test: test_planner.py, a fast link.

    [Note: One state per channel] FSDP2 calls one collective for different process groups and lengths (with
    `reshard_after_forward=<int>` backward gathers over a smaller group), so state is kept per (process group, dtype, length).
    Test: test_bit_identity.py, reshard_after_forward=2.

    [Note: Gathers out of a pass] Users gather by `unshard()` between passes, whether weights changed or not. Where the host may
    look, such a gather agrees on its own channel alone. On CUDA that would wait for the device, so the shards travel as they
    are, in their slots, and the next agreement goes on from there. Test: test_agreement.py, unshard between passes.
    """

    def __init__(self, first_comm: CieraAllGather) -> None:
        self.policy = first_comm.policy
        self.backend: Backend = backend_of(first_comm.param_group.device)
        self.comms: list[CieraAllGather] = []
        self.cohorts: list[Cohort] = []
        self._cohort_of: dict[int, Cohort] = {}  # by id of the all-gather
        self._pass_number = 1
        self._agreed_pass: dict[str, int] = {}  # by name of the process group
        self._end_watch = watch_passes(first_comm.param_group, self._begin_pass)
        self._notes: set[str] = set()
        self._watch = DamageWatch()
        """Watches flags that the host may not read in a gather."""
        if not self.backend.checks_at_once:
            before_optimizer = weakref.WeakMethod(self._before_optimizer)
            hook = register_optimizer_step_pre_hook(lambda *_: (before_optimizer() or _nothing)())
            self._end_hook = weakref.finalize(self, hook.remove)  # a hook of all optimizers must not keep a model alive

    # who belongs to it

    @classmethod
    def of(cls, comm: CieraAllGather) -> Session:
        """The session of a parameter group. The first call makes it; the root must have run its first forward then."""
        if isinstance(comm.session, Session):
            return comm.session
        siblings = [get_comm(param_group) for param_group in sibling_groups(comm.param_group)]
        equals = [other for other in siblings if isinstance(other, CieraAllGather) and other.policy == comm.policy]
        known = [other.session for other in equals if isinstance(other.session, Session)]
        session = known[0] if known else cls(comm)
        session.comms = [other for other in equals if other.session in (None, session)]  # the root's order
        for other in session.comms:
            other.session = session
        return session

    def remove(self, comm: CieraAllGather) -> None:
        """Lets go of a parameter group, which gathers as stock FSDP2 from now on."""
        self.comms = [other for other in self.comms if other is not comm]
        comm.session = None
        if not self.comms:
            self._end_watch()
            if not self.backend.checks_at_once:
                self._end_hook()

    @property
    def plans(self) -> list[Plan]:
        """The plans in force."""
        in_force = {id(cohort): cohort for _, cohort in self._with_cohorts(self.comms)}
        return [cohort.plan for cohort in in_force.values() if cohort.plan is not None]

    def _with_cohorts(self, comms: Iterable[CieraAllGather]) -> list[tuple[CieraAllGather, Cohort]]:
        return [(comm, self._cohort_of[id(comm)]) for comm in comms if id(comm) in self._cohort_of]

    # what gathers ask

    def before_gather(
        self, comm: CieraAllGather, process_group: dist.ProcessGroup, dtype: torch.dtype, num_values: int
    ) -> Channel | None:
        """The channel of the gather that comes now, with what is settled for it; `None` for a plain gather.

        May plan and agree, and is then collective over `process_group` (planning also over the process groups of the other
        parameter groups that it plans). Raises what planning and agreeing raise, on all ranks together.
        """
        if comm.planned_codecs is None:
            self._plan(comm)
        channel = self._channel(comm, process_group, dtype, num_values)
        if channel is None:
            return None
        if is_in_pass(comm.param_group):
            if self._agreed_pass.get(process_group.group_name) != self._pass_number:
                self._agree(process_group, comm)
                channel = self._channel(comm, process_group, dtype, num_values)  # a renewed plan makes new ones
            elif channel.settled is None and self.backend.checks_at_once:
                self._agree_alone(channel, comm)
        elif not self.backend.checks_at_once:
            channel.settled = None  # See [Note: Gathers out of a pass]
        elif channel.settled is None or channel.settled.num_gathers:
            self._agree_alone(channel, comm)
        return channel

    def after_gather(self, comm: CieraAllGather, channel: Channel) -> None:
        """Takes note that a gather of this channel is complete."""
        if not self.backend.checks_at_once:
            self._watch.tell(channel.where, channel.damage)

    def invalidate(self, comm: CieraAllGather) -> None:
        """Drops the state of a parameter group: at once where the host may look in a gather; otherwise at the next agreement,
        since this rank must send until then what was agreed on."""
        for channel in comm.channels.values():
            if self.backend.checks_at_once:
                channel.forget()
            else:
                channel.is_touched = True

    def _before_optimizer(self) -> None:
        """Raises where flags of damage are set. See [Note: Told before the optimizer] in backends/cuda.py."""
        for where, flags in self._watch.read().items():
            for comm in self.comms:
                for channel in comm.channels.values():
                    channel.is_touched = channel.has_raised = True
            raise CieraDesyncError(f"{where}: {said_of_damage(flags)}")

    def agree_ahead(self, process_group: dist.ProcessGroup) -> int:
        """Agrees on all channels of a process group now, and returns how many are settled. Collective over it.

        Where the host may look in a gather, this is the agreement of the next pass, too: a rank whose weights change afterwards
        says so in its gather.
        """
        num_settled = self._agree(process_group, None)
        if self.backend.checks_at_once:
            self._agreed_pass[process_group.group_name] = self._pass_number + 1
        return num_settled

    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the next gathers, of all parameter groups that have a plan and at least one channel."""
        by_name: dict[str, dist.ProcessGroup] = {}
        for comm in self.comms:
            process_group = next_process_group(comm.param_group)
            if comm.planned_codecs is not None and process_group is not None and comm.channels:
                by_name.setdefault(process_group.group_name, process_group)
        return list(by_name.values())

    def _begin_pass(self) -> None:
        self._pass_number += 1

    # planning

    def _plan(self, comm: CieraAllGather) -> None:
        """Plans a parameter group, and those others that its whole process group can plan with it."""
        process_group = gather_groups(comm.param_group)[0][0]
        module, _, _ = param_names_and_sizes(comm.param_group, gather_dtype(comm.param_group))
        wait_for_peers(process_group, module)
        if isinstance(self.backend, PlainBackend):
            self._note(comm, f"gathers on {self.backend.device.type} run as in stock FSDP2: {self.backend.reason}")
        unplanned = [other for other in self.comms if other.planned_codecs is None]
        members = cast(Sequence[CieraAllGather], next_groups(unplanned, process_group, self.backend))
        cohort = Cohort(members, process_group, self.backend)
        cohort.decide(self._spent_bytes())
        self.cohorts.append(cohort)
        for member in members:
            self._cohort_of[id(member)] = cohort
        for text in cohort.notes:
            self._note(members[0], text)

    def _note(self, comm: CieraAllGather, text: str) -> None:
        """Puts the text into `stats` and warns, once for each text."""
        if text not in self._notes:
            self._notes.add(text)
            comm.counts.note(text)
            warnings.warn(f"fsdp_ciera: {text}", stacklevel=2)

    def _spent_bytes(self, but_for: Cohort | None = None) -> int:
        """Bytes of the budget that the cohorts take on this rank, without those of `but_for`."""
        return sum(cohort.cost_bytes(comm) for comm, cohort in self._with_cohorts(self.comms) if cohort is not but_for)

    # agreements

    def _agree(self, process_group: dist.ProcessGroup, comm: CieraAllGather | None) -> int:
        """Agrees on all channels of a process group, and returns how many are settled. `comm`, or that of the first channel,
        counts the bytes."""
        channels = self._channels_over(process_group)
        num_settled = 0
        if channels:
            agreed = agree([channel for _, channel in channels], self._shard_of(channels), process_group)
            num_settled = agreed.num_settled
            (comm or channels[0][0]).counts.count_overhead("agreement", agreed.sent_bytes, _link_of(channels[0][1]))
            if self._renew(process_group, agreed.num_changes):
                return self._agree(process_group, comm)
        self._agreed_pass[process_group.group_name] = self._pass_number
        return num_settled

    def _agree_alone(self, channel: Channel, comm: CieraAllGather) -> None:
        """Agrees on one channel, in its gather."""
        agreed = agree([channel], self._shard_of([(comm, channel)]), channel.process_group)
        comm.counts.count_overhead("agreement", agreed.sent_bytes, _link_of(channel))

    def _shard_of(self, channels: Sequence[tuple[CieraAllGather, Channel]]) -> ShardOf:
        param_groups = {id(channel): comm.param_group for comm, channel in channels}

        def shard_of(channel: Channel) -> torch.Tensor | None:
            param_group = param_groups[id(channel)]
            process_group = next_process_group(param_group)
            if process_group is None or process_group.group_name != channel.process_group.group_name:
                return None
            return gather_input(param_group, channel.layout.dtype, channel.layout.num_values)

        return shard_of

    def _renew(self, process_group: dist.ProcessGroup, num_changes: int) -> bool:
        """Tells the cohorts of a process group how often weights have changed, and renews a plan that is due. Returns whether
        one was renewed."""
        for cohort in self.cohorts:
            if cohort.process_group.group_name != process_group.group_name:
                continue
            cohort.note_step(num_changes, _whole_shard)
            if cohort.is_due:
                remaining = [comm for comm, own_cohort in self._with_cohorts(self.comms) if own_cohort is cohort]
                cohort.renew(remaining, self._spent_bytes(but_for=cohort))
                return True
        return False

    # channels

    def _channels_over(self, process_group: dist.ProcessGroup) -> list[tuple[CieraAllGather, Channel]]:
        """The channels of a process group, the same on all its ranks: those of every parameter group that has a plan and whose
        next gather, or an earlier one, is over it."""
        name = process_group.group_name
        channels: list[tuple[CieraAllGather, Channel]] = []
        for comm in self.comms:
            if comm.planned_codecs is None:
                continue
            coming = next_process_group(comm.param_group)
            if coming is not None and coming.group_name == name and not makes_own_inputs(comm.param_group):
                dtype = gather_dtype(comm.param_group)
                num_values = gather_length(comm.param_group, dtype)
                if num_values:
                    self._channel(comm, process_group, dtype, num_values)
            channels += [(comm, channel) for (over, _, _), channel in comm.channels.items() if over == name]
        return channels

    def _channel(
        self, comm: CieraAllGather, process_group: dist.ProcessGroup, dtype: torch.dtype, num_values: int
    ) -> Channel | None:
        """The channel of such gathers, made on first use; `None` where the plan chose no codec. See [Note: One state per
        channel]."""
        key = (process_group.group_name, dtype, num_values)
        if key in comm.channels:
            return comm.channels[key]
        if (dtype, num_values) in comm.plain_layouts:
            return None
        module, layout = self._layout(comm, dtype, num_values)
        is_plain = isinstance(self.backend, PlainBackend)
        if layout.is_raw and (is_plain or self.policy.may_go_plain):  # See [Note: Never slower]
            comm.plain_layouts[dtype, num_values] = layout
            return None
        cohort = self._cohort_of[id(comm)]
        cut = cut_of(dist.get_process_group_ranks(process_group), cohort.placed_policy)
        if self.policy.topology == "hierarchical" and cut.is_flat:
            comm.counts.note(
                f"nodes of {ranks_per_node_of(self.policy)} ranks do not cut a group of {process_group.size()} ranks into "
                "several equal parts of several ranks, so it is gathered flat"
            )
        descriptor = describe(module, self.policy, layout, cut, self.backend)
        comm.channels[key] = Channel(
            descriptor, layout, process_group, cut, self.backend, self.policy.block_size,
            cohort.decodes_in_place(comm), comm.changes.setdefault(key, Changes()), comm.stage_seconds,
        )  # fmt: skip
        return comm.channels[key]

    def _layout(self, comm: CieraAllGather, dtype: torch.dtype, num_values: int) -> tuple[str, Layout]:
        """The module's name, and the runs of a shard [num_values]."""
        module, names, sizes = param_names_and_sizes(comm.param_group, dtype)
        assert comm.planned_codecs is not None
        codecs = [codec if self.backend.supports(codec, dtype) else "raw" for codec in comm.planned_codecs]
        layout = build_layout(names, sizes, codecs, num_values, dtype)
        wants_codecs = any(codec != "raw" for codec in self.policy.codecs)
        if layout.is_raw and wants_codecs and dtype == torch.uint8:
            comm.counts.note(f"{module}: a group of mixed dtypes is gathered as bytes, so it goes raw")
        elif wants_codecs and sum(sizes) != num_values:
            comm.counts.note(
                f"{module}: its parameters make their own gather inputs ({num_values} values where {sum(sizes)} are known), "
                "so nobody knows what lies where, and it goes raw"
            )
        return module, layout


def _nothing() -> None:
    """Stands in for the hook of a session that is gone."""


def _link_of(channel: Channel) -> str:
    return "flat" if channel.cut.is_flat else "between_nodes"


def _whole_shard(comm: PlannedGroup) -> torch.Tensor | None:
    """The shard that a parameter group gathers in forward, [num_values]; `None` while it is gathered, or while its next gather
    is over a part of its ranks."""
    param_group = comm.param_group
    whole = gather_groups(param_group)[0][0]
    coming = next_process_group(param_group)
    if coming is None or coming.group_name != whole.group_name:
        return None
    dtype = gather_dtype(param_group)
    return gather_input(param_group, dtype, gather_length(param_group, dtype))
