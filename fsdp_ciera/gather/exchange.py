"""The payloads of one gather, on their way: every rank's payload in, every rank's shard out.

flat            gather payloads over the group  ->  decode into the output
hierarchical    gather payloads between nodes   ->  decode into a column (this rank's number on every node)
                gather columns inside the node  ->  copy into the output, in FSDP2's order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_flat
from fsdp_ciera.errors import CieraPeerError
from fsdp_ciera.gather.lockstep import Encoded
from fsdp_ciera.gather.sizes import DOUBT
from fsdp_ciera.gather.stream import Stream
from fsdp_ciera.gather.topology import node_groups_of
from fsdp_ciera.kernels.memory import empty_bytes

MARK_BYTES = 8


class Outcome(IntEnum):
    """How the payloads fared. Inside a node the ranks tell each other theirs; the worst one counts."""

    DECODED = 0
    DOUBTED = 1  # a rank did not send what it had promised: nobody decodes
    FAILED = 2


@dataclass
class Result:
    """An outcome, what went wrong when something did, and the bytes that left this rank, by link."""

    outcome: Outcome
    failure: Exception | None
    sent_bytes: int
    sent_in_node_bytes: int = 0


def exchange_payloads(
    stream: Stream,
    encoded: Encoded | None,
    sizes: Sequence[int],
    output: torch.Tensor,
    local: torch.Tensor,
    mark: int | None = None,
    own_mark: int = DOUBT,
) -> Result:
    """Gathers and decodes all payloads of a gather into `output` [world_size, num_values].

    `local` is this rank's slot of `output`, and stays as it is. `sizes` are all ranks' payloads in bytes. With a `mark`
    (sizes that were settled ahead) each payload travels with its rank's own mark behind it, and nothing is decoded unless
    all of them are `mark`; a rank without `encoded` cannot give it. A failure to decode is returned, since a check that is
    due must be run all the same.

    Memory: the payloads of all ranks that exchange them, padded to the largest; hierarchical besides that a column
    [num_nodes, num_values] and one more output. Communication: one all-gather (none when there is nothing to send), and
    one inside the node.
    """
    if stream.cut.is_flat:
        return _between_nodes(stream, encoded, sizes, output, local, mark, own_mark, stream.group)
    cut, layout = stream.cut, stream.layout
    groups = node_groups_of(stream.group, cut)
    item_bytes = layout.dtype.itemsize
    column_bytes = cut.num_nodes * layout.num_values * item_bytes
    column = torch.from_numpy(empty_bytes(column_bytes + MARK_BYTES))  # and how this rank fared
    shards = column[:column_bytes].view(layout.dtype).view(cut.num_nodes, layout.num_values)
    own = shards[cut.node_of(stream.rank)]
    own.copy_(local)
    sizes = sizes[cut.local_of(stream.rank) :: cut.ranks_per_node]
    result = _between_nodes(stream, encoded, sizes, shards, own, mark, own_mark, groups.between_nodes)
    column[column_bytes:] = int(result.outcome)
    with stream.state.stage("InNode"):
        columns = torch.from_numpy(empty_bytes(cut.ranks_per_node * column.numel())).view(cut.ranks_per_node, -1)
        all_gather_flat(columns.view(-1), column, groups.in_node, async_op=False)
    result.sent_in_node_bytes = (cut.ranks_per_node - 1) * column.numel()
    outcomes = columns[:, -1].tolist()
    result.outcome = Outcome(max(outcomes))
    if result.outcome is Outcome.FAILED and result.failure is None:
        result.failure = _failure_of_a_neighbour(stream, outcomes)
    if result.outcome is Outcome.DECODED:
        with stream.state.stage("InNode"):
            by_column = columns[:, :column_bytes].view(cut.ranks_per_node, cut.num_nodes, -1)
            rows = output.view(torch.uint8).view(cut.num_nodes, cut.ranks_per_node, -1)
            rows.copy_(by_column.transpose(0, 1))
    return result


def _between_nodes(
    stream: Stream,
    encoded: Encoded | None,
    sizes: Sequence[int],
    output: torch.Tensor,
    local: torch.Tensor,
    mark: int | None,
    own_mark: int,
    group: dist.ProcessGroup,
) -> Result:
    """Among the ranks that exchange payloads: sizes [num_nodes] and output [num_nodes, num_values] are theirs."""
    state = stream.state
    padded_bytes = max(sizes)
    num_peers = len(sizes) - 1
    if stream.layout.is_raw:
        assert mark is None, "a raw gather has no sizes to settle"
        with state.stage("AllGather"):
            all_gather_flat(output.view(-1).view(torch.uint8), local.view(torch.uint8), group, async_op=False)
        return Result(Outcome.DECODED, None, num_peers * padded_bytes)
    row_bytes = padded_bytes + (0 if mark is None else MARK_BYTES)
    payloads = torch.from_numpy(empty_bytes(len(sizes) * row_bytes)).view(len(sizes), row_bytes)
    if row_bytes:  # the same on all ranks: where nothing changed anywhere, nothing moves
        payload = _marked(encoded, row_bytes, mark, own_mark)
        with state.stage("AllGather"):
            all_gather_flat(payloads.view(-1), payload, group, async_op=False)
        del payload
    sent_bytes = num_peers * row_bytes
    if mark is not None:
        marks = payloads[:, padded_bytes:].contiguous().numpy().view("<u8")
        if (marks != mark).any():
            return Result(Outcome.DOUBTED, None, sent_bytes)
    try:
        state.decode(payloads, sizes, output)
    except Exception as failure:
        return Result(Outcome.FAILED, failure, sent_bytes)
    return Result(Outcome.DECODED, None, sent_bytes)


def _marked(encoded: Encoded | None, row_bytes: int, mark: int | None, own_mark: int) -> torch.Tensor:
    if mark is None:
        assert encoded is not None
        return encoded.payload(row_bytes)
    if encoded is None or own_mark != mark:  # nobody will decode it, and it may be longer than was promised
        return torch.zeros(row_bytes, dtype=torch.uint8)
    payload = encoded.payload(row_bytes)
    payload[-MARK_BYTES:] = torch.from_numpy(np.array([own_mark], "<u8").view(np.uint8))
    return payload


def _failure_of_a_neighbour(stream: Stream, outcomes: Sequence[int]) -> CieraPeerError:
    first = stream.cut.node_of(stream.rank) * stream.cut.ranks_per_node
    failed = [first + number for number, outcome in enumerate(outcomes) if outcome == Outcome.FAILED]
    return CieraPeerError(f"{stream.where}: ranks {failed} of the group could not decode; their own tracebacks say why")
