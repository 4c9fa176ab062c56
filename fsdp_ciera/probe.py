"""`Probe`: what every codec would have sent of a group's shard after an optimizer step, measured in the run itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.codecs import CODECS
from fsdp_ciera.entropy import SectionWriter
from fsdp_ciera.kernels.ops import empty_bytes
from fsdp_ciera.shapes import GroupShape


class Probe:
    """Keeps a group's shard over one change of its weights, and measures all codecs on what changed.

    Memory: a copy of the own shard from one optimizer step to the next, when a plan is due. Cost: every codec encodes the
    shard twice.
    """

    def __init__(self, shape: GroupShape, codecs: Sequence[str], block_size: int) -> None:
        self._shape = shape
        self._codecs = tuple(codecs)
        self._block_size = block_size
        self._kept: tuple[int, torch.Tensor] | None = None
        self._found = np.full((len(shape.sizes), len(codecs)), np.nan)
        self._is_fresh = False

    def look_at(self, local: torch.Tensor, step: int) -> None:
        """The shard [num_values] after `step` changes: the first is kept, the next one compared with it, others ignored."""
        if self._is_fresh or local.dtype != self._shape.dtype or len(local) != sum(self._shape.sizes):
            return
        if self._kept is not None and self._kept[0] == step:
            return
        try:  # a rank alone must not leave the gather: the plan goes on with what is known
            kept, self._kept = self._kept, None
            if kept is None:
                self._kept = (step, local.clone())
            else:
                self._is_fresh = True
                self._found = self._compare(kept[1], local)
        except Exception as error:
            warnings.warn(f"fsdp_ciera: could not measure rates for a new plan: {error!r}", stacklevel=2)

    def take(self) -> npt.NDArray[np.float64]:
        """Bytes of each parameter by each codec, float64 [parameters, codecs], NaN where that is not known: as of the last
        two shards that were compared. From now on new ones are."""
        self._is_fresh = False
        return self._found

    def _compare(self, last: torch.Tensor, fresh: torch.Tensor) -> npt.NDArray[np.float64]:
        found = np.full((len(self._shape.sizes), len(self._codecs)), np.nan)
        start = 0
        for place, size in enumerate(self._shape.sizes):
            stretch = slice(start, start + size)
            for number, codec in enumerate(self._codecs):
                if CODECS[codec].supports(fresh.dtype) and size:
                    num_bytes = first_payload_bytes(codec, last[stretch], fresh[stretch], self._block_size)
                    found[place, number] = num_bytes
            start += size
        return found


def first_payload_bytes(codec: str, last: torch.Tensor, fresh: torch.Tensor, block_size: int) -> int:
    """What `codec` sends of a shard [num_values] that was `last` and is `fresh`: fixed part and sections, in bytes.

    Entries of section tables are not in it. Cost: two encodes (one of a codec without memory). Memory: the codec's sender
    state and one payload.
    """
    sender = CODECS[codec](len(fresh), fresh.dtype, block_size, 0)
    room = empty_bytes(sender.most_section_bytes)
    fixed = torch.from_numpy(empty_bytes(sender.fixed_bytes))
    for values in (fresh,) if sender.stateless else (last, fresh):
        sections = SectionWriter(room)
        sender.detect(values)
        sender.compress(values, fixed, sections)
    return sender.fixed_bytes + sections.num_bytes
