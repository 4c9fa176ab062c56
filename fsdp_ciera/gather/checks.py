"""`verify=`: checks of what was decoded. Every check ends in one exchange, so that all ranks raise together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fsdp_ciera._compat import all_gather_bytes, all_gather_flat
from fsdp_ciera.errors import CieraVerifyError
from fsdp_ciera.gather.channel import Channel
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.heads import Damage

_NO_DIFFERENCE, _COULD_NOT_DECODE = -1, -2
_REPORT = np.dtype([("sender", "<i8"), ("index", "<i8"), ("got", "<u8"), ("expected", "<u8")])


def check_checksums(channel: Channel, output: torch.Tensor, expected: torch.Tensor, failure: Exception | None) -> int:
    """Compares the checksum of each rank's slot of `output` [world_size, num_values] with the sender's, int64 [world_size].

    `failure` is the reason why this rank could not decode at all. Returns the bytes this rank sent for the check. Raises
    `CieraVerifyError` on all ranks when any rank finds a difference or could not decode.
    """
    got, sent = (sums.numpy().view("<u8") for sums in (channel.backend.checksum(output), expected.contiguous()))
    report = _no_report()
    wrong = np.flatnonzero(got != sent)
    if len(wrong):
        sender = int(wrong[0])
        report[0] = (sender, -1, got[sender], sent[sender])
    return _exchange_reports(report, channel, failure)


def flag_checksums(channel: Channel, output: torch.Tensor, expected: torch.Tensor | None) -> int:
    """Compares checksums as `check_checksums` does where the host may not look, and sets `Damage.WRONG_VALUES` where they
    differ. Sends nothing and returns 0. `expected` is `None` after a gather in which nothing travelled: it decodes nothing."""
    if expected is not None:
        got = channel.backend.checksum(output)
        channel.backend.flag_difference(got, expected, channel.damage, Damage.WRONG_VALUES)
    return 0


def check_against_raw(channel: Channel, output: torch.Tensor, values: torch.Tensor, failure: Exception | None) -> int:
    """Gathers `values` raw beside `output` [world_size, num_values] and compares bit for bit. Returns and raises as the
    functions above do."""
    process_group = channel.process_group
    raw_output = torch.empty_like(output)
    all_gather_flat(
        raw_output.view(-1).view(torch.uint8), values.clone().view(torch.uint8), process_group, async_op=False
    )
    sent_bytes = (process_group.size() - 1) * values.numel() * values.element_size()
    int_dtype = FORMATS[output.dtype].int_dtype if output.dtype in FORMATS else torch.uint8
    decoded, expected = output.contiguous().view(int_dtype), raw_output.view(int_dtype)
    if not channel.backend.checks_at_once:
        channel.backend.flag_difference(decoded, expected, channel.damage, Damage.WRONG_VALUES)
        return sent_bytes
    report = _no_report()
    different = torch.nonzero(decoded != expected)
    if len(different):
        sender, index = different[0].tolist()
        mask = (1 << 8 * decoded.element_size()) - 1
        report[0] = (sender, index, int(decoded[sender, index]) & mask, int(expected[sender, index]) & mask)
    return sent_bytes + _exchange_reports(report, channel, failure)


def _no_report() -> np.ndarray[Any, Any]:
    report = np.zeros(1, _REPORT)
    report["sender"] = _NO_DIFFERENCE
    return report


def _exchange_reports(report: np.ndarray[Any, Any], channel: Channel, failure: Exception | None) -> int:
    """Raises on all ranks what any rank reports. Returns the bytes this rank sent. Collective."""
    process_group = channel.process_group
    if failure is not None:
        report["sender"] = _COULD_NOT_DECODE
    gathered = all_gather_bytes(torch.from_numpy(report.view(np.uint8)), process_group)
    reports = gathered.numpy().view(_REPORT).reshape(-1)
    lines = []
    for receiver, (sender, index, got, expected) in enumerate(reports.tolist()):
        if sender == _COULD_NOT_DECODE:
            lines.append(f"rank {receiver} could not decode (its own traceback says why)")
        elif sender != _NO_DIFFERENCE:
            difference = f"checksum {got:#x}" if index < 0 else f"value {index} is {got:#x}"
            lines.append(f"rank {receiver} decoded rank {sender}'s shard wrongly: {difference}, sent was {expected:#x}")
    if lines:
        raise CieraVerifyError(
            f"{channel.where}: "
            + "; ".join(lines)
            + ". Please report it; fsdp_ciera.detach(model) goes on with stock FSDP2"
        ) from failure
    return (process_group.size() - 1) * _REPORT.itemsize
