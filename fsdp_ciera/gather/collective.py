"""`CieraAllGather`: the all-gather that FSDP2 calls, one object per parameter group.

allocate   FSDP2 asks for the output, and then copies the local shards into this rank's slot of it.
           The session says what the gather will send: it plans and agrees with the other ranks where that is due
__call__   exchange payloads -> decode into the other ranks' slots -> check -> count
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp_ciera._compat import (
    AllGather,
    FSDPParamGroup,
    all_gather_flat,
    ambient_defaults,
    group_phase,
    names_are_known,
    next_process_group,
)
from fsdp_ciera.errors import CieraDecodeError
from fsdp_ciera.gather.agreement import raise_failures, raise_other_gather
from fsdp_ciera.gather.channel import STAGES, Changes, Channel, Settled
from fsdp_ciera.gather.checks import check_against_raw, check_checksums, flag_checksums
from fsdp_ciera.gather.exchange import COULD_NOT_DECODE, Delivered, deliver
from fsdp_ciera.gather.layout import Layout
from fsdp_ciera.kernels.heads import DAMAGE_MEANINGS, Damage
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.statistics import CieraStats


class GatherOwner(Protocol):
    """Plans and agrees for all-gathers: `fsdp_ciera.session.Session`."""

    def before_gather(
        self, comm: CieraAllGather, process_group: dist.ProcessGroup, dtype: torch.dtype, num_values: int
    ) -> Channel | None:
        """The channel of the gather that comes now, with what is settled for it; `None` for a plain gather. May plan and agree,
        and is then collective over `process_group`."""

    def after_gather(self, comm: CieraAllGather, channel: Channel) -> None:
        """Takes note that a gather of this channel is complete."""

    def invalidate(self, comm: CieraAllGather) -> None:
        """Drops the state of a parameter group."""


class CieraAllGather(AllGather):
    """FSDP2's all-gather of one parameter group, lossless and in fewer bytes.

    A call gives bit for bit what a plain all-gather gives. It makes one collective on the process group that FSDP2 passes in,
    which gathers the payloads; all ranks agreed on the largest size of these when the root's forward began (one small
    all-reduce for all parameter groups, fsdp_ciera.session). A parameter group whose plan chose no codec makes the plain gather
    alone, see [Note: Never slower] in session.py. Hierarchical gathers exchange payloads between nodes only, and one more
    collective spreads the shards inside each node. The first call under an FSDP root plans its parameter groups, which takes up
    to some seconds where links and codecs are measured.

    Memory besides the channels' state, while a call runs: see `fsdp_ciera.gather.exchange.deliver`; for a flat gather the
    payloads of all ranks (less than the output).

    [Note: Inference mode] A tensor made under `inference_mode` cannot be written to outside of it, and FSDP2 may run its
    first gather there. All state and the output are therefore made with inference mode off. Test: test_bit_identity.py,
    eval between steps.

    [Note: Ambient defaults] Users set a default device or dtype for their own tensors, and FSDP2 may run a gather under them.
    Ours are made without them. Test: test_faults.py, another default device, another default dtype.

    [Note: Names come with the first forward] Before the root's first forward a parameter group knows neither its own name nor
    its siblings, so categories, the shared budget and the identity in payloads would be guesses. Gathers by `unshard()`
    before it run as in stock FSDP2. Test: test_policy.py, unshard before the first forward.

    [Note: Any doubt ends in a full gather] State moves before a gather is known to have worked. So every exception
    drops the state, and a rank that has none (after an exception, `invalidate`, a new layout) says so at the next
    agreement: then all ranks send their shards as they are. Test: test_failures.py, an exception on one rank.
    """

    def __init__(
        self, param_group: FSDPParamGroup, policy: CieraPolicy, session_of: Callable[[CieraAllGather], GatherOwner]
    ) -> None:
        self.param_group = param_group
        self.policy = policy
        self.planned_codecs: tuple[str, ...] | None = None
        """The codec of each parameter, as the plan says; `None` before there is one."""
        self.channels: dict[tuple[str, torch.dtype, int], Channel] = {}
        """The channels by name of the process group, dtype and length. See [Note: One state per channel] in session.py."""
        self.changes: dict[tuple[str, torch.dtype, int], Changes] = {}
        """The changes of the shards, by the same keys as `channels`."""
        self.counts = CieraStats()
        self.plain_layouts: dict[tuple[torch.dtype, int], Layout] = {}
        """The layouts of gathers in which the plan chose no codec, by dtype and length."""
        self.session: GatherOwner | None = None
        """The session that plans and agrees for this all-gather; `None` before its first gather."""
        self._session_of = session_of
        self._coming: Channel | None = None
        """The channel of the gather that `allocate` has begun."""

    # FSDP2's side

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the output buffer that is held as state, see [Note: The output is the cache] in codecs/value_delta.py; or a
        fresh one where none is held, since FSDP2 uses the outputs of several parameter groups at once."""
        num_values = prod(int(length) for length in size)
        process_group = next_process_group(self.param_group)
        self._coming = None
        with ambient_defaults(device):
            if process_group is not None and num_values and names_are_known(self.param_group):
                self._coming = self._before_gather(process_group, dtype, num_values // process_group.size())
            if self._coming is not None and self._coming.cut.is_flat:
                held = self._coming.held
                if held is not None and held.numel() == num_values and held.device == device:
                    self._coming.is_touched = True  # See [Note: The own slot]
                    return held.view(-1)
            return torch.empty(num_values, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fills `output_tensor` [world_size * n]; `input_tensor` [n] is this rank's slot of it and stays as it is. `group` is
        FSDP2's name for the process group.

        Always blocks and returns `None` on CPU, also with `async_op`, so two asynchronous calls on different process groups
        must be made in the same order on all ranks. Raises on all ranks together `CieraMismatchError`,
        `CieraDesyncError`, `CieraPeerError`, `CieraVerifyError`; on one rank `CieraDecodeError` for a damaged payload.
        """
        process_group = group
        channel, self._coming = self._coming, None
        with ambient_defaults(input_tensor.device):
            if channel is None or not channel.is_of(process_group, input_tensor):
                channel = None
                if input_tensor.numel() and names_are_known(self.param_group):  # nobody called `allocate`
                    channel = self._before_gather(process_group, input_tensor.dtype, input_tensor.numel())
            if channel is None:
                return self._gather_plain(output_tensor, input_tensor, process_group, async_op)
            settled = channel.settled or channel.settle_alone()
            num_gathers = settled.num_gathers
            try:
                self._gather(channel, settled, output_tensor.view(process_group.size(), -1), input_tensor)
            except BaseException:
                channel.forget()  # See [Note: Any doubt ends in a full gather]
                channel.has_raised = True
                settled.num_gathers = num_gathers + 1  # as at the peers, who may have seen nothing wrong
                raise
            self._session_of(self).after_gather(self, channel)
        return None

    # Our side

    def invalidate(self) -> None:
        """Drops all state, so that the next gather of every channel is a full one."""
        if self.session is not None:
            self.session.invalidate(self)

    def release(self) -> None:
        """Frees all state now. Counts and stage seconds are kept."""
        self.channels.clear()
        self._coming = None
        self.planned_codecs = None

    def adopt(self, codecs: tuple[str, ...]) -> None:
        """Takes the codecs that a plan gives the parameters of this parameter group. The next gather is a full one where they
        differ from the last plan's.

        Call it on all ranks at the same gather.
        """
        if codecs != self.planned_codecs:
            self.channels.clear()
            self.planned_codecs = codecs

    def stats(self) -> CieraStats:
        """A copy of the counts so far, with the memory that is held now."""
        report = CieraStats()
        report.merge(self.counts)
        for channel in self.channels.values():
            report.cache_bytes += channel.cache_bytes
            report.held_output_bytes += channel.held_output_bytes
            report.world_size = max(report.world_size, channel.cut.world_size)
        return report

    @property
    def stage_seconds(self) -> dict[str, float]:
        """The host's seconds in each stage, counted by all channels of this parameter group."""
        if not self.counts.stage_seconds:
            self.counts.stage_seconds = dict.fromkeys(STAGES, 0.0)
        return self.counts.stage_seconds

    def _before_gather(self, process_group: dist.ProcessGroup, dtype: torch.dtype, num_values: int) -> Channel | None:
        if process_group.size() == 1:
            return None
        return self._session_of(self).before_gather(self, process_group, dtype, num_values)

    def _gather(self, channel: Channel, settled: Settled, output: torch.Tensor, values: torch.Tensor) -> None:
        with channel.stage("Hash"):
            checksum = channel.backend.checksum(values.view(1, -1))
        delivered = deliver(channel, settled, output, values, checksum)
        if delivered.flags & Damage.BROKEN_PROMISE and not delivered.flags & ~Damage.BROKEN_PROMISE:
            wasted = delivered
            settled = channel.start_over(settled, checksum)
            delivered = deliver(channel, settled, output, values, checksum)
            delivered.sent_bytes += wasted.sent_bytes
            delivered.sent_in_node_bytes += wasted.sent_in_node_bytes
        self._finish(channel, settled, delivered, output, values)

    def _finish(
        self,
        channel: Channel,
        settled: Settled,
        delivered: Delivered,
        output: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Checks and counts a gather whose payloads have moved, and moves the channel on."""
        sequence = settled.next_sequence
        check_is_due = self._check_is_due(sequence)
        could_not_decode = bool(delivered.flags & COULD_NOT_DECODE)
        if delivered.flags and not (could_not_decode and check_is_due):
            self._raise(channel, sequence, delivered)
        if delivered.failure is not None and not delivered.flags:  # the peers find it in this rank's payload
            raise delivered.failure
        phase = f"{settled.next_kind}/{group_phase(self.param_group)}"
        self._count(channel, settled, phase, delivered)
        channel.complete(settled, delivered.checksums, output)
        if check_is_due:
            self._check(channel, delivered, output, values, phase)

    def _raise(self, channel: Channel, sequence: int, delivered: Delivered) -> None:
        """Raises what all ranks of the process group have seen, on all of them together."""
        channel.damage.zero_()
        if delivered.flags & Damage.FAILED:
            raise_failures(channel.where, delivered.failure, channel.process_group)
        if delivered.flags & Damage.FOREIGN:  # maybe here alone, so nothing can be asked of the others
            raise CieraDecodeError(f"{channel.where}: {DAMAGE_MEANINGS[Damage.FOREIGN]}")
        if delivered.flags & Damage.OTHER_GATHER:
            raise_other_gather(channel, sequence)
        assert delivered.failure is not None, delivered.flags
        raise delivered.failure

    def _check_is_due(self, sequence: int) -> bool:
        verify = self.policy.verify
        return verify == "every" or (isinstance(verify, int) and sequence % verify == 0)

    def _check(
        self, channel: Channel, delivered: Delivered, output: torch.Tensor, values: torch.Tensor, phase: str
    ) -> None:
        """Checks the output as `verify=` says, see fsdp_ciera.gather.checks, and counts the bytes sent for it."""
        if self.policy.verify != "every":
            sent_bytes = check_against_raw(channel, output, values, delivered.failure)
        elif not channel.backend.checks_at_once:
            sent_bytes = flag_checksums(channel, output, delivered.checksums)
        else:
            assert delivered.checksums is not None
            sent_bytes = check_checksums(channel, output, delivered.checksums, delivered.failure)
        self.counts.count_overhead(phase, sent_bytes, link="flat" if channel.cut.is_flat else "between_nodes")

    def _count(self, channel: Channel, settled: Settled, phase: str, delivered: Delivered) -> None:
        cut, layout = channel.cut, channel.layout
        item_bytes = layout.dtype.itemsize
        num_peers, num_in_node = cut.num_nodes - 1, (cut.ranks_per_node - 1) * cut.num_nodes
        shard_bytes = layout.num_values * item_bytes
        links = [("flat" if cut.is_flat else "between_nodes", num_peers * shard_bytes, delivered.sent_bytes)]
        if not cut.is_flat:
            links.append(("in_node", num_in_node * shard_bytes, delivered.sent_in_node_bytes))
        runs = []
        for run, run_bytes in zip(layout.runs, channel.run_bytes(settled), strict=True):
            raw_bytes = run.num_values * item_bytes
            sent_bytes = num_peers * run_bytes + num_in_node * raw_bytes
            runs.append((run.category, run.codec, (cut.world_size - 1) * raw_bytes, sent_bytes))
        self.counts.count(phase, links, runs)
        if channel.has_base and channel.announced is not None:
            num_blocks, num_reused = channel.announced.block_counts
            self.counts.num_blocks += num_blocks
            self.counts.num_blocks_reused += num_blocks if settled.num_gathers else num_reused

    def _gather_plain(
        self, output: torch.Tensor, values: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """Gathers as stock FSDP2 does, and counts it."""
        bytes_per_value = (process_group.size() - 1) * values.element_size()
        layout = self.plain_layouts.get((values.dtype, values.numel()))
        sizes = (
            [("other", values.numel())] if layout is None else [(run.category, run.num_values) for run in layout.runs]
        )
        runs = [
            (category, "raw", bytes_per_value * num_values, bytes_per_value * num_values)
            for category, num_values in sizes
        ]
        sent_bytes = bytes_per_value * values.numel()
        self.counts.world_size = process_group.size()
        self.counts.count(f"plain/{group_phase(self.param_group)}", [("flat", sent_bytes, sent_bytes)], runs)
        work = all_gather_flat(output, values, process_group, async_op)
        return work if async_op else None
