"""`Probe`: measures during training what every codec would have sent of a shard after an optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.backends.base import Backend, plan_payload
from fsdp_ciera.backends.cpu import CpuBackend
from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.base import Unit
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.heads import HEAD_BYTES, TABLE_ENTRY_BYTES
from fsdp_ciera.planning.shapes import GroupShape
from fsdp_ciera.policies.categories import categorize

_NO_LIMIT = 1 << 62


class Probe:
    """Keeps the shard of a parameter group over one change of its weights, and measures all codecs on the change.

    Memory: a copy of the own shard from one optimizer step to the next, when a plan is due. Cost: every codec encodes the
    shard twice.
    """

    def __init__(self, shape: GroupShape, codecs: Sequence[str], block_size: int, backend: Backend) -> None:
        self._shape = shape
        self._codecs = tuple(codecs)
        self._block_size = block_size
        self._backend = backend
        self._kept: tuple[int, torch.Tensor] | None = None
        self._measured_bytes = np.full((len(shape.sizes), len(codecs)), np.nan)
        self._is_fresh = False

    def wants(self, step: int) -> bool:
        """Whether the probe needs the shard after `step` changes of the weights."""
        return not self._is_fresh and (self._kept is None or self._kept[0] != step)

    def look_at(self, values: torch.Tensor, step: int) -> None:
        """Takes the shard [num_values] after `step` changes: keeps the first one, compares the next one with it, and ignores
        others."""
        if not self.wants(step) or values.dtype != self._shape.dtype or len(values) != sum(self._shape.sizes):
            return
        try:  # a rank alone must not leave the gather: the plan does without
            kept, self._kept = self._kept, None
            if kept is None:
                self._kept = (step, values.clone())
            else:
                self._is_fresh = True
                self._measured_bytes = self._compare(kept[1], values)
        except Exception as error:
            warnings.warn(f"fsdp_ciera: could not measure rates for a new plan: {error!r}", stacklevel=2)

    def take(self) -> npt.NDArray[np.float64]:
        """Bytes of each parameter by each codec for the last two shards that were compared, float64 [parameters, codecs]; NaN
        where they are not known. The probe then waits for two new shards."""
        self._is_fresh = False
        return self._measured_bytes

    def _compare(self, last: torch.Tensor, fresh: torch.Tensor) -> npt.NDArray[np.float64]:
        """[Note: Measured in runs] Neighbours of one category and codec are one run, and codecs find repetitions across all of
        it (the demo's experts send a fifth less together than one by one). So runs are measured whole, and each parameter
        gets its part of the bytes: in proportion to its changed values, or to its values where changes hardly count. Test:
        test_planner.py, runs are measured whole.
        """
        sizes = np.array(self._shape.sizes)
        measured_bytes = np.full((len(sizes), len(self._codecs)), np.nan)
        if fresh.dtype not in FORMATS:
            return measured_bytes
        stops = np.cumsum(sizes)
        is_changed = (
            (last.view(FORMATS[last.dtype].int_dtype) != fresh.view(FORMATS[fresh.dtype].int_dtype)).cpu().numpy()
        )
        changed = np.array([np.count_nonzero(is_changed[a:b]) for a, b in zip(stops - sizes, stops, strict=True)])
        shards = [shard for shard, size in enumerate(sizes) if size]
        for _, neighbours in groupby(shards, key=lambda shard: categorize(self._shape.names[shard])):
            run = list(neighbours)
            stretch = slice(int(stops[run[0]] - sizes[run[0]]), int(stops[run[-1]]))
            for column, codec in enumerate(self._codecs):
                weights = changed[run] if codec == "value_delta" and changed[run].any() else sizes[run]
                num_bytes = first_payload_bytes(codec, last[stretch], fresh[stretch], self._block_size, self._backend)
                measured_bytes[run, column] = num_bytes * weights / weights.sum()
        return measured_bytes


def first_payload_bytes(
    name: str, last: torch.Tensor, fresh: torch.Tensor, block_size: int, backend: Backend | None = None
) -> int:
    """The bytes that codec `name` sends for a shard [num_values] that was `last` and is now `fresh`: fixed part and sections,
    without head and section table.

    Cost: one encode, and the time that the codec takes to remember a shard. Memory: the codec's state of the own shard and one
    payload. The host waits for the device.
    """
    backend = backend or CpuBackend(fresh.device)
    unit = Unit(((0, len(fresh)),), fresh.dtype, block_size, 1, 0)
    codec = CODECS[name](backend.coder(unit, name, False))
    plan = plan_payload([codec], backend.alignment)
    codec.prepare()
    if not codec.stateless:
        codec.seed(last, last.view(1, -1))
    codec.detect(fresh)
    collector = backend.collector(plan, [codec])
    codec.encode(fresh, collector, is_full=codec.stateless)
    room_bytes = 3 * fresh.numel() * fresh.element_size()
    encoded = backend.seal(plan, [codec], collector, _NO_LIMIT, room_bytes)
    [num_bytes] = backend.read(encoded.payload_bytes)
    return max(0, int(num_bytes) - HEAD_BYTES - codec.num_sections * TABLE_ENTRY_BYTES)
