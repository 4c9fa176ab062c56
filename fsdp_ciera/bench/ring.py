"""A reduce-scatter for gloo, the same for all contenders.

[Note: gloo's reduce-scatter] gloo's own is an all-reduce whose rest is thrown away: twice the bytes (measured at 200 Mbit/s:
2.14 s for what an all-gather of the same shards does in 1.08 s). Every contender would carry that weight, and none of it is
theirs: NCCL's ring sends (world_size - 1) shards, and so does this one. `--reduce-scatter gloo` leaves gloo's in place.
Test: test_bench_stand.py, the ring adds what gloo adds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ring_reduce_scatter(output: Tensor, values: Tensor, op: Any, process_group: dist.ProcessGroup) -> None:
    """Writes to `output` [n] this rank's stretch of the sum (or mean) over ranks of `values` [world_size * n].

    Sums travel once round the ring, in the dtype of `values`, as in NCCL's ring; each rank's stretch is added up in the order
    of the ranks behind that rank. Sends (world_size - 1) x n values. Raises `ValueError` for another `op` than SUM and AVG.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(
            f"op={op!r} is not SUM or AVG, which is all that the ring reduces: measure with --reduce-scatter gloo"
        )
    world_size, rank = process_group.size(), process_group.rank()
    chunks = values.reshape(world_size, -1)
    sums = chunks[(rank - 1) % world_size].clone()
    received = torch.empty_like(sums)
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    for hop in range(world_size - 1):
        receiving = dist.irecv(received, group=process_group, group_src=behind)
        sending = dist.isend(sums, group=process_group, group_dst=ahead)
        assert receiving is not None and sending is not None
        receiving.wait()
        sending.wait()
        torch.add(received, chunks[(rank - 2 - hop) % world_size], out=sums)
    if op == dist.ReduceOp.AVG:
        sums /= world_size
    output.view(-1).copy_(sums)
