"""Flags that kernels set, on their way to the host without a wait.

[Note: Told late] A flag is copied to pinned memory behind each gather, and read when a later gather finds the copy done. So an
error comes some gathers after its cause, on the rank that saw it; the next `settle_sizes` tells all ranks. Between the last
gather and that, or the end of the program, nobody looks. Test: test_device_gather.py, weights changed behind our back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fsdp_ciera.errors import CieraDesyncError

ADVICE = (
    "Weights changed after settle_sizes(model) and before they were gathered, or a payload was damaged. What was computed "
    "with them is wrong. Call settle_sizes(model) on all ranks after the last change of the weights (an optimizer step, "
    "load_state_dict) and before the next forward; fsdp_ciera.detach(model) goes on with stock FSDP2"
)


@dataclass
class DamageWatch:
    """The flags of all streams that were settled together: int32 [1] each, 0 while all is well."""

    _told: dict[str, tuple[torch.Tensor, torch.cuda.Event | None]] = field(default_factory=dict)

    def tell(self, module: str, damage: torch.Tensor) -> None:
        """Sends a flag on its way, behind what was launched so far. Waits for nothing."""
        is_cuda = damage.device.type == "cuda"
        told, event = self._told.get(module, (None, None))
        if told is None:
            told = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
            event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        told.copy_(damage, non_blocking=True)
        if event is not None:
            event.record()
        self._told[module] = told, event

    def look(self) -> None:
        """Raises `CieraDesyncError` where a flag that has arrived is set. Waits for nothing. See [Note: Told late]."""
        for module, (told, event) in self._told.items():
            arrived = event is None or event.query()  # type: ignore[no-untyped-call]
            if arrived and int(told):
                raise CieraDesyncError(f"module {module!r}: {ADVICE}")
