"""`Stream`: what one parameter group sends over one process group with one dtype and length, and who it says it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdp_ciera.gather.layout import Layout, Run
from fsdp_ciera.gather.lockstep import Encoded, LockstepState
from fsdp_ciera.gather.payload import TABLE_ENTRY_BYTES, WIRE_VERSION, encode_descriptor, fingerprint_of
from fsdp_ciera.gather.topology import Cut
from fsdp_ciera.policy import CieraPolicy
from fsdp_ciera.version import __version__

if TYPE_CHECKING:
    from fsdp_ciera.gather.sizes import Epoch


class Changes:
    """How often a rank has seen its own shard change, by checksum; outlives the streams of a group, which come and go with
    plans."""

    def __init__(self) -> None:
        self.count = 0
        self._last: int | None = None

    def see(self, checksum: int) -> int:
        """The shard that is to be sent -> the count, this change included."""
        self.count += self._last is not None and self._last != checksum
        self._last = checksum
        return self.count


class Stream:
    """A `LockstepState` with the identity that every header of it carries.

    The lockstep is among the ranks that exchange payloads: all of the group when it is flat, otherwise those of equal
    number in their nodes. `epoch` holds sizes that were settled ahead (sizes.py), on all ranks of the group or on
    none.
    """

    def __init__(
        self,
        module: str,
        policy: CieraPolicy,
        layout: Layout,
        group: dist.ProcessGroup,
        cut: Cut,
        changes: Changes,
        in_place: bool = False,
    ) -> None:
        self.layout = layout
        self.changes = changes
        self.group = group
        self.cut = cut
        self.rank = group.rank()
        self.state = LockstepState(layout, policy.block_size, cut.num_nodes, cut.node_of(self.rank), in_place=in_place)
        self.descriptor = describe(module, policy, layout, cut)
        self.descriptor_text = encode_descriptor(self.descriptor)
        self.fingerprint = fingerprint_of(self.descriptor)
        self.where = f"module {module!r}"
        self.epoch: Epoch | None = None

    def repeat_bytes(self, encoded: Encoded) -> int:
        """The payload that this rank will send next time if its shard does not change, in bytes."""
        codecs = self.state.codecs
        if not any(codec.stateless or codec.fixed_bytes for codec in codecs):
            return 0
        return sum(
            sent if codec.stateless else codec.fixed_bytes + codec.num_sections * TABLE_ENTRY_BYTES
            for codec, sent in zip(codecs, encoded.run_bytes, strict=True)
        )

    def forget(self) -> None:
        """Drops all caches of this rank: the next gather is a full one. See [Note: An epoch ends on all ranks together]."""
        self.state.forget()
        if self.epoch is not None:
            self.epoch.is_kept = False


def describe(module: str, policy: CieraPolicy, layout: Layout, cut: Cut) -> dict[str, Any]:
    """What all ranks of a group must have in common, field by field."""

    def label(run: Run) -> str:
        return f"{run.category}:{run.codec}:{run.num_values}"

    return {
        **common_fields(module, policy),
        "dtype": str(layout.dtype).removeprefix("torch."),
        "num_values": layout.num_values,
        "group_size": cut.world_size,
        "ranks per node": cut.ranks_per_node,
        "layout": [label(run) for run in layout.runs],
    }


def common_fields(module: str, policy: CieraPolicy) -> dict[str, Any]:
    """What all ranks must have in common whatever they exchange: versions and policy."""
    return {
        "module": module,
        "fsdp_ciera version": __version__,
        "wire version": WIRE_VERSION,
        "torch version": torch.__version__.split("+")[0],
        **{f"policy.{name}": value for name, value in policy.to_dict().items()},
    }
