"""`Probe`: what every codec would have sent of a group's shard after an optimizer step, measured in the run itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from fsdp_ciera.codecs import CODECS
from fsdp_ciera.codecs.sections import SectionWriter
from fsdp_ciera.kernels.formats import FORMATS
from fsdp_ciera.kernels.memory import empty_bytes
from fsdp_ciera.planning.shapes import GroupShape
from fsdp_ciera.policies.categories import categorize


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
        """[Note: Measured in runs] Neighbours of one category and codec are one run, and codecs find repetitions across all of
        it (the demo's experts send a fifth less together than one by one). So runs are measured whole, and each parameter
        has its part of them: by its changed values, or by its values where changes hardly count. Test: test_planner.py,
        runs are measured whole.
        """
        sizes = np.array(self._shape.sizes)
        found = np.full((len(sizes), len(self._codecs)), np.nan)
        if fresh.dtype not in FORMATS:
            return found
        words = [values.view(FORMATS[fresh.dtype].int_dtype).numpy() for values in (last, fresh)]
        stops = np.cumsum(sizes)
        changed = np.array(
            [np.count_nonzero(words[0][a:b] != words[1][a:b]) for a, b in zip(stops - sizes, stops, strict=True)]
        )
        places = [place for place, size in enumerate(sizes) if size]
        for _, group in groupby(places, key=lambda place: categorize(self._shape.names[place])):
            run = list(group)
            stretch = slice(int(stops[run[0]] - sizes[run[0]]), int(stops[run[-1]]))
            for number, codec in enumerate(self._codecs):
                weights = changed[run] if codec == "value_delta" and changed[run].any() else sizes[run]
                num_bytes = first_payload_bytes(codec, last[stretch], fresh[stretch], self._block_size)
                found[run, number] = num_bytes * weights / weights.sum()
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
