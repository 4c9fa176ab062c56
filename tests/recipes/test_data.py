"""Packing, hold-out and order of the training text; batches are a pure function of step, micro-batch and rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes.config import Data
from fsdp_ciera.recipes.data import Batches, find_files, load_batches, pack, read_documents, tokenize
from tiny_models import NUM_BYTES, save_byte_tokenizer, write_text


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def decode(folder: Path, tokens: torch.Tensor) -> str:
    from transformers import AutoTokenizer

    text: str = AutoTokenizer.from_pretrained(folder).decode(tokens.tolist())
    return text


def make_batches(num_train: int = 23, num_eval: int = 9, *, seed: int = 0, shuffle: bool = True) -> Batches:
    """Sequence i holds only the number i (training) or 1000 + i (held out), 4 times."""
    return Batches(
        train_sequences=torch.arange(num_train, dtype=torch.int32)[:, None].expand(-1, 4).contiguous(),
        eval_sequences=1000 + torch.arange(num_eval, dtype=torch.int32)[:, None].expand(-1, 4).contiguous(),
        micro_batch_size=2,
        num_micro_batches=2,
        num_ranks=2,
        seed=seed,
        shuffle=shuffle,
    )


def rows_of_steps(batches: Batches, steps: range) -> list[int]:
    return [
        int(row)
        for step in steps
        for micro_batch in range(batches.num_micro_batches)
        for rank in range(batches.num_ranks)
        for row in batches.batch(step, micro_batch, rank)[:, 0]
    ]


def test_pack_keeps_order_and_drops_the_rest() -> None:
    packed = pack(torch.arange(11, dtype=torch.int32), 4)
    assert packed.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pack(torch.arange(3, dtype=torch.int32), 4).shape == (0, 4)


def test_documents_are_joined_with_eos(tmp_path: Path, tokenizer_folder: Path) -> None:
    # More documents than one tokenizer call takes: none may be lost where the calls meet.
    texts = [f"document {number}" for number in range(600)]
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    tokens = tokenize([path], "text", tokenizer_folder)
    assert int((tokens == NUM_BYTES).sum()) == len(texts)
    assert decode(tokenizer_folder, tokens).split("<eos>") == [*texts, ""]


def test_text_and_jsonl_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve\ntext\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"body": "one"}\n\n{"body": "two", "n": 2}\n', encoding="utf-8")
    assert list(read_documents(tmp_path / "a.txt", "body")) == ["naïve\ntext\n"]
    assert list(read_documents(tmp_path / "b.jsonl", "body")) == ["one", "two"]


def test_globs_are_sorted_and_give_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    found = find_files([f"{tmp_path}/a.txt", f"{tmp_path}/**/*.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a.txt", "b.txt", "sub/c.txt"]


def test_an_epoch_visits_each_sequence_once_and_the_next_in_another_order() -> None:
    batches = make_batches()
    seen = rows_of_steps(batches, range(23))  # 8 sequences a step: 8 epochs of 23, ends in the middle of steps
    epochs = [seen[start : start + 23] for start in range(0, len(seen), 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) == 8


def test_without_shuffle_the_order_is_that_of_the_text() -> None:
    seen = rows_of_steps(make_batches(shuffle=False), range(6))
    assert seen == [position % 23 for position in range(48)]


def test_batches_depend_on_their_arguments_alone() -> None:
    batches, again = make_batches(), make_batches()
    forward = [batches.batch(step, 1, 0) for step in range(12)]
    backward = [again.batch(step, 1, 0) for step in reversed(range(12))]  # as a resumed run would ask
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    assert rows_of_steps(make_batches(seed=1), range(3)) != rows_of_steps(batches, range(3))
    assert forward[0].dtype == torch.int64 and forward[0].shape == (2, 4)


def test_eval_batches_are_full_and_disjoint() -> None:
    batches = make_batches(num_eval=9)
    assert batches.num_eval_batches == 2
    seen = [int(row) for i in range(2) for rank in range(2) for row in batches.eval_batch(i, rank)[:, 0]]
    assert seen == list(range(1000, 1008))


def test_hold_out_is_a_seeded_partition(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = write_text(tmp_path / "t.txt")
    data = Data(files=(str(text),), seq_len=32, eval_fraction=0.25)

    def load(seed: int) -> Batches:
        return load_batches(data, tokenizer_folder, seed=seed, micro_batch_size=1, num_micro_batches=1, num_ranks=2)

    first, same, other = load(1), load(1), load(2)
    everything = pack(tokenize([text], "text", tokenizer_folder), 32)
    assert len(first.eval_sequences) == len(everything) // 4
    together = torch.cat([first.train_sequences, first.eval_sequences])
    assert sorted(together.tolist()) == sorted(everything.tolist())
    assert torch.equal(first.eval_sequences, same.eval_sequences)
    assert not torch.equal(first.eval_sequences, other.eval_sequences)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.jsonl", b'{"text": "x"}\n{oops}\n', r"a\.jsonl:2: not valid JSON: Expecting property name .* at column 2$"),
        ("a.jsonl", b'{"txt": "x", "n": 1}\n', r'a\.jsonl:1: no text under data\.text_key = "text"; .*: txt, n$'),
        ("a.jsonl", b'{"text": 3}\n', r'a\.jsonl:1: no text under data\.text_key = "text"; the line has: text$'),
        ("a.jsonl", b'["x"]\n', r'a\.jsonl:1: no text under data\.text_key = "text"; the line has: a list$'),
        ("a.txt", b"abc\xff", r"a\.txt: not UTF-8 text: invalid start byte at byte 3$"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes, error: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=error):
        list(read_documents(path, "text"))


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r'^data\.files: nothing matches "nowhere/\*\.txt" \(from '):
        find_files(["nowhere/*.txt"])
    with pytest.raises(RecipeError, match=r"nothing matches"):
        find_files([str(tmp_path)])  # a folder is no file


def test_too_short(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 99, encoding="utf-8")  # and an EOS: 10 sequences of 10
    data = Data(files=(str(path),), seq_len=10, eval_fraction=0.3)

    def load(micro_batch_size: int, num_eval_batches: int = 0) -> Batches:
        return load_batches(
            data, tokenizer_folder, seed=0, micro_batch_size=micro_batch_size, num_micro_batches=2, num_ranks=2,
            num_eval_batches=num_eval_batches,
        )  # fmt: skip

    assert load(1, num_eval_batches=4).num_eval_batches == 1
    with pytest.raises(RecipeError, match=r"^data\.files: 10 .* of 10 tokens, 3 .* are too short: one step takes 8 \("):
        load(2)
    data = Data(files=(str(path),), seq_len=10, eval_fraction=0.1)
    with pytest.raises(
        RecipeError, match=r"with data\.eval_fraction = 0\.1 hold out 1: one evaluation takes at least 2$"
    ):
        load(1, num_eval_batches=4)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    path = write_text(tmp_path / "t.txt", num_lines=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r'^model\.folder: ".*empty" has no usable tokenizer: '):
        tokenize([path], "text", tmp_path / "empty")
