"""What a codec is, and what a backend does for it. A new codec is a subclass of `Codec` with its name in
`fsdp_ciera.codecs.CODECS`.

    at the agreement   encode   Hash and Cmp: what changed in the own shard -> sections. Changes no state
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

    On CPU every run is a unit. On CUDA all runs with the same codec are one, since runs are an axis of its kernels.
    """

    stretches: tuple[tuple[int, int], ...]
    """(start, number of values) of each run."""
    dtype: torch.dtype
    block_size: int
    """Values of a block (the paper's B)."""
    world_size: int
    """Ranks that exchange payloads."""
    rank: int
    """This one among them."""

    @property
    def num_values(self) -> int:
        """Values of one rank's shard in this unit."""
        return sum(num_values for _, num_values in self.stretches)

    @property
    def num_peers(self) -> int:
        """The other ranks."""
        return self.world_size - 1

    @property
    def item_bytes(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize


class UnitCoder(Protocol):
    """Writes and reads the parts of one unit's payloads, with one backend's kernels and codings.

    `values` is this rank's whole shard [n] and `output` all ranks' [world_size, n]: the coder takes the unit's stretches out of
    them. `sections` is what the backend collects sections in, `fixed` the unit's fixed part of a payload, and `received` all
    peers' payloads: only the backend looks into these. Rows of `exponents` are those of the peers in order, without the own
    one; rows of values are those of all ranks. Reading raises `CieraDecodeError` or sets a flag where a payload is damaged, see
    `fsdp_ciera.backends.base.Backend`.
    """

    unit: Unit

    @property
    def plane_bytes(self) -> int:
        """Bytes of the sign+mantissa plane of one rank's unit."""

    @property
    def symbol_plane_bytes(self) -> int:
        """The same, with what `write_symbols` leaves for the fixed part."""

    @property
    def raw_bytes(self) -> int:
        """Bytes of one rank's unit as it is."""

    def num_sections(self, codec: str) -> int:
        """How many sections the codec of that name writes here."""

    def most_section_bytes(self, codec: str) -> int:
        """No payload has more bytes of them."""

    # the fixed part

    def fill_raw(self, values: torch.Tensor, fixed: Any) -> None:
        """The values as they are."""

    def fill_plane(self, values: torch.Tensor, fixed: Any, exponents: torch.Tensor | None = None) -> None:
        """The sign+mantissa plane; also the exponents into uint8 [of one row], where given."""

    def fill_symbols(self, values: torch.Tensor, fixed: Any) -> None:
        """The sign+mantissa plane, and of the exponents what `write_symbols` left; of the same values."""

    # state

    def exponent_rows(self, num_rows: int, in_blocks: bool = False) -> torch.Tensor:
        """Zeros, uint8 [num_rows, exponents of the unit]: rounded up to whole blocks where blocks are replaced."""

    def value_rows(self) -> torch.Tensor:
        """Room for the unit's values of all ranks, [world_size, ...]."""

    def take_exponents(self, output: torch.Tensor, exponents: torch.Tensor) -> None:
        """All peers' exponents out of an output."""

    def take_own_exponents(self, values: torch.Tensor, exponents: torch.Tensor) -> None:
        """This rank's exponents into uint8 [of one row]."""

    def take_values(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """All ranks' values out of an output."""

    def keep_own_values(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """This rank's values into its row."""

    # writing

    def hash_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """128-bit hashes of the exponents of each block, int64 [num_blocks, 2] (paper 3.1)."""

    def write_symbols(self, values: torch.Tensor, sections: Any) -> None:
        """All exponents."""

    def write_blocks(
        self, values: torch.Tensor, hashes: torch.Tensor, last: torch.Tensor | None, sections: Any
    ) -> tuple[int, int]:
        """The exponents of blocks whose hash differs from the last one; all without last ones. -> how many blocks there are,
        and how many need not be sent, as far as the host knows."""

    def write_exponent_changes(self, values: torch.Tensor, last: torch.Tensor | None, sections: Any) -> None:
        """How the exponents differ from the last ones; all of them without last ones."""

    def write_value_changes(
        self, values: torch.Tensor, rows: torch.Tensor | None, is_flat: bool, sections: Any
    ) -> None:
        """How the values differ from this rank's row; all of them without rows. `is_flat`: the rows are an output."""

    # reading

    def read_raw(self, received: Any, output: torch.Tensor) -> None:
        """The values as they are."""

    def merge_symbols(self, received: Any, output: torch.Tensor) -> None:
        """Exponents that are all in the payload, with the planes -> values."""

    def read_blocks(self, received: Any, exponents: torch.Tensor) -> None:
        """Puts the sent blocks in their places."""

    def read_exponent_changes(self, received: Any, exponents: torch.Tensor) -> None:
        """Changes exponents, in place."""

    def merge(self, exponents: torch.Tensor, received: Any, output: torch.Tensor) -> None:
        """Exponents, with the planes -> values."""

    def read_value_changes(self, received: Any, rows: torch.Tensor, is_flat: bool) -> None:
        """Changes the peers' values, in place. `is_flat`: the rows are an output."""

    def copy_values(self, rows: torch.Tensor, output: torch.Tensor, is_flat: bool) -> None:
        """The peers' values into an output. `is_flat`: the rows are an output, too."""


class Codec(ABC):
    """Codec and state of one unit on one rank: sender of its own shard, receiver of all others.

    Sender and receiver state move in lockstep, in the gather: when every rank has filled its payload and decoded all others,
    each state describes exactly what that gather carried. `encode` may be called any number of times before, for different
    values: only what the gather sends counts. Between gathers a codec holds its state and nothing else.

    [Note: State moves in the gather only] Sizes are agreed on before payloads move, and a group may not be gathered then, or
    its weights may change once more. So `encode` compares with what the last gather carried and writes no state. Test:
    test_codecs.py, encode twice.
    """

    name: ClassVar[str]
    stateless: ClassVar[bool] = False
    """Whether the same values always make the same payload. All others make empty sections of values that did not change."""
    can_decode_in_place: ClassVar[bool] = False
    """Whether its state is exactly what it decoded last, so that a held output can serve as state."""

    def __init__(self, coder: UnitCoder, in_place: bool = False) -> None:
        """`in_place`: `output` in `decode` is kept, handed out again, and holds then what was decoded last."""
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
        """Sections of one rank's payload for this unit."""
        return self.coder.num_sections(self.name)

    def prepare(self) -> None:
        """PreDecmp: makes the memory of the state, on first use."""
        return None

    def detect(self, values: torch.Tensor) -> None:
        """Hash: what can be found out of the shard [n] before anything is written."""
        return None

    @abstractmethod
    def encode(self, values: torch.Tensor, sections: Any, is_full: bool) -> None:
        """Cmp: adds the sections of the shard [n]; `is_full`: without regard to the state, for receivers that have none. See
        [Note: State moves in the gather only]."""

    @abstractmethod
    def fill(self, values: torch.Tensor, fixed: Any) -> None:
        """Writes the fixed part. `values` are what was encoded last; the sender's state now describes them."""

    @abstractmethod
    def decode(self, received: Any, output: torch.Tensor) -> None:
        """Decmp: all peers' payloads -> their rows of `output` [world_size, n]; the own row stays. After a damaged payload
        state and output mean nothing, and `forget` must follow."""

    def seed(self, values: torch.Tensor, output: torch.Tensor) -> None:
        """All shards have travelled as they are: they are the state now. `values` is the own row of `output`."""
        return None

    @property
    def block_counts(self) -> tuple[int, int]:
        """Blocks that the last `encode` looked at, and how many of them need not be sent; for statistics."""
        return 0, 0

    def forget(self) -> None:
        """Drops all state: the next gather is a full one."""
        return None


class FloatCodec(Codec):
    """A codec that looks into the bits of bf16, fp16 and fp32; `format` says where they are."""

    def __init__(self, coder: UnitCoder, in_place: bool = False) -> None:
        super().__init__(coder, in_place)
        self.format = FORMATS[coder.unit.dtype]

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """bf16, fp16 and fp32."""
        return dtype in FORMATS
