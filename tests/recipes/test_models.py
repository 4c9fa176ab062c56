"""The six models at test size: they run, train, shard, and read and write the published checkpoint layout."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import fsdp_ciera.recipes.models
from fsdp_ciera.recipes.config import Recipe, load_recipe
from fsdp_ciera.recipes.models import MODELS, build_model, load_pretrained, register_auto_classes
from fsdp_ciera.testing import run_ranks

pytest.importorskip("transformers")

Weights = dict[str, Tensor]
HIDDEN, VOCAB, HEADS, HEAD_DIM = 64, 256, 4, 16
# More than ten, so that expert 10 must come after expert 9 and not after expert 1.
NUM_EXPERTS = 12


def tokens(num_sequences: int = 2, length: int = 24) -> Tensor:
    return torch.randint(0, VOCAB, (num_sequences, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_finite_gradient(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = build_model(name, tiny=True, dtype=dtype)
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    # Random weights predict about uniformly.
    assert abs(loss.item() - math.log(VOCAB)) < 0.5
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), fqn
        assert parameter.grad.dtype == dtype, fqn
        # Of the experts some may have met no token, but not all of them.
        assert parameter.grad.any(), fqn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_the_dtype_asked_for(name: str, dtype: torch.dtype) -> None:
    for device in ("cpu", "meta"):
        model = build_model(name, tiny=True, device=device, dtype=dtype)
        found = {(parameter.dtype, parameter.device.type) for parameter in model.parameters()}
        assert found == {(dtype, device)}
        # Rotary frequencies in bf16 would turn positions of a few hundred into each other.
        assert {buffer.dtype for fqn, buffer in model.named_buffers() if "inv_freq" in fqn} == {torch.float32}


@pytest.mark.parametrize("name", MODELS)
def test_meta_to_real(name: str) -> None:
    model: Any = build_model(name, tiny=True, device="meta", dtype=torch.float32)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))  # what uninitialised memory may hold
    model.init_weights()
    expected = dict(build_model(name, tiny=True, dtype=torch.float32).named_buffers())
    assert expected
    for fqn, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[fqn]), fqn
    assert model(input_ids=tokens()).logits.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_tiny_is_the_same_architecture(name: str) -> None:
    """A tiny model has the same kinds of parameters, so that what a test shows holds for the large one."""
    num_layers = MODELS[name].tiny_config().num_hidden_layers
    tiny = {re.sub(r"\.\d+\.", ".N.", fqn) for fqn, _ in build_model(name, tiny=True, device="meta").named_parameters()}
    full = {re.sub(r"\.\d+\.", ".N.", fqn) for fqn, _ in build_model(name, device="meta").named_parameters()}
    assert tiny == full
    assert num_layers <= 4 and sum(p.numel() for p in build_model(name, tiny=True).parameters()) < 400_000


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-4-scout"])
def test_experts_implementations(name: str, implementation: str) -> None:
    """Llama-4's class cannot choose; all others can, our own two as well, and dispatch by default."""
    model: Any = build_model(name, tiny=True, dtype=torch.float32)
    assert model.config._experts_implementation == "grouped_mm"
    expected = model(input_ids=tokens()).logits
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    assert torch.allclose(model(input_ids=tokens()).logits, expected, atol=1e-5)


# --- Reference forward passes, written from the published names


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def attention(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    """Causal multi-head attention with rotary positions (theta 10000, halves rotated), one sequence `[T, H]`."""
    length = x.shape[0]
    q, k, v = (
        (x @ weights[f"{prefix}.{p}_proj.weight"].T).view(length, HEADS, HEAD_DIM).transpose(0, 1) for p in "qkv"
    )
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)

    def rotate(t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    scores = rotate(q) @ rotate(k).transpose(1, 2) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    mixed: Tensor = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, HIDDEN)
    return mixed @ weights[f"{prefix}.o_proj.weight"].T


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def routed(x: Tensor, weights: Weights, prefix: str, projections: tuple[str, str, str], renormalise: bool) -> Tensor:
    """The top two of `NUM_EXPERTS` experts, token by token."""
    scores = (x @ weights[f"{prefix}.gate.weight"].T).softmax(-1)
    rows = []
    for t in range(x.shape[0]):
        top = scores[t].topk(2)
        total = top.values.sum() if renormalise else 1.0
        rows.append(
            sum(
                value / total * swiglu(x[t], *(weights[f"{prefix}.experts.{e}.{p}.weight"] for p in projections))
                for value, e in zip(top.values, top.indices.tolist(), strict=True)
            )
        )
    return torch.stack(rows)  # type: ignore[arg-type]


def deepseek_reference(ids: Tensor, weights: Weights, num_layers: int = 3) -> Tensor:
    x = weights["model.embed_tokens.weight"][ids]
    names = ("gate_proj", "up_proj", "down_proj")
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        x = x + attention(
            rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], 1e-6), weights, f"{prefix}.self_attn"
        )
        h = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], 1e-6)
        if layer == 0:
            x = x + swiglu(h, *(weights[f"{prefix}.mlp.{p}.weight"] for p in names))
        else:
            shared = swiglu(h, *(weights[f"{prefix}.mlp.shared_experts.{p}.weight"] for p in names))
            x = x + routed(h, weights, f"{prefix}.mlp", names, renormalise=False) + shared
    return rms_norm(x, weights["model.norm.weight"], 1e-6) @ weights["lm_head.weight"].T


def minicpm_reference(ids: Tensor, weights: Weights, num_layers: int = 2) -> Tensor:
    embedding = weights["model.embed_tokens.weight"]
    residual = 1.4 / num_layers**0.5
    x = embedding[ids] * 12
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        h = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], 1e-5)
        x = x + residual * attention(h, weights, f"{prefix}.self_attn")
        h = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], 1e-5)
        x = x + residual * routed(h, weights, f"{prefix}.mlp", ("w1", "w3", "w2"), renormalise=True)
    return rms_norm(x, weights["model.norm.weight"], 1e-5) / (HIDDEN / 16) @ embedding.T


# --- Published-layout checkpoints, written without the code under test


def make_weights(shapes: dict[str, tuple[int, ...]]) -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {
        fqn: torch.randn(shape, generator=generator) * 0.15 + ("norm" in fqn) for fqn, shape in shapes.items()
    }  # norms around one; the rest large enough that a wrong order of experts shows


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}"
    attention = {f"{prefix}.self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"}
    return {
        **attention,
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def write_folder(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# The fields that publishers' files have and that must not disturb: remote code, dtype, balance loss.
COMMON_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "max_position_embeddings": 128, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True,
    "rope_theta": 10000.0, "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    "attention_bias": False, "transformers_version": "4.36.0",
}  # fmt: skip


def deepseek_folder(folder: Path) -> tuple[Path, Weights]:
    """A checkpoint as deepseek-ai publishes it: layer 0 dense, experts one by one."""
    config = COMMON_CONFIG | {
        "model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "num_hidden_layers": 3,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekConfig",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
        },
        "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": NUM_EXPERTS, "n_shared_experts": 2,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
        "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    widths = {"model.layers.0.mlp": 96}
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp"
        shapes[f"{prefix}.gate.weight"] = (NUM_EXPERTS, HIDDEN)
        widths |= {f"{prefix}.shared_experts": 64} | {f"{prefix}.experts.{e}": 32 for e in range(NUM_EXPERTS)}
    for layer in range(3):
        shapes |= layer_shapes(layer)
    for prefix, width in widths.items():
        shapes |= {f"{prefix}.gate_proj.weight": (width, HIDDEN), f"{prefix}.up_proj.weight": (width, HIDDEN)}
        shapes[f"{prefix}.down_proj.weight"] = (HIDDEN, width)
    weights = make_weights(shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)})
    return write_folder(folder, config, weights), weights


def minicpm_folder(folder: Path) -> tuple[Path, Weights]:
    """A checkpoint as openbmb publishes it: w1, w2 and w3 of each expert, no LM head, an old rotary buffer."""
    config = COMMON_CONFIG | {
        "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "num_hidden_layers": 2,
        "auto_map": {
            "AutoConfig": "configuration_minicpm.MiniCPMConfig",
            "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
        },
        "intermediate_size": 32, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "scale_emb": 12,
        "dim_model_base": 16, "scale_depth": 1.4, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        shapes |= layer_shapes(layer) | {f"{prefix}.gate.weight": (NUM_EXPERTS, HIDDEN)}
        for e in range(NUM_EXPERTS):
            shapes |= {f"{prefix}.experts.{e}.w1.weight": (32, HIDDEN), f"{prefix}.experts.{e}.w3.weight": (32, HIDDEN)}
            shapes[f"{prefix}.experts.{e}.w2.weight"] = (HIDDEN, 32)
    weights = make_weights(shapes | {"model.norm.weight": (HIDDEN,)})
    rotary = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(HEAD_DIM // 2) for layer in range(2)}
    return write_folder(folder, config, weights | rotary), weights


def fuse(weights: Weights, fused_prefix: str, router: str, projections: tuple[str, str, str]) -> Weights:
    """Published names -> names of the class; the fused matrix is gate over up."""
    gate, up, down = projections
    fused: Weights = {}
    for fqn, tensor in weights.items():
        found = re.fullmatch(rf"(model\.layers\.\d+)\.mlp\.experts\.0\.{down}\.weight", fqn)
        if found:
            expert = [f"{found[1]}.mlp.experts.{e}" for e in range(NUM_EXPERTS)]
            fused[f"{found[1]}.{fused_prefix}.gate_up_proj"] = torch.stack(
                [torch.cat([weights[f"{e}.{gate}.weight"], weights[f"{e}.{up}.weight"]]) for e in expert]
            )
            fused[f"{found[1]}.{fused_prefix}.down_proj"] = torch.stack([weights[f"{e}.{down}.weight"] for e in expert])
        elif ".mlp.experts." not in fqn:
            fused[fqn.replace(".mlp.gate.", router)] = tensor
    return fused


NON_NATIVE: dict[str, tuple[Callable[[Path], tuple[Path, Weights]], Callable[[Tensor, Weights], Tensor], Any]] = {
    "deepseek-moe-16b": (
        deepseek_folder,
        deepseek_reference,
        ("mlp.experts", ".mlp.gate.", ("gate_proj", "up_proj", "down_proj")),
    ),
    "minicpm-moe-8x2b": (
        minicpm_folder,
        minicpm_reference,
        ("block_sparse_moe.experts", ".block_sparse_moe.router.", ("w1", "w3", "w2")),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NON_NATIVE)
def test_published_layout_fills_every_parameter(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write, _, names = NON_NATIVE[name]
    folder, weights = write(tmp_path / "published")
    model = load_pretrained(folder, name, dtype)
    loaded = dict(model.named_parameters())
    expected = fuse(weights, *names)
    assert loaded.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert torch.equal(loaded[fqn], tensor.to(dtype)), fqn


@pytest.mark.parametrize("name", NON_NATIVE)
def test_loading_info_is_clean(name: str, tmp_path: Path) -> None:
    """`load_pretrained` would raise; here transformers' own report says so, through the auto classes as well."""
    transformers = pytest.importorskip("transformers")
    folder, _ = NON_NATIVE[name][0](tmp_path / "published")
    register_auto_classes()
    register_auto_classes()
    for cls in (MODELS[name].model_class(), transformers.AutoModelForCausalLM):
        model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert type(model) is MODELS[name].model_class()
        assert info["missing_keys"] == set() and not info["mismatched_keys"]
        assert all(key.endswith("rotary_emb.inv_freq") for key in info["unexpected_keys"])


@pytest.mark.parametrize("name", NON_NATIVE)
def test_same_function_as_the_published_architecture(name: str, tmp_path: Path) -> None:
    """Against a forward pass in plain torch that reads the published names."""
    write, reference, _ = NON_NATIVE[name]
    folder, weights = write(tmp_path / "published")
    model = load_pretrained(folder, name, torch.float32)
    for ids in tokens():
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        expected = reference(ids, weights)
        assert expected.std() > 0.1  # a model that says something
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NON_NATIVE)
def test_saved_under_the_published_names(name: str, tmp_path: Path) -> None:
    folder, weights = NON_NATIVE[name][0](tmp_path / "published")
    model: Any = load_pretrained(folder, name, torch.float32)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[fqn], weights[fqn]) for fqn in weights)
    again = load_pretrained(tmp_path / "saved", name, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(model(input_ids=tokens()).logits, again(input_ids=tokens()).logits)


def test_bin_checkpoint(tmp_path: Path) -> None:
    """Whether MiniCPM-MoE is published as safetensors is not known, so the older format has to do too."""
    folder, weights = minicpm_folder(tmp_path / "published")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    loaded = dict(load_pretrained(folder, "minicpm-moe-8x2b", torch.float32).named_parameters())
    fqn = "model.layers.1.block_sparse_moe.experts.down_proj"
    assert torch.equal(loaded[fqn][10], weights["model.layers.1.mlp.experts.10.w2.weight"])


# Names of the class, then the name under which each class's own save_pretrained writes one expert.
NATIVE = {
    "olmoe-1b-7b": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "mixtral-8x7b": "model.layers.1.block_sparse_moe.experts.7.w1.weight",
    "qwen1.5-moe-a2.7b": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "qwen2-57b-a14b": "model.layers.1.mlp.experts.7.gate_proj.weight",
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_models_round_trip(name: str, tmp_path: Path) -> None:
    model: Any = build_model(name, tiny=True)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    fused = dict(model.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(saved[NATIVE[name]], fused[7].chunk(2)[0])
    again = load_pretrained(tmp_path, name)
    assert type(again) is type(model)
    for (fqn, ours), (_, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), fqn


def test_llama4_published_layout(tmp_path: Path) -> None:
    """The published checkpoint is of text and images, and its configuration says 4 where a bool is wanted."""
    model = build_model("llama-4-scout", tiny=True)
    text_config = MODELS["llama-4-scout"].tiny_config().to_dict() | {"attn_temperature_tuning": 4}
    weights = {f"language_model.{fqn}": tensor.detach() for fqn, tensor in model.named_parameters()}
    vision = {"vision_model.class_embedding": torch.ones(8), "multi_modal_projector.linear_1.weight": torch.ones(8, 8)}
    folder = write_folder(tmp_path / "scout", {"model_type": "llama4", "text_config": text_config}, weights | vision)
    loaded: Any = load_pretrained(folder, "llama-4-scout")
    assert type(loaded) is type(model) and loaded.config.attn_temperature_tuning is True
    for (fqn, ours), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), fqn
    # And what our own class saves.
    loaded.save_pretrained(tmp_path / "text")
    text = load_pretrained(tmp_path / "text", "llama-4-scout")
    assert torch.equal(text(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


# --- Refusals


def break_weights(folder: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def break_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize("name", NON_NATIVE)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), r"1 missing \(first: model\.norm\.weight\)"),
        (lambda w: w.update({"model.extra": torch.ones(1)}), r"1 unexpected \(first: model\.extra\)"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(3)}),
            r"1 of another shape \(first: model\.norm\.weight\)",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    name: str, change: Callable[[Weights], object], message: str, tmp_path: Path
) -> None:
    folder, _ = NON_NATIVE[name][0](tmp_path / "published")
    break_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, name)


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("deepseek-moe-16b", "model.layers.1.mlp.experts.3.down_proj.weight"),
        ("minicpm-moe-8x2b", "model.layers.1.mlp.experts.3.w1.weight"),
    ],
)
def test_a_lost_expert_is_refused(name: str, expert: str, tmp_path: Path) -> None:
    folder, _ = NON_NATIVE[name][0](tmp_path / "published")
    break_weights(folder, lambda weights: weights.pop(expert))
    with pytest.raises((ValueError, RuntimeError), match=r"does not fit|conversion"):
        load_pretrained(folder, name)


@pytest.mark.parametrize("changes", [{"norm_topk_prob": True}, {"scoring_func": "sigmoid"}], ids=str)
def test_a_deepseek_that_routes_otherwise_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = deepseek_folder(tmp_path / "published")
    break_config(folder, **changes)
    with pytest.raises(ValueError, match="is supported with norm_topk_prob=False and scoring_func='softmax'"):
        load_pretrained(folder, "deepseek-moe-16b")


def test_the_wrong_name_is_refused(tmp_path: Path) -> None:
    folder, _ = deepseek_folder(tmp_path / "published")
    with pytest.raises(ValueError, match="says model_type 'deepseek', but olmoe-1b-7b is olmoe: pass the name"):
        load_pretrained(folder, "olmoe-1b-7b")
    with pytest.raises(ValueError, match="no model is called 'olmoe': use one of olmoe-1b-7b, "):
        load_pretrained(folder, "olmoe")
    with pytest.raises(ValueError, match="no model is called 'gpt'"):
        build_model("gpt")
    with pytest.raises(FileNotFoundError, match="must be a checkpoint folder of allenai/OLMoE-1B-7B-0924"):
        load_pretrained(tmp_path / "nowhere", "olmoe-1b-7b")


def test_models_cannot_be_changed() -> None:
    spec = MODELS["olmoe-1b-7b"]
    with pytest.raises(FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        MODELS["other"] = spec  # type: ignore[index]
    with pytest.raises(TypeError):
        spec.published["vocab_size"] = 1  # type: ignore[index]
    # Nor does a configuration share anything with its builder.
    MODELS["qwen1.5-moe-a2.7b"].config().mlp_only_layers.append(0)
    assert MODELS["qwen1.5-moe-a2.7b"].config().mlp_only_layers == []
    assert replace(spec, name="other").config().hidden_size == 2048


# --- Published scalings, pickling, import


def test_published_minicpm_scalings() -> None:
    config = MODELS["minicpm-moe-8x2b"].config()
    assert (config.embedding_multiplier, config.attention_multiplier, config.logits_scaling) == (12.0, 0.125, 9.0)
    assert config.residual_multiplier == pytest.approx(0.221359, abs=1e-6)


def test_deepseek_layer_types() -> None:
    spec = MODELS["deepseek-moe-16b"]
    assert spec.config().mlp_layer_types == ["dense"] + ["sparse"] * 27
    sparse = replace(spec, tiny={**spec.tiny, "num_hidden_layers": 5, "first_k_dense_replace": 2, "moe_layer_freq": 2})
    assert sparse.tiny_config().mlp_layer_types == ["dense", "dense", "sparse", "dense", "sparse"]


@pytest.mark.parametrize("name", NON_NATIVE)
def test_own_classes_are_ordinary_classes(name: str) -> None:
    model = build_model(name, tiny=True)
    cls = MODELS[name].model_class()
    assert getattr(fsdp_ciera.recipes.models, cls.__name__) is cls
    copy = pickle.loads(pickle.dumps(model))
    assert type(copy) is cls
    assert torch.equal(copy(input_ids=tokens()).logits, model(input_ids=tokens()).logits)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchModel'"):
        _ = fsdp_ciera.recipes.models.NoSuchModel


@pytest.mark.parametrize("name", NON_NATIVE)
def test_generation_continues_like_one_forward_pass(name: str) -> None:
    """With the cache, token by token, the model says what it says about the whole text at once."""
    torch.manual_seed(0)
    model: Any = build_model(name, tiny=True, dtype=torch.float32).eval()
    text = model.generate(tokens(1, 8), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert text.shape == (1, 12)
    assert torch.equal(model(input_ids=text).logits[0, 7:11].argmax(-1), text[0, 8:])


def test_import_needs_no_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; import fsdp_ciera.recipes.models as m; "
        "assert len(m.MODELS) == 7\n"
        "try: m.build_model('olmoe-1b-7b')\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "the models need transformers: pip install 'fsdp-ciera[recipes]'"


# --- FSDP2


class Trained(NamedTuple):
    """One step on a sharded model beside one on a copy that is not."""

    first_loss: float
    plain_loss: float
    sharded_loss: float
    num_different: int
    transforms: list[str]


def train_sharded(rank: int, world_size: int, names: list[str]) -> dict[str, Trained]:
    """One step of plain SGD in bf16, every rank with the same tokens."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from transformers.conversion_mapping import get_model_conversion_mapping

    results = {}
    for name in names:
        torch.manual_seed(0)
        plain: Any = build_model(name, tiny=True)
        sharded: Any = pickle.loads(pickle.dumps(plain))
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        losses = []
        for model in (plain, sharded):
            loss = model(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.5 * parameter.grad
            losses.append(model(input_ids=tokens(), labels=tokens()).loss.item())
        sharded.reshard()  # the root keeps its parameters after a forward pass
        num_different = 0
        for shard, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert isinstance(shard, DTensor)
            num_different += int((shard.full_tensor() != whole).sum())
        transforms = [type(transform).__name__ for transform in get_model_conversion_mapping(sharded, add_legacy=False)]
        results[name] = Trained(losses[0], losses[1], losses[3], num_different, transforms)
    return results


def test_fully_shard() -> None:
    """One group per decoder layer in bf16: routers included, and tied embeddings in the root's."""
    transforms = {
        "deepseek-moe-16b": ["WeightConverter"] * 2,
        "minicpm-moe-8x2b": ["WeightRenaming"] + ["WeightConverter"] * 2,
    }
    for rank, results in enumerate(run_ranks(train_sharded, 2, list(MODELS))):
        assert results.keys() == MODELS.keys()
        for name, trained in results.items():
            # Both ranks saw the same tokens, so the mean of their gradients is the gradient.
            assert trained.sharded_loss == trained.plain_loss and trained.num_different == 0, (rank, name)
            assert trained.plain_loss < trained.first_loss, (rank, name)
            # fully_shard renamed the class: the checkpoint mapping of our own two is found still, and once.
            if name in transforms:
                assert trained.transforms == transforms[name], (rank, name)


# --- The recipes

RECIPES = {
    "olmoe-1b-7b": "olmoe_1b_7b",
    "deepseek-moe-16b": "deepseek_moe_16b",
    "minicpm-moe-8x2b": "minicpm_moe_8x2b",
    "mixtral-8x7b": "mixtral_8x7b",
    "qwen1.5-moe-a2.7b": "qwen_moe_a2_7b",
    "llama-4-scout": "llama_4_scout",
}


def recipe_of(name: str, *overrides: str) -> Recipe:
    folder = Path(fsdp_ciera.recipes.models.__file__).parent
    return load_recipe(folder / f"{RECIPES[name]}.toml", overrides)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_fits_its_model(name: str) -> None:
    from fsdp_ciera.recipes.shard import ciera_policy

    recipe = recipe_of(name)
    config = MODELS[name].config()
    assert name in recipe.model.folder and name in recipe.train.output
    assert recipe_of(name, "model.folder=/data/my-model").model.folder == "/data/my-model"
    assert recipe.data.seq_len <= config.max_position_embeddings
    # The classes of these two compute no balance loss.
    assert recipe.model.router_aux_loss == (name not in ("deepseek-moe-16b", "llama-4-scout"))
    # An expert for each rank: FSDP2 splits the fused experts along that dimension.
    num_experts = config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
    assert num_experts % recipe.parallel.ranks == 0 or num_experts > recipe.parallel.ranks
    assert ciera_policy(recipe) is not None


def test_every_recipe_file_is_one_of_these() -> None:
    folder = Path(fsdp_ciera.recipes.models.__file__).parent
    assert {path.stem for path in folder.glob("*.toml")} >= set(RECIPES.values())
    # One recipe serves both sizes of Qwen2-MoE.
    assert set(MODELS) - set(RECIPES) == {"qwen2-57b-a14b"}
