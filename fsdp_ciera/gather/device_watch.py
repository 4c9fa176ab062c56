"""Flags that kernels set, on their way to the host without a wait.

[Note: Told late] A flag is copied to pinned memory behind each gather, and read when a later gather finds the copy done. So an
error comes some gathers after its cause, on the rank that saw it, and not at the same gather on all ranks: it ends the job. The
next `settle_sizes` tells all ranks together. Between the last gather and that, or the end of the program, nobody looks.
Test: test_device_gather.py, weights changed behind our back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from fsdp_ciera.errors import CieraDesyncError

ADVICE = (
    "Weights changed after settle_sizes(model) and before they were gathered, or a payload was damaged. What was computed "
    "with them is wrong: start again from a checkpoint. Call settle_sizes(model) on all ranks after the last change of the "
    "weights (an optimizer step, load_state_dict) and before the next forward, or fsdp_ciera.detach(model) for stock FSDP2"
)


@dataclass
class DamageWatch:
    """The flags of all streams that were settled together: int32 [1] each, 0 while all is well."""

    _pinned: dict[int, torch.Tensor] = field(default_factory=dict)
    """By flag: where it arrives."""
    _pending: deque[tuple[str, torch.Tensor, torch.cuda.Event | None]] = field(default_factory=deque)

    def tell(self, module: str, damage: torch.Tensor) -> None:
        """Sends a flag on its way, behind what was launched so far. Waits for nothing but for the first time of a flag."""
        is_cuda = damage.device.type == "cuda"
        if id(damage) not in self._pinned:
            self._pinned[id(damage)] = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
        told = self._pinned[id(damage)]
        told.copy_(damage, non_blocking=True)
        event = None
        if is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending.append((module, told, event))

    def look(self) -> None:
        """Raises `CieraDesyncError` where a flag that has arrived is set. Waits for nothing. See [Note: Told late]."""
        while self._pending:
            module, told, event = self._pending[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return
            self._pending.popleft()
            if int(told):
                raise CieraDesyncError(f"module {module!r}: {ADVICE}")
