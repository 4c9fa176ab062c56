"""One gather on its way: every rank's payload in, every rank's shard out.

flat            gather payloads over the process group  ->  check heads  ->  decode into the output
hierarchical    gather payloads between nodes           ->  check heads  ->  decode into a column (this rank's number on every
node)
                gather columns inside the node          ->  copy into the output, in FSDP2's order

Where the shards travel as they are, they go straight into their slots, and the heads beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_flat
from fsdp_ciera.errors import CieraPeerError
from fsdp_ciera.gather.channel import Channel, Column, Settled
from fsdp_ciera.gather.topology import node_groups_of
from fsdp_ciera.kernels.heads import FAILED, HEAD_BYTES, Damage

_NUMBER_BYTES = 8
COULD_NOT_DECODE = 1 << 16
"""A bit beside those of `Damage`, as ranks of a node tell each other."""


@dataclass
class Delivered:
    """The outcome of a gather, as far as the host may look."""

    flags: int
    """Bits of `Damage` that any rank of the node has seen, and `COULD_NOT_DECODE`; 0 where the host may not look yet."""
    checksums: torch.Tensor | None
    """The checksum of every rank's shard, as its sender says, int64 [world_size]; `None` where nothing travelled, since nothing
    changed."""
    failure: Exception | None
    """The reason why this rank could not make its payload, or could not decode."""
    sent_bytes: int
    """Bytes that this rank has sent to the ranks with which it exchanges payloads."""
    sent_in_node_bytes: int = 0
    """Bytes that this rank has sent inside its node."""


def deliver(
    channel: Channel, settled: Settled, output: torch.Tensor, values: torch.Tensor, checksum: torch.Tensor
) -> Delivered:
    """Fills `output` [world_size, num_values] as `settled` says; `values` is this rank's slot of it, and stays as it is.

    Memory while it runs: the payloads of all ranks that exchange them, padded to the largest (none where the shards travel as
    they are), and this rank's own payload. A hierarchical gather takes one more output besides and, where no codec decodes in
    place, a column [num_nodes, num_values]. Communication: one all-gather (a second one, of heads, where the shards travel as
    they are; none where there is nothing to send and nothing to check at once), and in a hierarchical gather one more inside
    the node.
    """
    cut = channel.cut
    if cut.is_flat:
        between = _between_nodes(channel, settled, output, values, checksum, channel.process_group)
        return Delivered(between.flags, between.checksums, between.failure, between.sent_bytes)
    node_groups = node_groups_of(channel.process_group, cut)
    column = channel.take_column()
    own_shard = column.shards[channel.row]
    own_shard.view(torch.uint8).copy_(values.view(torch.uint8))
    between = _between_nodes(channel, settled, column.shards, own_shard, checksum, node_groups.between_nodes)
    return _inside_node(channel, between, column, output, node_groups.in_node)


@dataclass
class _Between:
    """The outcome among the ranks that exchange payloads; fields as in `Delivered`."""

    flags: int
    checksums: torch.Tensor | None
    failure: Exception | None
    sent_bytes: int


def _between_nodes(
    channel: Channel,
    settled: Settled,
    rows: torch.Tensor,
    values: torch.Tensor,
    checksum: torch.Tensor,
    process_group: dist.ProcessGroup,
) -> _Between:
    """Fills `rows` [ranks, num_values] with the shards of the ranks that exchange payloads. Collective over them."""
    backend, num_bytes = channel.backend, settled.payload_bytes
    num_rows = len(rows)
    sent_bytes = (num_rows - 1) * num_bytes
    if num_bytes == HEAD_BYTES and not backend.checks_at_once:
        agreed = torch.zeros_like(checksum) if channel.announced is None else channel.announced.checksum
        backend.flag_difference(checksum, agreed, channel.damage, Damage.BROKEN_PROMISE)
        with channel.stage("Decmp"):
            channel.decode_nothing(rows)
        return _Between(0, None, None, 0)
    failure: Exception | None = None
    is_raw = num_bytes >= channel.raw_payload_bytes
    if is_raw:
        heads = backend.empty(num_rows * HEAD_BYTES).view(num_rows, HEAD_BYTES)
        head = channel.head(checksum, settled)
        with channel.stage("AllGather"):
            all_gather_flat(rows.view(-1).view(torch.uint8), values.view(torch.uint8), process_group, async_op=False)
            all_gather_flat(heads.view(-1), head, process_group, async_op=False)
        payloads = heads
    else:
        try:
            payload = channel.take_payload(values, checksum, settled)
        except Exception as error:  # the peers would wait for ever
            failure, payload = error, channel.empty_payload(num_bytes, FAILED)
        payloads = receive_payloads(channel, payload, num_rows, process_group)
        del payload
        heads = payloads[:, :HEAD_BYTES]
    name = channel.name_of(settled)
    row_ok = backend.check_heads(heads, channel.row, name, channel.damage)
    checksums = heads[:, _NUMBER_BYTES : 2 * _NUMBER_BYTES].contiguous().view(torch.int64).view(-1)
    flags = backend.damage_now(channel.damage)
    if not flags:
        try:
            with channel.stage("Decmp"):
                if is_raw:
                    channel.seed(values, rows)
                else:
                    channel.decode(payloads, row_ok, rows)
        except Exception as error:
            failure, flags = error, COULD_NOT_DECODE
    return _Between(flags, checksums, failure, sent_bytes)


def receive_payloads(
    channel: Channel, payload: torch.Tensor, num_rows: int, process_group: dist.ProcessGroup
) -> torch.Tensor:
    """Gathers this rank's payload, uint8 [payload_bytes] -> the payloads of all ranks, [num_rows, payload_bytes].
    Collective."""
    payloads = channel.backend.empty(num_rows * len(payload)).view(num_rows, -1)
    with channel.stage("AllGather"):
        all_gather_flat(payloads.view(-1), payload, process_group, async_op=False)
    return payloads


def _inside_node(
    channel: Channel, between: _Between, column: Column, output: torch.Tensor, in_node: dist.ProcessGroup
) -> Delivered:
    """Gathers the columns of all ranks of a node into `output`, and the flags and checksums that each has seen. Collective over
    `in_node`."""
    cut, backend = channel.cut, channel.backend
    tail = torch.zeros(1 + cut.num_nodes, dtype=torch.int64, device=backend.device)
    tail[0] = between.flags
    if not backend.checks_at_once:
        tail[:1] += channel.damage
    if between.checksums is not None:
        tail[1:] = between.checksums
    column.tail.copy_(tail.view(torch.uint8))
    with channel.stage("InNode"):
        columns = backend.empty(cut.ranks_per_node * column.buffer.numel()).view(cut.ranks_per_node, -1)
        all_gather_flat(columns.view(-1), column.buffer, in_node, async_op=False)
    shard_bytes = column.buffer.numel() - column.tail.numel()
    tails = columns[:, shard_bytes:].contiguous().view(torch.int64)
    flags = 0
    if backend.checks_at_once:
        for flags_seen in tails[:, 0].tolist():
            flags |= flags_seen
    else:
        bits = torch.arange(Damage.FOREIGN.bit_length(), dtype=torch.int64, device=backend.device)
        seen_by_any = (tails[:, :1].bitwise_right_shift(bits) & 1).amax(0)
        channel.damage |= seen_by_any.bitwise_left_shift(bits).sum().to(torch.int32)
    if not flags:
        with channel.stage("InNode"):
            by_column = columns[:, :shard_bytes].view(cut.ranks_per_node, cut.num_nodes, -1)
            rows = output.view(torch.uint8).view(cut.num_nodes, cut.ranks_per_node, -1)
            rows.copy_(by_column.transpose(0, 1))
    failure = between.failure
    if flags & COULD_NOT_DECODE and failure is None:
        first = cut.node_of(channel.rank) * cut.ranks_per_node
        failed = [
            first + number for number, flags_seen in enumerate(tails[:, 0].tolist()) if flags_seen & COULD_NOT_DECODE
        ]
        failure = CieraPeerError(
            f"{channel.where}: ranks {failed} of the group could not decode; their own tracebacks say why"
        )
    checksums = None if between.checksums is None else tails[:, 1:].t().reshape(-1)
    sent_in_node_bytes = (cut.ranks_per_node - 1) * column.buffer.numel()
    return Delivered(flags, checksums, failure, between.sent_bytes, sent_in_node_bytes)
