"""`value_delta`: which values changed, and by how many units in the last place. A repeat gather sends nothing.

sender    changed = values != own last values
          payload = positions | changes in ulp | literals, where a change is too large for a symbol
receiver  ValueCache[positions] = moved or replaced values;  copy ValueCache (not needed where the output is the cache)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fsdp_ciera.codecs.base import FloatCodec, UnitCoder


class ValueDelta(FloatCodec):
    """Sends the signed distance to the last value among the numbers of its format, for the values that changed.

    Wire, per value: 0.1 to 2 bits in the first gather after an optimizer step, 0 in the next ones. Memory: the own shard
    and every peer's once more, in the gathered dtype (2 bytes a value of bf16). Exact for every bit pattern: distances
    are taken between bit patterns in the order of the numbers, and wrap around. A distance too large for
    its symbol travels as the value itself, a *literal*.

    [Note: The output is the cache] ValueCache has a row for every rank: the last values of the own shard, with which the sender
    compares, and those of the peers. In place, these rows are the output of the last gather, which FSDP2 gets again for the
    next one: FSDP2 writes the own row, `decode` writes the changed values of the others, and a repeat gather touches none of
    them. Test: test_codecs.py, decode in place.
    """

    name: ClassVar[str] = "value_delta"
    can_decode_in_place: ClassVar[bool] = True

    def __init__(self, coder: UnitCoder, in_place: bool = False) -> None:
        super().__init__(coder, in_place)
        self._value_cache: torch.Tensor | None = None  # [world_size, ...]

    @classmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Bytes of ValueCache, with this rank's row."""
        return (num_peers + 1) * num_values * dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """0: where nothing changed, nothing travels."""
        return 0

    def prepare(self) -> None:
        """Allocates ValueCache, unless an output serves as it."""
        if not self.is_in_place and self._value_cache is None:
            self._value_cache = self.coder.value_rows()

    def encode(self, values: torch.Tensor, sections: Any, is_full: bool) -> None:
        """Adds positions, changes and literals."""
        rows = None if is_full else self._value_cache
        self.coder.write_value_changes(values, rows, self.is_in_place, sections)

    def fill(self, values: torch.Tensor, fixed: Any) -> None:
        """Writes this rank's row of ValueCache, where FSDP2 has not done it."""
        if not self.is_in_place:
            assert self._value_cache is not None
            self.coder.keep_own_values(values, self._value_cache)

    def decode(self, received: Any, output: torch.Tensor) -> None:
        """Changes ValueCache, and copies it to `output` where that is not the cache. `received` is `None` where no payload
        travelled, since no value changed."""
        rows = self._value_cache
        if self.is_in_place:
            if rows is not None and rows.data_ptr() != output.data_ptr():  # FSDP2 was given another output
                self.coder.copy_values(rows, output, is_flat=True)
            rows = self._value_cache = output
        assert rows is not None
        if received is not None:
            self.coder.read_value_changes(received, rows, self.is_in_place)
        if not self.is_in_place:
            self.coder.copy_values(rows, output, is_flat=False)

    def seed(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """Keeps all shards in ValueCache."""
        if self.is_in_place:
            self._value_cache = output
            return
        self.prepare()
        assert self._value_cache is not None
        self.coder.take_values(output, self._value_cache)

    def forget(self) -> None:
        """Drops ValueCache."""
        self._value_cache = None
