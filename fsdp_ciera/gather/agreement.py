"""Agreement: what ranks tell each other before payloads move, and what each disagreement raises.

    meet       do all ranks mean the same thing? A header of 64 bytes from each; once, before anything is planned
    agree      many channels at once: encode all -> ONE all-reduce MAX of a few int64 a channel -> ONE host read
               -> every channel has a `Settled`, or all ranks raise the same error

[Note: Agreement by MAX] A rank cannot see the others' numbers, only the largest of them. That is enough: every rank sends as
many bytes as the largest payload takes; where a rank sends its shard as it is, all do; and a number x is the same on all ranks
where the largest x and the largest ~x belong together. All ranks draw their conclusions from the same table, so they draw the
same ones. Test: test_agreement.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from fsdp_ciera._compat import all_gather_bytes, all_reduce_max
from fsdp_ciera.errors import CieraDesyncError, CieraMismatchError, CieraPeerError
from fsdp_ciera.gather.channel import Channel, Settled, encode_descriptor, fingerprint_of
from fsdp_ciera.kernels.heads import MAGIC, WIRE_VERSION, meanings_of

HELLO = np.dtype(
    [
        ("magic", "<u4"),
        ("wire_version", "<u2"),
        ("reserved", "<u2"),
        ("fingerprint", "<u8"),
        ("text_bytes", "<u8"),
        ("unused", "<u8", (5,)),
    ]
)
HELLO_BYTES = 64
assert HELLO.itemsize == HELLO_BYTES

COLUMNS = ("base", "not_base", "first_bytes", "repeat_bytes", "sequence", "changes", "trouble")
ROW_BYTES = 8 * len(COLUMNS)

WHICH_FIELDS_MEAN_DESYNC = ("module", "dtype", "num_values", "group_size")
"""Ranks that differ in these are not at the same gather; ranks that differ in others were set up differently."""


class Trouble(IntEnum):
    """The state of a channel that a rank tells beside numbers. The largest one holds; damage stands above all, see `DAMAGE`."""

    NONE = 0
    NO_BASE = 1  # it remembers no gather, so its payload is a full one
    ABSENT = 2  # its parameters are not sharded now: it is not gathered before they are
    FAILED = 3  # it could not encode


DAMAGE = 256
"""Bits of `fsdp_ciera.kernels.heads.Damage` stand above this."""


class _Row(NamedTuple):
    """One row of the table: the largest of each column."""

    base: int
    not_base: int
    first_bytes: int
    repeat_bytes: int
    sequence: int
    changes: int
    trouble: int


class Agreed(NamedTuple):
    """The outcome of an agreement."""

    num_settled: int
    """The number of channels whose next gathers are settled."""
    num_changes: int
    """How often the shards of the channel with most changes have changed, on any rank."""
    sent_bytes: int
    """Bytes that this rank has sent."""


ShardOf = Callable[[Channel], torch.Tensor | None]
"""Gives the shard that a channel would gather now, [num_values]; `None` while it cannot be gathered."""


def agree(channels: Sequence[Channel], shard_of: ShardOf, process_group: dist.ProcessGroup) -> Agreed:
    """Settles the next gathers of these channels, which all belong to `process_group`. Collective over it.

    All ranks must give the same channels in the same order. A channel whose parameters are gathered now on some rank has
    nothing settled. Raises, on all ranks together: `CieraDesyncError` when the channels' last gathers were not the same,
    or when one of them decoded something damaged; `CieraMismatchError` when the ranks differ in policy, versions or layout;
    `CieraPeerError` when a rank could not encode. Then all state of these channels is dropped.

    Communication: one all-reduce of `ROW_BYTES` a channel. Memory: one shard at a time, and the sections of all channels until
    their gathers. The host waits for the device once, where there is one.
    """
    failures: dict[int, Exception] = {}
    table = torch.stack([_row_of(channel, shard_of, failures, number) for number, channel in enumerate(channels)])
    all_reduce_max(table, process_group)
    own_numbers = [channel.own_numbers() for channel in channels]
    host_numbers = iter(channels[0].backend.read(torch.cat([table.view(-1), *own_numbers])))  # the host waits here
    rows = [_Row(*(next(host_numbers) for _ in COLUMNS)) for _ in channels]
    for channel, numbers in zip(channels, own_numbers, strict=True):
        channel.learn([next(host_numbers) for _ in range(len(numbers))])
    sent_bytes = 2 * (process_group.size() - 1) * table.numel() * 8 // process_group.size()
    try:
        num_settled = 0
        for number, (channel, row) in enumerate(zip(channels, rows, strict=True)):
            num_settled += _conclude(channel, row, process_group, failures.get(number))
    except BaseException:
        for channel in channels:
            channel.forget()
            channel.damage.zero_()
            channel.settled, channel.has_raised = None, False
        raise
    return Agreed(num_settled, max(row.changes for row in rows), sent_bytes)


def _row_of(channel: Channel, shard_of: ShardOf, failures: dict[int, Exception], number: int) -> torch.Tensor:
    """Makes this rank's row of the table for channel `number`, int64 [columns] on the device. Puts an exception into
    `failures`."""
    backend, announced, trouble = channel.backend, None, Trouble.NONE
    channel.announced = None
    try:
        values = shard_of(channel)
        if values is None:
            trouble = Trouble.ABSENT
        else:
            announced = channel.announce(values)
            trouble = Trouble.NONE if channel.has_base else Trouble.NO_BASE
    except Exception as failure:  # the peers would wait for ever
        failures[number], trouble = failure, Trouble.FAILED
    numbers = backend.numbers(channel.fingerprint, channel.sequence, channel.changes.agreed, int(trouble), 0)
    fingerprint, sequence, changes, own_trouble, zero = numbers.view(-1, 1).unbind()
    base = fingerprint ^ channel.base if channel.has_base else fingerprint
    first_bytes = repeat_bytes = zero
    if announced is not None:
        first_bytes, repeat_bytes = announced.payload_bytes, announced.repeat_bytes
        changes = changes + announced.has_changed
    trouble_or_damage = torch.maximum(own_trouble, channel.damage.to(torch.int64) * DAMAGE)
    return torch.cat([base, ~base, first_bytes, repeat_bytes, sequence, changes, trouble_or_damage])


def _conclude(channel: Channel, row: _Row, process_group: dist.ProcessGroup, failure: Exception | None) -> bool:
    """Settles the channel's next gathers as its row of the table says, or raises. Returns whether it settled them."""
    channel.settled = None
    had_raised, channel.has_raised = channel.has_raised, False
    if row.trouble >= DAMAGE:
        channel.damage.zero_()
        if any_rank(not had_raised, process_group):
            raise CieraDesyncError(f"{channel.where}: {said_of_damage(row.trouble // DAMAGE)}")
        row = row._replace(trouble=Trouble.NO_BASE)  # all ranks have raised, forgotten what they knew, and go on
    if row.trouble == Trouble.FAILED:
        raise_failures(channel.where, failure, process_group)
    is_same = row.base == ~row.not_base
    if row.trouble == Trouble.NONE and not is_same:
        _raise_other_base(channel)
    channel.changes.agreed = row.changes
    if row.trouble == Trouble.ABSENT:
        channel.announced = None
        return False
    if row.trouble == Trouble.NO_BASE:  # full payloads where all ranks make them; else nobody knows how large they are
        first_bytes, kind = (row.first_bytes if is_same else channel.raw_payload_bytes), "cold"
    else:
        first_bytes, kind = row.first_bytes, "first" if row.changes > channel.changes.at_last_gather else "repeat"
    channel.settled = Settled(kind, first_bytes, row.repeat_bytes, row.sequence + 1)
    return True


ADVICE = (
    "A rank has skipped, repeated or swapped a forward or backward pass; after an exception call reset_iter_state() and "
    "fsdp_ciera.invalidate(model) on all ranks"
)


def said_of_damage(flags: int) -> str:
    """Says in words what these bits of `Damage` mean."""
    return (
        f"in an earlier gather {'; '.join(meanings_of(flags))}. What was computed with it is wrong: start again from a "
        "checkpoint. fsdp_ciera.detach(model) goes on with stock FSDP2"
    )


# Texts, once something is wrong


def exchange_texts(text: bytes, process_group: dist.ProcessGroup) -> list[bytes]:
    """Returns every rank's text. Collective."""
    own_length = torch.from_numpy(np.array([len(text)], "<i8").view(np.uint8))
    lengths = all_gather_bytes(own_length, process_group).numpy().view("<i8").reshape(-1).tolist()
    padded = np.zeros(max(*lengths, 1), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    gathered = all_gather_bytes(torch.from_numpy(padded), process_group)
    return [bytes(row[:length].tolist()) for row, length in zip(gathered, lengths, strict=True)]


def raise_failures(where: str, failure: Exception | None, process_group: dist.ProcessGroup) -> None:
    """Raises a `CieraPeerError` that says which ranks failed, and how. Collective."""
    texts = exchange_texts(b"" if failure is None else repr(failure).encode(), process_group)
    broken = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(texts) if text]
    raise CieraPeerError(f"{where}: could not encode on {'; '.join(broken)}") from failure


def _raise_other_base(channel: Channel) -> None:
    """Raises the reason why the ranks do not remember the same gather of the same channel. Collective over its process
    group."""
    descriptors = exchange_texts(channel.descriptor_text, channel.process_group)
    if len(set(descriptors)) > 1:
        _raise_difference(channel.where, descriptors)
    sequences = [int(text) for text in exchange_texts(str(channel.sequence + 1).encode(), channel.process_group)]
    if len(set(sequences)) == 1:  # See [Note: Mispaired gathers] in backends/base.py
        reason = "an earlier gather of it met another module's of the same shape"
    else:
        reason = _said_of_sequences(sequences)
    raise CieraDesyncError(f"{channel.where}: {reason}. {ADVICE}")


def _said_of_sequences(sequences: Sequence[int]) -> str:
    expected = Counter(sequences).most_common(1)[0][0]
    listing = ", ".join(f"rank {rank}: {sequence}" for rank, sequence in enumerate(sequences))
    return f"the ranks are at different gathers of it ({listing}; most are at {expected})"


def raise_other_gather(channel: Channel, sequence: int) -> None:
    """Raises the reason why the ranks of a channel do not send the same gather. Collective over its process group."""
    texts = exchange_texts(encode_descriptor({**channel.descriptor, "gather": sequence}), channel.process_group)
    descriptors = [json.loads(text) for text in texts]
    sequences = [descriptor.pop("gather") for descriptor in descriptors]
    if all(descriptor == descriptors[0] for descriptor in descriptors):
        raise CieraDesyncError(f"{channel.where}: {_said_of_sequences(sequences)}. {ADVICE}")
    _raise_difference(channel.where, [encode_descriptor(descriptor) for descriptor in descriptors])


def _raise_difference(where: str, texts: Sequence[bytes]) -> None:
    descriptors = [json.loads(text) for text in texts]
    names = sorted(set().union(*descriptors))
    differing = [name for name in names if len({json.dumps(fields.get(name)) for fields in descriptors}) > 1]
    lines = []
    for name in differing:
        by_value: dict[str, list[int]] = {}
        for rank, fields in enumerate(descriptors):
            by_value.setdefault(json.dumps(fields.get(name)), []).append(rank)
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


# Before anything else


def hello(descriptor: Mapping[str, Any]) -> torch.Tensor:
    """Makes the header of a rank that is about to plan, uint8 [64]."""
    header = np.zeros(1, HELLO)
    header["magic"], header["wire_version"] = MAGIC, WIRE_VERSION
    header["fingerprint"], header["text_bytes"] = fingerprint_of(descriptor), len(encode_descriptor(descriptor))
    return torch.from_numpy(header.view(np.uint8))


def meet(descriptor: Mapping[str, Any], process_group: dist.ProcessGroup) -> None:
    """Checks that all ranks have the same descriptor of what they do next. Collective; `HELLO_BYTES` a rank.

    Raises, on all ranks together, `CieraDesyncError` where a rank sends no such header, and `CieraMismatchError` with the ranks
    and fields that differ.
    """
    where = f"module {descriptor['module']!r}"
    headers = all_gather_bytes(hello(descriptor), process_group).numpy().view(HELLO).reshape(-1)
    strangers = np.flatnonzero(headers["magic"] != MAGIC).tolist()
    if strangers:
        raise CieraDesyncError(
            f"{where}: ranks {strangers} of the group sent no fsdp_ciera header ({int(headers['magic'][strangers[0]]):#x} "
            f"where {MAGIC:#x} belongs). Apply the same fully_shard(ciera_policy=...) or attach() on every rank"
        )
    versions, fingerprints = headers["wire_version"], headers["fingerprint"]
    if (versions != WIRE_VERSION).any() or (fingerprints != fingerprints[0]).any():
        _raise_difference(where, exchange_texts(encode_descriptor(descriptor), process_group))


def any_rank(flag: bool, process_group: dist.ProcessGroup) -> bool:
    """Whether `flag` holds on any rank. Collective; a byte a rank."""
    own_flag = torch.full((1,), int(flag), dtype=torch.uint8, device="cpu")
    return bool(all_gather_bytes(own_flag, process_group).any())
