"""`CieraAllGather`: the all-gather that FSDP2 calls, one object per parameter group.

    allocate   FSDP2 asks for the output and copies the local shards into this rank's slot of it
    __call__   encode -> sizes -> gather -> decode into the other ranks' slots

The parts: layout.py names the runs, lockstep.py encodes and decodes, wire.py lays out bytes, handshake.py settles.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ciera._compat import (
    AllGather,
    FSDPParamGroup,
    all_gather_bytes,
    all_gather_flat,
    group_phase,
    names_are_known,
    param_names_and_sizes,
)
from fsdp_ciera.handshake import Agreement, settle
from fsdp_ciera.kernels.reference import checksum
from fsdp_ciera.layout import Layout, Run, build_layout
from fsdp_ciera.lockstep import Encoded, LockstepState
from fsdp_ciera.plan import codecs_of
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.statistics import CieraStats
from fsdp_ciera.verification import check_against_raw, check_checksums
from fsdp_ciera.version import __version__
from fsdp_ciera.wire import (
    HEADER_BYTES,
    WIRE_VERSION,
    Status,
    encode_descriptor,
    fingerprint_of,
    pack_header,
    unpack_headers,
)


class CieraAllGather(AllGather):
    """FSDP2's all-gather of one parameter group, lossless and in fewer bytes.

    What comes out of a call is bit for bit what a plain all-gather gives. On CPU (gloo) a call makes two collectives on
    the process group that FSDP2 passes in: a header of 64 bytes a rank, then the payloads. On other devices nothing is
    compressed yet: the plain all-gather runs, and `stats` says so.

    Memory besides the caches, while a call runs: the payloads of all ranks (less than the output), and at most a few
    times one rank's shard.

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
        self.planned_codecs: tuple[str, ...] | None = None
        """The codec of each parameter; decided at the first gather (fsdp_ciera.plan)."""
        self._counts = CieraStats()
        self._streams: dict[tuple[str, torch.dtype, int], _Stream] = {}

    # FSDP2's side

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The output buffer: fresh for every gather, since FSDP2 holds several at once."""
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
        if output_tensor.device.type != "cpu" or input_tensor.numel() == 0 or not names_known:
            return self._gather_plain(output_tensor, input_tensor, group, async_op)
        with torch.inference_mode(False), torch.no_grad():
            stream = self._stream(input_tensor, group)
            try:
                self._gather(stream, output_tensor.view(group.size(), -1), input_tensor, group)
            except BaseException:
                stream.state.forget()  # See [Note: Any doubt ends in a full gather]
                raise
        return None

    # Our side

    def invalidate(self) -> None:
        """The next gather of every stream is a full one."""
        for stream in self._streams.values():
            stream.state.forget()

    def stats(self) -> CieraStats:
        """A copy of the counts so far, with the caches held now."""
        report = CieraStats()
        report.merge(self._counts)
        for stream in self._streams.values():
            report.cache_bytes += stream.state.cache_bytes
            report.world_size = max(report.world_size, stream.state.world_size)
            for stage, seconds in stream.state.stage_seconds.items():
                report.stage_seconds[stage] = report.stage_seconds.get(stage, 0.0) + seconds
        return report

    def _gather(self, stream: _Stream, output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup) -> None:
        state = stream.state
        header_bytes = 0
        local_checksum = int(checksum(local.view(1, -1)))
        agreement = Agreement.RESTART
        while agreement is Agreement.RESTART:
            encoded, failure = self._encode(state, local)
            announced = stream.descriptor_text if failure is None else repr(failure).encode()
            header = pack_header(
                status=Status.READY if failure is None else Status.ENCODE_FAILED,
                fingerprint=stream.fingerprint,
                sequence=state.sequence + 1,
                base=state.base,
                payload_bytes=encoded.num_bytes if encoded is not None else 0,
                checksum=local_checksum,
                descriptor_bytes=len(announced),
            )
            with state.stage("AllGather"):
                headers = unpack_headers(all_gather_bytes(header, group))
            header_bytes += (state.world_size - 1) * HEADER_BYTES
            agreement = settle(headers, stream.descriptor, announced, group, failure)
            if agreement is Agreement.RESTART:
                state.forget()
        assert encoded is not None
        sequence = int(headers["sequence"].max())
        sizes = [int(size) for size in headers["payload_bytes"]]
        check_is_due = self._check_is_due(sequence)
        failure = self._exchange_payloads(state, encoded, sizes, output, local, group)
        if failure is not None and not check_is_due:
            raise failure
        checksums = tuple(int(value) for value in headers["checksum"])
        phase = f"{'cold' if not state.base else 'repeat' if checksums == state.checksums else 'first'}/" + group_phase(
            self.param_group
        )
        if state.base:
            self._counts.num_blocks += encoded.num_blocks
            self._counts.num_blocks_reused += encoded.num_blocks_reused
        state.commit(sequence, checksums)
        self._count(state, phase, encoded, header_bytes, max(sizes))
        if check_is_due:
            if self.policy.verify == "every":
                sent = check_checksums(output, headers["checksum"], group, stream.where, failure)
            else:
                sent = check_against_raw(output, local, group, stream.where, failure)
            self._counts.count_check(phase, sent)

    def _encode(self, state: LockstepState, local: torch.Tensor) -> tuple[Encoded | None, Exception | None]:
        """A rank that cannot encode must not leave its peers waiting: it tells them, and all raise together."""
        if state.layout.is_raw:
            return Encoded.raw(local, state.layout), None
        try:
            state.prepare()  # our largest allocation: should it fail, the peers hear of it too
            return state.encode(local), None
        except Exception as failure:
            return None, failure

    def _exchange_payloads(
        self,
        state: LockstepState,
        encoded: Encoded,
        sizes: Sequence[int],
        output: torch.Tensor,
        local: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> Exception | None:
        """Gathers and decodes; returns what went wrong in decoding, since a check that is due must be run all the same."""
        if state.layout.is_raw:
            with state.stage("AllGather"):
                all_gather_flat(output.view(-1).view(torch.uint8), local.view(torch.uint8), group, async_op=False)
            return None
        payloads = torch.empty(state.world_size, max(sizes), dtype=torch.uint8)
        if max(sizes):  # the same on all ranks: where nothing changed anywhere, nothing moves
            with state.stage("AllGather"):
                all_gather_flat(payloads.view(-1), encoded.payload(max(sizes)), group, async_op=False)
        try:
            state.decode(payloads, sizes, output)
        except Exception as failure:
            return failure
        return None

    def _check_is_due(self, sequence: int) -> bool:
        verify = self.policy.verify
        return verify == "every" or (isinstance(verify, int) and sequence % verify == 0)

    def _count(self, state: LockstepState, phase: str, encoded: Encoded, header_bytes: int, padded_bytes: int) -> None:
        num_peers = state.world_size - 1
        item_bytes = state.layout.dtype.itemsize
        runs = zip(state.layout.runs, encoded.run_bytes, strict=True)
        self._counts.count(
            phase,
            num_peers * state.layout.num_values * item_bytes,
            header_bytes + num_peers * padded_bytes,
            [(r.category, r.codec, num_peers * r.num_values * item_bytes, num_peers * sent) for r, sent in runs],
        )

    def _gather_plain(
        self, output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        device = output.device.type
        if device != "cpu" and not self._counts.notes:
            text = f"gathers on {device} are not compressed yet: they run as in stock FSDP2"
            self._counts.note(text)
            warnings.warn(f"fsdp_ciera: {text}", stacklevel=2)
        sent = (group.size() - 1) * local.numel() * local.element_size()
        self._counts.world_size = group.size()
        self._counts.count(f"plain/{group_phase(self.param_group)}", sent, sent, [("other", "raw", sent, sent)])
        work = all_gather_flat(output, local, group, async_op)
        return work if async_op else None

    def _stream(self, local: torch.Tensor, group: dist.ProcessGroup) -> _Stream:
        key = (group.group_name, local.dtype, local.numel())  # See [Note: One state per stream]
        if key not in self._streams:
            self._streams[key] = self._open_stream(local, group)
        return self._streams[key]

    def _open_stream(self, local: torch.Tensor, group: dist.ProcessGroup) -> _Stream:
        module, names, sizes = param_names_and_sizes(self.param_group, local.dtype)
        codecs = codecs_of(self, local.dtype, group)
        layout = build_layout(names, sizes, codecs, local.numel(), local.dtype)
        if layout.is_raw and any(codec != "raw" for codec in self.policy.codecs) and local.dtype == torch.uint8:
            self._counts.note(f"{module}: a group of mixed dtypes is gathered as bytes, so it goes raw")
        state = LockstepState(layout, self.policy.block_size, group.size(), group.rank())
        descriptor = describe(module, self.policy, layout, group.size())
        return _Stream(state, descriptor)


class _Stream:
    """A `LockstepState` with the identity that every header of it carries."""

    def __init__(self, state: LockstepState, descriptor: dict[str, Any]) -> None:
        self.state = state
        self.descriptor = descriptor
        self.descriptor_text = encode_descriptor(descriptor)
        self.fingerprint = fingerprint_of(descriptor)
        self.where = f"module {descriptor['module']!r}"


def describe(module: str, policy: CieraPolicy, layout: Layout, world_size: int) -> dict[str, Any]:
    """What all ranks of a group must have in common, field by field."""

    def label(run: Run) -> str:
        return f"{run.category}:{run.codec}:{run.num_values}"

    return {
        "module": module,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "num_values": layout.num_values,
        "group_size": world_size,
        "fsdp_ciera version": __version__,
        "wire version": WIRE_VERSION,
        "torch version": torch.__version__.split("+")[0],
        "layout": [label(run) for run in layout.runs],
        **{f"policy.{name}": value for name, value in policy.to_dict().items()},
    }
