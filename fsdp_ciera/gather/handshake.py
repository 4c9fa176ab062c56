"""Agreement: what the ranks of a group tell each other in a gather's headers, and what each disagreement raises.

Every decision here is taken from the table of all headers, which all ranks hold, so all ranks take the same one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_bytes
from fsdp_ciera.errors import CieraDesyncError, CieraMismatchError, CieraPeerError
from fsdp_ciera.gather.payload import (
    MAGIC,
    WIRE_VERSION,
    Status,
    encode_descriptor,
    fingerprint_of,
    pack_header,
    unpack_headers,
)


class Agreement(Enum):
    """What a table of headers means for the gather."""

    PROCEED = auto()
    RESTART = auto()  # somebody lost its caches: all forget, and encode in full


WHICH_FIELDS_MEAN_DESYNC = ("module", "dtype", "num_values", "group_size")
"""Ranks that differ in these are not at the same gather; ranks that differ in others were set up differently."""


def settle(
    headers: np.ndarray[Any, Any],
    descriptor: Mapping[str, Any],
    announced: bytes,
    group: dist.ProcessGroup,
    failure: BaseException | None,
) -> Agreement:
    """Compares the headers of all ranks of `group` (structured array [world_size]).

    Raises, on all ranks alike: `CieraDesyncError` when the ranks are at different gathers; `CieraMismatchError` when they
    differ in policy, versions or layout, naming ranks and fields; `CieraPeerError` when a rank could not encode.
    `announced` is the text whose length this rank's header names: its descriptor, or its failure. `failure` is this rank's
    own exception, if it has one. Communicates only when something is wrong (one exchange of the announced texts).
    """
    where = f"module {descriptor['module']!r}"
    strangers = np.flatnonzero(headers["magic"] != MAGIC).tolist()
    if strangers:
        raise CieraDesyncError(
            f"{where}: ranks {strangers} of the group sent no fsdp_ciera header ({int(headers['magic'][strangers[0]]):#x} "
            f"where {MAGIC:#x} belongs). Apply the same fully_shard(ciera_policy=...) or attach() on every rank"
        )
    if (headers["status"] != Status.READY).any():
        texts = _exchange(announced, headers, group)
        broken = [f"rank {rank}: {texts[rank].decode()}" for rank in np.flatnonzero(headers["status"] != Status.READY)]
        raise CieraPeerError(f"{where}: could not encode on {'; '.join(broken)}") from failure
    if (headers["wire_version"] != WIRE_VERSION).any() or (headers["fingerprint"] != headers["fingerprint"][0]).any():
        _raise_difference(where, _exchange(announced, headers, group))
    bases, sequences = headers["base"], headers["sequence"]
    if (bases == bases[0]).all() and (bases[0] == 0 or (sequences == sequences[0]).all()):
        return Agreement.PROCEED
    if (bases == 0).any():
        return Agreement.RESTART
    if (sequences == sequences[0]).all():  # See [Note: Mispaired gathers]
        found = (
            "an earlier gather of it met another module's of the same shape on some ranks, and gave wrong weights there"
        )
    else:
        expected = Counter(sequences.tolist()).most_common(1)[0][0]
        listing = ", ".join(f"rank {rank}: {sequence}" for rank, sequence in enumerate(sequences.tolist()))
        found = f"the ranks are at different gathers of it ({listing}; most are at {expected})"
    raise CieraDesyncError(
        f"{where}: {found}. A rank has skipped, repeated or swapped a forward or backward pass; after an exception call "
        "reset_iter_state() and fsdp_ciera.invalidate(model) on all ranks"
    )


def check_same(descriptor: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """All ranks must describe what they do next alike: a header of its own says so, settled like any other. Collective."""
    text = encode_descriptor(descriptor)
    header = pack_header(
        status=Status.READY, fingerprint=fingerprint_of(descriptor), sequence=1, base=0, descriptor_bytes=len(text)
    )
    settle(unpack_headers(all_gather_bytes(header, group)), descriptor, text, group, None)


def _exchange(text: bytes, headers: np.ndarray[Any, Any], group: dist.ProcessGroup) -> list[bytes]:
    """Gathers the text that each rank has announced in `descriptor_bytes`; an announced length never changes its sender."""
    lengths = [int(length) for length in headers["descriptor_bytes"]]
    mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    mine[: len(text)] = torch.from_numpy(np.frombuffer(bytearray(text), np.uint8)) if text else 0
    gathered = all_gather_bytes(mine, group)
    return [bytes(row[:length].tolist()) for row, length in zip(gathered, lengths, strict=True)]


def _raise_difference(where: str, texts: Sequence[bytes]) -> None:
    fields = [json.loads(text) for text in texts]
    names = sorted(set().union(*fields))
    differing = [name for name in names if len({json.dumps(field.get(name)) for field in fields}) > 1]
    lines = []
    for name in differing:
        by_value: dict[str, list[int]] = {}
        for rank, field in enumerate(fields):
            by_value.setdefault(json.dumps(field.get(name)), []).append(rank)
        lines.append(f"  {name}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items()))
    details = "\n".join(lines)
    if any(name in WHICH_FIELDS_MEAN_DESYNC for name in differing):
        raise CieraDesyncError(
            f"{where}: the ranks are not at the same gather:\n{details}\n"
            "All ranks must run the same modules in the same order, also those whose tokens need fewer experts"
        )
    raise CieraMismatchError(
        f"{where}: the ranks of the group are set up differently:\n{details}\n"
        "Give every rank the same CieraPolicy and the same versions of fsdp_ciera and torch"
    )
