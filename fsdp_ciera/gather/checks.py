"""`verify=`: checks of what was decoded. Every check ends in one exchange, so that all ranks raise together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_bytes, all_gather_flat
from fsdp_ciera.errors import CieraVerifyError
from fsdp_ciera.kernels.dispatch import kernels_of
from fsdp_ciera.kernels.formats import FORMATS

_NO_DIFFERENCE, _COULD_NOT_DECODE = -1, -2
_REPORT = np.dtype([("sender", "<i8"), ("index", "<i8"), ("got", "<u8"), ("expected", "<u8")])


def check_checksums(
    output: torch.Tensor,
    expected: np.ndarray[Any, Any],
    group: dist.ProcessGroup,
    where: str,
    failure: Exception | None,
) -> int:
    """Compares the checksum of each rank's slot of `output` [world_size, num_values] with the sender's (uint64).

    `failure` is what kept this rank from decoding at all. Returns the bytes this rank sent for the check. Raises
    `CieraVerifyError` on all ranks when any rank finds a difference or could not decode.
    """
    got = kernels_of(output).checksum(output).numpy().view("<u8")
    report = _no_report()
    wrong = np.flatnonzero(got != expected)
    if len(wrong):
        sender = int(wrong[0])
        report[0] = (sender, -1, got[sender], expected[sender])
    return _agree(report, group, where, failure)


def check_against_raw(
    output: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup, where: str, failure: Exception | None
) -> int:
    """Gathers `local` raw beside `output` [world_size, num_values] and compares bit for bit. Otherwise as above."""
    shadow = torch.empty_like(output)
    all_gather_flat(shadow.view(-1).view(torch.uint8), local.clone().view(torch.uint8), group, async_op=False)
    bits = FORMATS[output.dtype].int_dtype if output.dtype in FORMATS else torch.uint8
    ours, theirs = output.contiguous().view(bits), shadow.view(bits)
    report = _no_report()
    different = torch.nonzero(ours != theirs)
    if len(different):
        sender, index = different[0].tolist()
        mask = (1 << 8 * ours.element_size()) - 1
        report[0] = (sender, index, int(ours[sender, index]) & mask, int(theirs[sender, index]) & mask)
    sent = (group.size() - 1) * local.numel() * local.element_size()
    return sent + _agree(report, group, where, failure)


def _no_report() -> np.ndarray[Any, Any]:
    report = np.zeros(1, _REPORT)
    report["sender"] = _NO_DIFFERENCE
    return report


def _agree(report: np.ndarray[Any, Any], group: dist.ProcessGroup, where: str, failure: Exception | None) -> int:
    if failure is not None:
        report["sender"] = _COULD_NOT_DECODE
    reports = all_gather_bytes(torch.from_numpy(report.view(np.uint8)), group).numpy().view(_REPORT).reshape(-1)
    lines = []
    for receiver, (sender, index, got, expected) in enumerate(reports.tolist()):
        if sender == _COULD_NOT_DECODE:
            lines.append(f"rank {receiver} could not decode (its own traceback says why)")
        elif sender != _NO_DIFFERENCE:
            what = f"checksum {got:#x}" if index < 0 else f"value {index} is {got:#x}"
            lines.append(f"rank {receiver} decoded rank {sender}'s shard wrongly: {what}, sent was {expected:#x}")
    if lines:
        raise CieraVerifyError(
            f"{where}: " + "; ".join(lines) + ". Please report it; fsdp_ciera.detach(model) goes on with stock FSDP2"
        ) from failure
    return (group.size() - 1) * _REPORT.itemsize
