"""`inject`: makes this rank do something wrong on purpose.

Each fault stands for something that happens in the field. After each, all ranks either raise an error with a name, or get the
right values all the same. Nothing here runs unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fsdp_ciera.gather import exchange
from fsdp_ciera.gather.channel import Channel
from fsdp_ciera.kernels.heads import HEAD_BYTES

FAULTS = {
    "cannot_encode": "memory runs out while this rank makes its payloads",
    "cannot_decode": "memory runs out while this rank decodes",
    "damaged_payload": "every byte behind the heads of what this rank receives is 0xFF",
    "damaged_head": "every head of what this rank receives is 0xFF",
    "late_write": "the first value of this rank's shard changes after the ranks have agreed on what they send",
}
"""The faults that `inject` knows, and what each does."""


@contextmanager
def inject(fault: str, modules: str = "") -> Iterator[list[str]]:
    """Until the block ends, this rank does `fault` in gathers of modules whose name begins with `modules`.

    Yields a list, to which each faulty gather appends the name of its module. Raises `ValueError` for a fault that is not in
    `FAULTS`.
    """
    if fault not in FAULTS:
        raise ValueError(f"fault={fault!r} is not one of {', '.join(FAULTS)}")
    faulty: list[str] = []

    def is_due(channel: Channel) -> bool:
        module = str(channel.descriptor["module"])
        if not module.startswith(modules):
            return False
        faulty.append(module)
        return True

    with _WAYS[fault](is_due):
        yield faulty


IsDue = Callable[[Channel], bool]


def _raising(method: str) -> Callable[[IsDue], Any]:
    real = getattr(Channel, method)

    def patch(is_due: IsDue) -> Any:
        def fail(self: Channel, *args: Any, **kwargs: Any) -> Any:
            if is_due(self):
                raise torch.OutOfMemoryError(f"injected into {self.where}")
            return real(self, *args, **kwargs)

        return mock.patch.object(Channel, method, fail)

    return patch


def _late_write(is_due: IsDue) -> Any:
    real = exchange.deliver

    def deliver(channel: Channel, settled: Any, output: Any, values: torch.Tensor, checksum: Any) -> Any:
        if is_due(channel):
            values.view(torch.uint8)[:1] ^= 1
            checksum = channel.backend.checksum(values.view(1, -1))
        return real(channel, settled, output, values, checksum)

    from fsdp_ciera.gather import collective

    return mock.patch.object(collective, "deliver", deliver)


def _damaging(part: slice) -> Callable[[IsDue], Any]:
    real = exchange.receive_payloads

    def patch(is_due: IsDue) -> Any:
        def receive(channel: Channel, *args: Any) -> torch.Tensor:
            payloads = real(channel, *args)
            if payloads.shape[1] > HEAD_BYTES and is_due(channel):
                payloads[:, part] = 0xFF
            return payloads

        return mock.patch.object(exchange, "receive_payloads", receive)

    return patch


_WAYS: dict[str, Callable[[IsDue], Any]] = {
    "cannot_encode": _raising("announce"),
    "cannot_decode": _raising("decode"),
    "damaged_payload": _damaging(slice(HEAD_BYTES, None)),
    "damaged_head": _damaging(slice(0, HEAD_BYTES)),
    "late_write": _late_write,
}
