"""`CieraAllGather`: the all-gather that FSDP2 calls, one object per parameter group.

    allocate   FSDP2 asks for the output and copies the local shards into this rank's slot of it
    __call__   encode -> sizes -> gather -> decode into the other ranks' slots

The parts: layout.py names the runs, sizes.py lets the ranks know what comes (with handshake.py), exchange.py moves payloads,
lockstep.py encodes and decodes, wire.py lays out bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_ciera._compat import (
    AllGather,
    FSDPParamGroup,
    all_gather_flat,
    gather_groups,
    gather_input,
    group_phase,
    names_are_known,
    param_names_and_sizes,
)
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.gather.checks import check_against_raw, check_checksums
from fsdp_ciera.gather.device_codecs import DEVICE_CODECS
from fsdp_ciera.gather.device_stream import DeviceStream
from fsdp_ciera.gather.exchange import Outcome, Result, exchange_payloads
from fsdp_ciera.gather.layout import Layout, build_layout
from fsdp_ciera.gather.sizes import Agreed, agree
from fsdp_ciera.gather.stream import Changes, Stream
from fsdp_ciera.gather.topology import Cut, check_node_size, cut_of, ranks_per_node_of
from fsdp_ciera.kernels import nvcomp
from fsdp_ciera.kernels.dispatch import VARIABLE, chosen_for, kernels_of
from fsdp_ciera.planning.planner import Cohort, plan_for
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.statistics import CieraStats

_UNSETTLED_TO_NOTE = 12  # gathers of a group: some steps


def kernels_are_there(device: torch.device) -> bool:
    """Whether CUDA codecs can run on this rank's device."""
    return chosen_for(device) == "cuda"


class CieraAllGather(AllGather):
    """FSDP2's all-gather of one parameter group, lossless and in fewer bytes.

    What comes out of a call is bit for bit what a plain all-gather gives. On CPU (gloo) a call makes two collectives on
    the process group that FSDP2 passes in: a header of 64 bytes a rank, then the payloads (nothing when nobody has
    anything to send). With sizes settled ahead the first one falls away; a group whose plan chose no codec makes the plain
    gather alone, see [Note: Never slower]. Hierarchical gathers exchange payloads between nodes
    only, and one more collective spreads the shards inside each node. The first call under an FSDP root plans all its groups
    (fsdp_ciera.planning.planner), which takes up to some seconds where links and codecs are measured.

    On CUDA a gather is compressed when its sizes were settled (`fsdp_ciera.settle_sizes`), and otherwise runs as in stock
    FSDP2: see `fsdp_ciera.gather.device_stream`. Where something keeps the codecs from running there, `stats` says what.

    Memory besides the caches, while a call runs: see `gather.exchange.exchange_payloads`; for a flat gather the payloads
    of all ranks (less than the output).

    [Note: One state per stream] FSDP2 calls one object for different process groups and lengths (with
    `reshard_after_forward=<int>` backward gathers over a smaller group), so state is kept per (group, dtype, length).
    Test: test_bit_identity.py, reshard_after_forward=2.

    [Note: Inference mode] A tensor made under `inference_mode` cannot be written to outside of it, and FSDP2 may run its
    first gather there. All state and the output are therefore made with inference mode off. Test: test_bit_identity.py,
    eval between steps.

    [Note: Names come with the first forward] Before the root's first forward a group knows neither its own name nor its
    siblings, so categories, the shared budget and the identity in the headers would be guesses. Gathers by `unshard()`
    before it run as in stock FSDP2. Test: test_policy.py, unshard before the first forward.

    [Note: Any doubt ends in a full gather] State moves before a gather is known to have worked. So every exception
    forgets the state, and a rank that has none (after an exception, `invalidate`, a new layout) says so in its header:
    then all ranks forget and encode in full, in the same call. Test: test_failures.py, an
    exception on one rank.
    """

    def __init__(self, param_group: FSDPParamGroup, policy: CieraPolicy) -> None:
        self.param_group = param_group
        self.policy = policy
        self.cohort: Cohort | None = None
        """The groups that it is planned with; from the first gather on (fsdp_ciera.planning.planner)."""
        self.planned_codecs: tuple[str, ...] | None = None
        """Of each parameter, as the cohort's plan says."""
        self._changes: dict[tuple[str, torch.dtype, int], Changes] = {}  # by stream
        self._counts = CieraStats()
        self._streams: dict[tuple[str, torch.dtype, int], Stream] = {}
        self._device_streams: dict[tuple[str, torch.dtype, int], DeviceStream | None] = {}
        self._num_unsettled = 0

    # FSDP2's side

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The output buffer: what a stream of this size holds, see [Note: The output is the cache], and a fresh one otherwise,
        since FSDP2 holds those of several groups at once."""
        shape = tuple(int(length) for length in size)
        for (_, stream_dtype, _), stream in self._streams.items():
            held = stream.state.held
            if held is not None and stream_dtype == dtype and (held.numel(),) == shape and held.device == device:
                return held.view(-1)
        with torch.inference_mode(False):  # See [Note: Inference mode]
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fills `output_tensor` [world_size * n]; `input_tensor` [n] is this rank's slot of it and stays as it is.

        Always blocks and returns `None` on CPU, also with `async_op`, so two asynchronous calls on different process groups
        must be made in the same order on all ranks. Raises on all ranks together `CieraMismatchError`,
        `CieraDesyncError`, `CieraPeerError`, `CieraVerifyError`; on one rank `CieraDecodeError` for a damaged payload.
        """
        names_known = names_are_known(self.param_group)  # See [Note: Names come with the first forward]
        if input_tensor.numel() == 0 or not names_known:
            return self._gather_plain(output_tensor, input_tensor, group, async_op, None)
        if output_tensor.device.type != "cpu" or chosen_for(output_tensor.device) == "cuda":
            return self._gather_on_device(output_tensor, input_tensor, group, async_op)
        with torch.inference_mode(False), torch.no_grad():
            stream = self._stream(input_tensor, group)
            if self._goes_plain(stream):
                return self._gather_plain(output_tensor, input_tensor, group, async_op, stream.layout)
            try:
                self._gather(stream, output_tensor.view(group.size(), -1), input_tensor)
            except BaseException:
                stream.forget()  # See [Note: Any doubt ends in a full gather]
                raise
        return None

    # Our side

    def invalidate(self) -> None:
        """The next gather of every stream is a full one."""
        for stream in self._streams.values():
            stream.forget()
        for on_device in self._device_streams.values():
            if on_device is not None:
                on_device.forget()

    def release(self) -> None:
        """Frees the caches now: groups that are planned together know one another, so nothing else would before the next
        collection of garbage."""
        self._streams.clear()
        self._clear_device_streams()
        self.cohort = None

    def adopt(self, codecs: tuple[str, ...]) -> None:
        """The plan for the parameters of this group, from the next gather on: a full one when it differs from the last.

        Called on all ranks at the same gather. Counts and stage seconds go on.
        """
        if codecs == self.planned_codecs:
            return
        self.planned_codecs = codecs
        self._counts = self.stats(with_caches=False)
        self._streams.clear()
        self._clear_device_streams()

    def end_epochs(self) -> None:
        """Gathers on CUDA are plain from now on."""
        for on_device in self._device_streams.values():
            if on_device is not None:
                on_device.end_epoch()

    def _clear_device_streams(self) -> None:
        self.end_epochs()
        self._device_streams.clear()

    def device_group(self) -> dist.ProcessGroup | None:
        """The process group of forward gathers, where they run on CUDA: the same on all ranks, whatever can run there."""
        if not self._device_streams:
            return None
        groups = [group for group, _ in gather_groups(self.param_group) if group.size() > 1]
        return groups[0] if groups else None

    def shard_to_settle(self) -> tuple[Stream | DeviceStream, torch.Tensor] | None:
        """The stream of the group's forward gathers, and what it would gather now [num_values]: for `settle_sizes`.

        `None` when there is nothing to settle: before the first gather, while the parameters are gathered, for raw groups.
        """
        found = gather_input(self.param_group) if self._streams or self._device_streams else None
        if found is None:
            return None
        group, local = found
        key = (group.group_name, local.dtype, local.numel())
        on_device = self._device_streams.get(key)
        if on_device is not None:
            return on_device, local
        stream = self._streams.get(key)
        return None if stream is None or stream.layout.is_raw else (stream, local)

    def count_settling(self, sent_bytes: int) -> None:
        """Counts what `settle_ahead` sent, on behalf of all its groups."""
        self._counts.count_overhead("settle", sent_bytes, link="flat")

    def stats(self, *, with_caches: bool = True) -> CieraStats:
        """A copy of the counts so far, with the caches held now."""
        report = CieraStats()
        report.merge(self._counts)
        for stream in self._streams.values():
            report.cache_bytes += stream.state.cache_bytes if with_caches else 0
            report.held_output_bytes += stream.state.held_output_bytes if with_caches else 0
            report.world_size = max(report.world_size, stream.cut.world_size)
            for stage, seconds in stream.state.stage_seconds.items():
                report.stage_seconds[stage] = report.stage_seconds.get(stage, 0.0) + seconds
        for on_device in self._device_streams.values():
            if on_device is not None and with_caches:
                report.cache_bytes += on_device.cache_bytes
        return report

    def _gather(self, stream: Stream, output: torch.Tensor, local: torch.Tensor) -> None:
        with stream.state.stage("Hash"):
            local_checksum = int(kernels_of(local).checksum(local.view(1, -1)))
        encoded = None
        wasted_bytes = wasted_in_node_bytes = 0
        if stream.epoch is not None:
            promise, encoded = stream.epoch.next(stream, local, local_checksum)
            is_first = stream.epoch.first is not None
            result = exchange_payloads(stream, encoded, promise.sizes, output, local, promise.mark, promise.own_mark)
            if result.outcome is not Outcome.DOUBTED:
                assert encoded is not None
                stream.epoch.first = None
                stream.epoch.num_gathers += 1
                self._note_gather(stream, promise.headers, local)
                self._complete(stream, Agreed(encoded, promise.headers, 0), result, output, local)
                return
            # See [Note: An epoch ends on all ranks together]
            stream.epoch = None
            wasted_bytes, wasted_in_node_bytes = result.sent_bytes, result.sent_in_node_bytes
            if is_first:  # what was encoded ahead has moved the senders' state on, and the receivers' will never follow
                stream.state.forget()
                encoded = None
        agreed = agree(stream, local, local_checksum, encoded)
        check_node_size(self.policy)
        result = exchange_payloads(stream, agreed.encoded, agreed.sizes, output, local)
        result.sent_bytes += wasted_bytes
        result.sent_in_node_bytes += wasted_in_node_bytes
        self._note_gather(stream, agreed.headers, local)
        self._complete(stream, agreed, result, output, local)

    def _complete(
        self, stream: Stream, agreed: Agreed, result: Result, output: torch.Tensor, local: torch.Tensor
    ) -> None:
        """Payloads have moved: checks, counts, and moves the lockstep on."""
        state = stream.state
        check_is_due = self._check_is_due(agreed.sequence)
        if result.failure is not None and not check_is_due:
            raise result.failure
        checksums = agreed.checksums
        kind = "cold" if not state.base else "repeat" if checksums == state.checksums else "first"
        phase = f"{kind}/{group_phase(self.param_group)}"
        if state.base:
            self._counts.num_blocks += agreed.encoded.num_blocks
            self._counts.num_blocks_reused += agreed.encoded.num_blocks_reused
        state.commit(agreed.sequence, checksums)
        self._count(stream, phase, agreed, result)
        if check_is_due:
            if self.policy.verify == "every":
                sent = check_checksums(output, agreed.headers["checksum"], stream.group, stream.where, result.failure)
            else:
                sent = check_against_raw(output, local, stream.group, stream.where, result.failure)
            self._counts.count_overhead(phase, sent, link="flat" if stream.cut.is_flat else "between_nodes")

    def _note_gather(self, stream: Stream, headers: np.ndarray[Any, Any], local: torch.Tensor) -> None:
        """Payloads have moved, on all ranks: the cohort may renew its plan. See [Note: Steps are counted in headers]."""
        assert self.cohort is not None
        step = int(headers["num_changes"].max())
        self.cohort.note_gather(self, stream.group, step, group_phase(self.param_group) == "forward", local)

    def _goes_plain(self, stream: Stream) -> bool:
        """[Note: Never slower] Where a policy that could have chosen a codec chose none, gathers run as in stock FSDP2, without
        headers: all ranks have the same plan. Test: test_planner.py, a fast link."""
        return self.policy.may_go_plain and stream.layout.is_raw

    def _check_is_due(self, sequence: int) -> bool:
        verify = self.policy.verify
        return verify == "every" or (isinstance(verify, int) and sequence % verify == 0)

    def _count(self, stream: Stream, phase: str, agreed: Agreed, result: Result) -> None:
        cut, layout = stream.cut, stream.layout
        item_bytes = layout.dtype.itemsize
        num_peers, num_in_node = cut.num_nodes - 1, (cut.ranks_per_node - 1) * cut.num_nodes
        raw_bytes = layout.num_values * item_bytes
        sent_bytes = agreed.sent_bytes + result.sent_bytes
        links = [("flat" if cut.is_flat else "between_nodes", num_peers * raw_bytes, sent_bytes)]
        if not cut.is_flat:
            links.append(("in_node", num_in_node * raw_bytes, result.sent_in_node_bytes))
        runs = []
        for run, run_bytes in zip(layout.runs, agreed.encoded.run_bytes, strict=True):
            raw = run.num_values * item_bytes
            runs.append(
                (run.category, run.codec, (cut.world_size - 1) * raw, num_peers * run_bytes + num_in_node * raw)
            )
        self._counts.count(phase, links, runs)

    def _gather_on_device(
        self, output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """As the sizes say that were settled, or plain. Waits for the device only where the first gather makes the plan."""
        with torch.inference_mode(False), torch.no_grad():
            key = (group.group_name, local.dtype, local.numel())
            if key not in self._device_streams:
                self._device_streams[key] = self._open_device_stream(local, group)
            stream = self._device_streams[key]
            if stream is None or stream.epoch is None:
                self._num_unsettled += stream is not None
                if self._num_unsettled == _UNSETTLED_TO_NOTE:
                    self._note("call fsdp_ciera.settle_sizes(model) after optimizer.step(): on CUDA gathers are compressed "
                               "when their sizes were settled, and run as in stock FSDP2 until then")  # fmt: skip
                return self._gather_plain(output, local, group, async_op, None if stream is None else stream.layout)
            self._num_unsettled = 0
            try:
                sent = stream.gather(output.view(group.size(), -1), local)
            except BaseException:
                stream.fail()
                raise
        item_bytes, num_peers = local.element_size(), group.size() - 1
        runs = [
            (run.category, run.codec, num_peers * run.num_values * item_bytes, num_peers * run_bytes)
            for run, run_bytes in zip(stream.layout.runs, sent.run_bytes, strict=True)
        ]
        total = ("flat", num_peers * local.numel() * item_bytes, num_peers * sent.payload_bytes)
        self._counts.world_size = group.size()
        self._counts.count(f"{sent.kind}/{group_phase(self.param_group)}", [total], runs)
        return None

    def _open_device_stream(self, local: torch.Tensor, group: dist.ProcessGroup) -> DeviceStream | None:
        """`None` where nothing is compressed; then a note says why."""
        if self.policy.measures:
            self._note("on CUDA links and codecs are not measured yet, so gathers run as in stock FSDP2: name one codec, "
                       "CieraPolicy(codecs=('value_delta',)), or give link= and codec_costs=")  # fmt: skip
            return None
        if self.policy.verify is not None or self.policy.adapt_every is not None:
            self._note("on CUDA verify= and adapt_every= have no effect yet")
        module, layout, cut = self._lay_out(
            local, group, {name: codec.supports for name, codec in DEVICE_CODECS.items()}
        )
        # planning has met the other ranks, and settle_sizes will: only what comes now may differ between them
        if not kernels_are_there(local.device):
            self._note(f"gathers on {local.device.type} run as in stock FSDP2: {VARIABLE} asks for the reference, or the CUDA "
                       "kernels cannot run here")  # fmt: skip
            return None
        if not cut.is_flat:
            self._note("on CUDA gathers are flat: topology='hierarchical' runs as in stock FSDP2")
            return None
        if layout.is_raw:
            return None
        why_uncoded = nvcomp.why_not_available()
        if why_uncoded is not None:
            self._counts.note(f"nothing is entropy-coded: {why_uncoded}")
        return DeviceStream(module, self.policy, layout, group, cut, local.device)

    def _note(self, text: str) -> None:
        """Once in `stats`, and once as a warning."""
        if text not in self._counts.notes:
            self._counts.note(text)
            warnings.warn(f"fsdp_ciera: {text}", stacklevel=2)

    def _gather_plain(
        self, output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup, async_op: bool, layout: Layout | None
    ) -> dist.Work | None:
        per_value = (group.size() - 1) * local.element_size()
        shares = (
            [("other", local.numel())] if layout is None else [(run.category, run.num_values) for run in layout.runs]
        )
        runs = [(category, "raw", per_value * size, per_value * size) for category, size in shares]
        sent = per_value * local.numel()
        self._counts.world_size = group.size()
        self._counts.count(f"plain/{group_phase(self.param_group)}", [("flat", sent, sent)], runs)
        work = all_gather_flat(output, local, group, async_op)
        return work if async_op else None

    def _stream(self, local: torch.Tensor, group: dist.ProcessGroup) -> Stream:
        key = (group.group_name, local.dtype, local.numel())  # See [Note: One state per stream]
        if key not in self._streams:
            self._streams[key] = self._open_stream(local, group, self._changes.setdefault(key, Changes()))
        return self._streams[key]

    def _open_stream(self, local: torch.Tensor, group: dist.ProcessGroup, changes: Changes) -> Stream:
        module, layout, cut = self._lay_out(local, group, {name: codec.supports for name, codec in CODECS.items()})
        assert self.cohort is not None
        return Stream(module, self.policy, layout, group, cut, changes, self.cohort.decodes_in_place(self))

    def _lay_out(
        self, local: torch.Tensor, group: dist.ProcessGroup, supports: Mapping[str, Callable[[torch.dtype], bool]]
    ) -> tuple[str, Layout, Cut]:
        """The module's name, the runs of a shard [num_values], and how nodes cut its group. Plans, where nobody has yet.

        `supports` says for each codec that can run here whether it can send a dtype.
        """
        module, names, sizes = param_names_and_sizes(self.param_group, local.dtype)
        if self.planned_codecs is None:
            plan_for(self, local.dtype, group)
        assert self.planned_codecs is not None
        missing = sorted(set(self.planned_codecs) - set(supports))
        if missing:
            self._counts.note(f"{' and '.join(missing)} cannot run on {local.device.type} yet and goes raw there")
        codecs = [
            codec if codec in supports and supports[codec](local.dtype) else "raw" for codec in self.planned_codecs
        ]
        layout = build_layout(names, sizes, codecs, local.numel(), local.dtype)
        if layout.is_raw and any(codec != "raw" for codec in self.policy.codecs) and local.dtype == torch.uint8:
            self._counts.note(f"{module}: a group of mixed dtypes is gathered as bytes, so it goes raw")
        cut = cut_of(dist.get_process_group_ranks(group), self.policy)
        if self.policy.topology == "hierarchical" and cut.is_flat and group.size() > 1:
            self._counts.note(
                f"nodes of {ranks_per_node_of(self.policy)} ranks do not cut a group of {group.size()} ranks into several "
                "equal parts of several ranks, so it is gathered flat"
            )
        return module, layout, cut
