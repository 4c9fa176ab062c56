"""`Codec`, and the `UnitCoder` with which a backend serves it. A new codec is a subclass of `Codec` with its name in
`fsdp_ciera.codecs.CODECS`.

    at the agreement   encode   Hash and Cmp: the changes of the own shard -> sections. Changes no state
    in the gather      fill     the fixed part of the payload, whose size all ranks know. The sender's state moves on
                       decode   Decmp: all peers' payloads -> their shards, bit for bit. The receiver's state moves on

One class a codec, for all devices. How sections are coded (gaps, bitmaps, nibbles, zstd; tiles on CUDA) and which kernels run
is the business of the backend's `UnitCoder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from fsdp_ciera.kernels.formats import FORMATS


@dataclass(frozen=True)
class Unit:
    """Stretches of a channel's flat buffer that one codec codes together, and the ranks that exchange them.

    On CPU every run is a unit. On CUDA all runs with the same codec are one unit, since runs are an axis of its kernels.
    """

    stretches: tuple[tuple[int, int], ...]
    """(start, number of values) of each run."""
    dtype: torch.dtype
    block_size: int
    """The number of values in a block (the paper's B)."""
    world_size: int
    """The number of ranks that exchange payloads."""
    rank: int
    """The index of this rank among them."""

    @property
    def num_values(self) -> int:
        """The number of values of one rank's shard in this unit."""
        return sum(num_values for _, num_values in self.stretches)

    @property
    def num_peers(self) -> int:
        """The number of other ranks."""
        return self.world_size - 1

    @property
    def item_bytes(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize


class UnitCoder(Protocol):
    """Writes and reads the parts of one unit's payloads, with one backend's kernels and codings.

    `values` is this rank's whole shard [n], and `output` holds all ranks' shards [world_size, n]: the coder takes the unit's
    stretches out of them. `sections` is the backend's collector of sections, `fixed` the unit's fixed part of a payload, and
    `received` holds all peers' payloads: only the backend looks into these three. Rows of `exponents` are those of the peers in
    order, without this rank's own; rows of values are those of all ranks. Reading raises `CieraDecodeError` or sets a flag
    where a payload is damaged, see `fsdp_ciera.backends.base.Backend`.
    """

    unit: Unit

    @property
    def plane_bytes(self) -> int:
        """Bytes of the sign+mantissa plane of one rank's unit."""

    @property
    def symbol_plane_bytes(self) -> int:
        """Bytes of the plane, with the part of the exponents that `write_symbols` leaves for the fixed part."""

    @property
    def raw_bytes(self) -> int:
        """Bytes of one rank's unit as it is."""

    def num_sections(self, codec: str) -> int:
        """The number of sections that the codec of that name writes here."""

    def most_section_bytes(self, codec: str) -> int:
        """The most bytes of sections that a payload can have."""

    # the fixed part

    def fill_raw(self, values: torch.Tensor, fixed: Any) -> None:
        """Writes the values as they are."""

    def fill_plane(self, values: torch.Tensor, fixed: Any, exponents: torch.Tensor | None = None) -> None:
        """Writes the sign+mantissa plane; and the exponents into `exponents`, uint8 [of one row], where given."""

    def fill_symbols(self, values: torch.Tensor, fixed: Any) -> None:
        """Writes the sign+mantissa plane, and the part of the exponents that `write_symbols` left; for the same values."""

    # state

    def exponent_rows(self, num_rows: int, in_blocks: bool = False) -> torch.Tensor:
        """Makes zeros, uint8 [num_rows, exponents of the unit], rounded up to whole blocks with `in_blocks`."""

    def value_rows(self) -> torch.Tensor:
        """Makes room for the unit's values of all ranks, [world_size, ...]."""

    def take_exponents(self, output: torch.Tensor, exponents: torch.Tensor) -> None:
        """Copies all peers' exponents out of an output into `exponents`."""

    def take_own_exponents(self, values: torch.Tensor, exponents: torch.Tensor) -> None:
        """Copies this rank's exponents into `exponents`, uint8 [of one row]."""

    def take_values(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies all ranks' values out of an output into `rows`."""

    def keep_own_values(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies this rank's values into its row."""

    # writing

    def hash_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Computes 128-bit hashes of the exponents of each block, int64 [num_blocks, 2] (paper 3.1)."""

    def write_symbols(self, values: torch.Tensor, sections: Any) -> None:
        """Adds sections of all exponents."""

    def write_blocks(
        self, values: torch.Tensor, hashes: torch.Tensor, last: torch.Tensor | None, sections: Any
    ) -> tuple[int, int]:
        """Adds sections of the exponents of blocks whose hash differs from that in `last`; of all blocks where that is `None`.
        Returns the number of blocks, and the number that need not be sent, as far as the host knows."""

    def write_exponent_changes(self, values: torch.Tensor, last: torch.Tensor | None, sections: Any) -> None:
        """Adds sections of the exponents' changes since `last`; of all exponents where that is `None`."""

    def write_value_changes(
        self, values: torch.Tensor, rows: torch.Tensor | None, is_flat: bool, sections: Any
    ) -> None:
        """Adds sections of the values' changes since this rank's row; of all values where `rows` is `None`. `is_flat`: the rows
        are an output."""

    # reading

    def read_raw(self, received: Any, output: torch.Tensor) -> None:
        """Copies the peers' values, which travelled as they are."""

    def merge_symbols(self, received: Any, output: torch.Tensor) -> None:
        """Merges exponents, all of them in the payload, and planes into values."""

    def read_blocks(self, received: Any, exponents: torch.Tensor) -> None:
        """Puts the sent blocks into the peers' exponents."""

    def read_exponent_changes(self, received: Any, exponents: torch.Tensor) -> None:
        """Applies the peers' changes to their exponents, in place."""

    def merge(self, exponents: torch.Tensor, received: Any, output: torch.Tensor) -> None:
        """Merges exponents and planes into values."""

    def read_value_changes(self, received: Any, rows: torch.Tensor, is_flat: bool) -> None:
        """Applies the peers' changes to their rows, in place. `is_flat`: the rows are an output."""

    def copy_values(self, rows: torch.Tensor, output: torch.Tensor, is_flat: bool) -> None:
        """Copies the peers' rows into an output. `is_flat`: the rows are an output, too."""


class Codec(ABC):
    """Codec and state of one unit on one rank: sends its own shard, and receives all others.

    Sender and receiver state move in lockstep, in the gather: when every rank has filled its payload and decoded all others,
    each state describes exactly the shards of that gather. `encode` may be called any number of times before, for different
    values: only the call whose sections the gather sends counts. Between gathers a codec holds its state and nothing else.

    [Note: State moves in the gather only] Sizes are agreed on before payloads move, and a parameter group may not be gathered
    then, or its weights may change once more. So `encode` compares with the shard of the last gather and writes no state. Test:
    test_codecs.py, encode twice.
    """

    name: ClassVar[str]
    stateless: ClassVar[bool] = False
    """Whether the same values always make the same payload. All others make empty sections of values that did not change."""
    can_decode_in_place: ClassVar[bool] = False
    """Whether the state is exactly the last decoded output, so that a held output can serve as state."""

    def __init__(self, coder: UnitCoder, in_place: bool = False) -> None:
        """`in_place`: the `output` of `decode` is kept as state, and passed in again with the last decoded values in it."""
        self.coder = coder
        self.unit = coder.unit
        self.is_in_place = in_place and self.can_decode_in_place

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """Whether values of `dtype` can be sent; runs of other dtypes go raw."""
        return True

    @classmethod
    @abstractmethod
    def cache_bytes(cls, num_values: int, dtype: torch.dtype, block_size: int, num_peers: int) -> int:
        """Bytes of state that a run takes on one rank once a gather has run."""

    @property
    @abstractmethod
    def fixed_bytes(self) -> int:
        """Bytes of the fixed part of one rank's payload for this unit."""

    @property
    def num_sections(self) -> int:
        """The number of sections of one rank's payload for this unit."""
        return self.coder.num_sections(self.name)

    def prepare(self) -> None:
        """PreDecmp: allocates the state, on first use."""
        return None

    def detect(self, values: torch.Tensor) -> None:
        """Hash: computes what `encode` needs to know of the shard [n]."""
        return None

    @abstractmethod
    def encode(self, values: torch.Tensor, sections: Any, is_full: bool) -> None:
        """Cmp: adds the sections of the shard [n]; with `is_full` it ignores the state, for receivers that have none. See
        [Note: State moves in the gather only]."""

    @abstractmethod
    def fill(self, values: torch.Tensor, fixed: Any) -> None:
        """Writes the fixed part. `values` are those that were encoded last; the sender's state now describes them."""

    @abstractmethod
    def decode(self, received: Any, output: torch.Tensor) -> None:
        """Decmp: decodes all peers' payloads into their rows of `output` [world_size, n]; this rank's row stays. After a
        damaged payload state and output mean nothing, and `forget` must follow."""

    def seed(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """Takes the shards in `output` as state, after they travelled as they are. `values` is this rank's row of `output`."""
        return None

    @property
    def block_counts(self) -> tuple[int, int]:
        """The number of blocks that the last `encode` looked at, and the number that need not be sent; for statistics."""
        return 0, 0

    def forget(self) -> None:
        """Drops all state, so that the next gather is a full one."""
        return None


class FloatCodec(Codec):
    """A codec that looks into the bits of bf16, fp16 and fp32; `format` says where they are."""

    def __init__(self, coder: UnitCoder, in_place: bool = False) -> None:
        super().__init__(coder, in_place)
        self.format = FORMATS[coder.unit.dtype]

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """Whether `dtype` is bf16, fp16 or fp32."""
        return dtype in FORMATS
