"""Text to token sequences: read, tokenized, packed, and served by a pure function of step, micro-batch and rank.

There is no iterator and so no iterator state: a resumed run asks for step k and gets what the uninterrupted run got.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.config import Data

_NUM_DOCUMENTS_PER_CALL = 256


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The token sequences of a run, the same on every rank, and who gets which of them when."""

    train_sequences: Tensor
    """`[num_train_sequences, seq_len]`, int32."""

    eval_sequences: Tensor
    """`[num_eval_sequences, seq_len]`, int32; held out of training."""

    micro_batch_size: int
    num_micro_batches: int
    num_ranks: int
    seed: int
    shuffle: bool

    def batch(self, step: int, micro_batch: int, rank: int) -> Tensor:
        """Token ids `[micro_batch_size, seq_len]`, int64, of one forward pass.

        A pure function of its arguments: sequences are dealt in the epoch's order to micro-batches, then ranks. An
        epoch ends in the middle of a batch if it must, and the next order goes on from there.
        """
        first = ((step * self.num_micro_batches + micro_batch) * self.num_ranks + rank) * self.micro_batch_size
        rows = [self._row(position) for position in range(first, first + self.micro_batch_size)]
        return self.train_sequences[rows].long()

    def eval_batch(self, index: int, rank: int) -> Tensor:
        """Token ids `[micro_batch_size, seq_len]`, int64, of held-out batch `index < num_eval_batches`."""
        first = (index * self.num_ranks + rank) * self.micro_batch_size
        return self.eval_sequences[first : first + self.micro_batch_size].long()

    @property
    def num_eval_batches(self) -> int:
        """Full held-out batches that every rank can take."""
        return len(self.eval_sequences) // (self.micro_batch_size * self.num_ranks)

    @property
    def largest_token_id(self) -> int:
        """The largest token id of training and held-out sequences; reads them all."""
        return max(int(part.max()) for part in (self.train_sequences, self.eval_sequences) if len(part))

    @property
    def num_tokens_per_step(self) -> int:
        """Tokens of one optimizer step, all ranks and micro-batches together."""
        return self.train_sequences.shape[1] * self.micro_batch_size * self.num_micro_batches * self.num_ranks

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, len(self.train_sequences))
        if not self.shuffle:
            return index
        return int(_order(len(self.train_sequences), self.seed, epoch)[index])


def load_batches(
    data: Data,
    folder: str | Path,
    *,
    seed: int,
    micro_batch_size: int,
    num_micro_batches: int,
    num_ranks: int,
    num_eval_batches: int = 0,
) -> Batches:
    """Reads and tokenizes all of `data.files` with the tokenizer of `folder`; every rank does so on its own.

    Costs 4 bytes a token per rank. Raises `RecipeError` when nothing matches, a file is not what it should be, or the
    text is too short for one step (or, with `num_eval_batches`, for one evaluation batch).
    """
    sequences = pack(tokenize(find_files(data.files), data.text_key, folder), data.seq_len)
    num_eval = int(len(sequences) * data.eval_fraction)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))
    # Both parts stay in the order of the text: shuffling is `batch`'s business.
    held_out, kept = order[:num_eval].sort().values, order[num_eval:].sort().values
    batches = Batches(
        train_sequences=sequences[kept],
        eval_sequences=sequences[held_out],
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        num_ranks=num_ranks,
        seed=seed,
        shuffle=data.shuffle,
    )
    num_per_step = micro_batch_size * num_micro_batches * num_ranks
    text = f"data.files: {len(sequences)} sequences of {data.seq_len} tokens"
    if len(kept) < num_per_step:
        raise RecipeError(
            f"{text}, {num_eval} of them held out, are too short: one step takes {num_per_step} "
            "(add text, or lower data.seq_len, train.micro_batch_size, train.gradient_accumulation or the ranks)"
        )
    if num_eval_batches and not batches.num_eval_batches:
        raise RecipeError(
            f"{text} with data.eval_fraction = {data.eval_fraction:g} hold out {num_eval}: "
            f"one evaluation takes at least {micro_batch_size * num_ranks}"
        )
    return batches


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that match the patterns, each once, sorted within each pattern. Raises `RecipeError` where none matches."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
        if not matches:
            raise RecipeError(f'data.files: nothing matches "{pattern}" (from {Path.cwd()})')
        files.update(dict.fromkeys(matches))
    return list(files)


def read_documents(path: Path, text_key: str) -> Iterator[str]:
    """The documents of one file: `text_key` of each line of `*.jsonl`, or the whole of any other file."""
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix != ".jsonl":
                yield file.read()
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _document(line, text_key, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None


def tokenize(paths: Sequence[Path], text_key: str, folder: str | Path) -> Tensor:
    """All documents as one row of token ids, int32, an EOS after each."""
    from transformers import AutoTokenizer  # takes seconds to import, and only training needs it

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise RecipeError(f'model.folder: "{folder}" has no usable tokenizer: {_first_line(error)}') from None
    if tokenizer.eos_token_id is None:
        raise RecipeError(f'model.folder: the tokenizer of "{folder}" has no EOS token to join documents with')
    documents = (text for path in paths for text in read_documents(path, text_key) if text)
    pieces: list[Tensor] = []
    while chunk := list(islice(documents, _NUM_DOCUMENTS_PER_CALL)):
        encoded = tokenizer(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        pieces += [torch.tensor([*tokens, tokenizer.eos_token_id], dtype=torch.int32) for tokens in encoded]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32)


def pack(tokens: Tensor, seq_len: int) -> Tensor:
    """`[num_tokens]` -> `[num_tokens // seq_len, seq_len]`; what does not fill a sequence at the end is dropped."""
    num_sequences = len(tokens) // seq_len
    return tokens[: num_sequences * seq_len].view(num_sequences, seq_len)


def _document(line: str, text_key: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        keys = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise RecipeError(f'{where}: no text under data.text_key = "{text_key}"; the line has: {keys}')
    document: str = record[text_key]
    return document


@lru_cache(maxsize=4)
def _order(num_sequences: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch. A pure function; the cache only saves drawing it again for each batch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    return torch.randperm(num_sequences, generator=generator)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
