"""Every parameter of the six models has its category, in each spelling in which it can be met."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from fsdp_ciera.policies.categories import CATEGORIES, Category, canonical_name, categorize
from fsdp_ciera.recipes.models import MODELS, build_model

# Numbers of parameters per category of the published configurations. They come from the survey of the six models that
# this project started with (its table of parameters and bytes per category), not from the code under test. Expert FFN
# is routed and shared experts and DeepSeek's dense layer; a tied LM head counts once.
COUNTS: dict[str, dict[Category, int]] = {
    "olmoe-1b-7b": {
        "expert_ffn": 6_442_450_944,
        "attention": 268_435_456,
        "routing_gate": 2_097_152,
        "layer_norm": 133_120,
        "embedding": 206_045_184,
    },
    "deepseek-moe-16b": {
        "expert_ffn": 15_482_880_000,
        "attention": 469_762_048,
        "routing_gate": 3_538_944,
        "layer_norm": 116_736,
        "embedding": 419_430_400,
    },
    "minicpm-moe-8x2b": {
        "expert_ffn": 12_740_198_400,
        "attention": 849_346_560,
        "routing_gate": 737_280,
        "layer_norm": 186_624,
        "embedding": 282_822_912,
    },
    "mixtral-8x7b": {
        "expert_ffn": 45_097_156_608,
        "attention": 1_342_177_280,
        "routing_gate": 1_048_576,
        "layer_norm": 266_240,
        "embedding": 262_144_000,
    },
    "qwen1.5-moe-a2.7b": {
        "expert_ffn": 13_287_555_072,
        "attention": 402_800_640,
        "routing_gate": 2_998_272,
        "layer_norm": 100_352,
        "embedding": 622_329_856,
    },
    "qwen2-57b-a14b": {
        "expert_ffn": 55_490_641_920,
        "attention": 822_212_608,
        "routing_gate": 6_522_880,
        "layer_norm": 204_288,
        "embedding": 1_089_077_248,
    },
    "llama-4-scout": {
        "expert_ffn": 102_676_561_920,
        "attention": 3_019_898_880,
        "routing_gate": 3_932_160,
        "layer_norm": 496_640,
        "embedding": 2_068_971_520,
    },
}
# The same table's totals, and parts of a category that it gives: (pattern, parameters).
TOTALS = {
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-moe-16b": 16_375_728_128,
    "minicpm-moe-8x2b": 13_873_291_776,
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "llama-4-scout": 107_769_861_120,
}
PARTS: list[tuple[str, Category, str, int]] = [
    ("olmoe-1b-7b", "layer_norm", r"\.[qk]_norm\.", 65_536),
    ("deepseek-moe-16b", "expert_ffn", r"\.experts\.", 14_948_499_456),
    ("deepseek-moe-16b", "expert_ffn", r"\.shared_experts\.", 467_140_608),
    ("deepseek-moe-16b", "expert_ffn", r"layers\.0\.mlp\.", 67_239_936),
    ("qwen1.5-moe-a2.7b", "attention", r"\.bias$", 147_456),
    ("qwen1.5-moe-a2.7b", "routing_gate", r"\.shared_expert_gate\.", 49_152),
    ("qwen1.5-moe-a2.7b", "expert_ffn", r"\.experts\.", 12_457_082_880),
    ("qwen1.5-moe-a2.7b", "expert_ffn", r"\.shared_expert\.", 830_472_192),
    ("qwen2-57b-a14b", "expert_ffn", r"\.shared_expert\.", 6_165_626_880),
    ("llama-4-scout", "expert_ffn", r"\.experts\.", 96_636_764_160),
    ("llama-4-scout", "expert_ffn", r"\.shared_expert\.", 6_039_797_760),
]
LLAMA_4_VISION = 871_932_416


@cache
def full_size(name: str) -> dict[str, int]:
    """Parameter name -> number of values of the full-size model, which is built without memory."""
    pytest.importorskip("transformers")
    return {fqn: parameter.numel() for fqn, parameter in build_model(name, device="meta").named_parameters()}


def count(parameters: dict[str, int]) -> dict[Category, int]:
    totals: Counter[Category] = Counter()
    for fqn, numel in parameters.items():
        totals[categorize(fqn)] += numel
    return dict(totals)


@pytest.mark.parametrize("name", MODELS)
def test_full_size_counts(name: str) -> None:
    assert count(full_size(name)) == COUNTS[name]
    assert sum(full_size(name).values()) == TOTALS[name]


@pytest.mark.parametrize(("name", "category", "pattern", "expected"), PARTS)
def test_parts_of_a_category(name: str, category: Category, pattern: str, expected: int) -> None:
    part = {fqn: numel for fqn, numel in full_size(name).items() if re.search(pattern, fqn)}
    assert count(part) == {category: expected}


def test_llama4_with_vision() -> None:
    """The conditional-generation class holds the text model under longer names, and a vision half that is `other`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4Config(
        text_config=MODELS["llama-4-scout"].config().to_dict(),
        vision_config={
            "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
            "image_size": 336, "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Llama4ForConditionalGeneration(config)
    counts = count({fqn: parameter.numel() for fqn, parameter in model.named_parameters()})
    assert counts == COUNTS["llama-4-scout"] | {"other": LLAMA_4_VISION}


# How a checkpoint spells the fused experts of a class: (name in the class, names in the checkpoint).
PER_EXPERT = {
    "olmoe-1b-7b": (r"\.mlp\.experts\.", ".mlp.experts.{e}.{p}_proj.weight", ("gate", "up", "down")),
    "deepseek-moe-16b": (r"\.mlp\.experts\.", ".mlp.experts.{e}.{p}_proj.weight", ("gate", "up", "down")),
    "minicpm-moe-8x2b": (r"\.block_sparse_moe\.experts\.", ".mlp.experts.{e}.{p}.weight", ("w1", "w3", "w2")),
    "mixtral-8x7b": (r"\.mlp\.experts\.", ".block_sparse_moe.experts.{e}.{p}.weight", ("w1", "w3", "w2")),
    "qwen1.5-moe-a2.7b": (r"\.mlp\.experts\.", ".mlp.experts.{e}.{p}_proj.weight", ("gate", "up", "down")),
    "qwen2-57b-a14b": (r"\.mlp\.experts\.", ".mlp.experts.{e}.{p}_proj.weight", ("gate", "up", "down")),
}
RENAMED = {
    "minicpm-moe-8x2b": (".block_sparse_moe.router.", ".mlp.gate."),
    "mixtral-8x7b": (".mlp.gate.", ".block_sparse_moe.gate."),
}


def per_expert(name: str) -> Iterator[tuple[str, int]]:
    """The parameters of `full_size` under the published names, the experts one by one."""
    pattern, template, (gate, up, down) = PER_EXPERT[name]
    config = MODELS[name].config()
    num_experts = config.num_experts
    for fqn, numel in full_size(name).items():
        if re.search(pattern, fqn):
            layer = re.split(pattern, fqn)[0]
            projections = (gate, up) if fqn.endswith("gate_up_proj") else (down,)
            for expert in range(num_experts):
                for projection in projections:
                    yield layer + template.format(e=expert, p=projection), numel // num_experts // len(projections)
        else:
            yield fqn.replace(*RENAMED.get(name, ("", ""))), numel


@pytest.mark.parametrize("name", PER_EXPERT)
def test_per_expert_spelling_of_checkpoints(name: str) -> None:
    published = dict(per_expert(name))
    config = MODELS[name].config()
    num_expert_layers = config.num_hidden_layers - (1 if name == "deepseek-moe-16b" else 0)
    num_routed = sum(".experts." in fqn for fqn in published)
    assert num_routed == num_expert_layers * config.num_experts * 3
    assert count(published) == COUNTS[name]


TRAPS: list[tuple[str, Category]] = [
    # Four names that begin alike.
    ("model.layers.3.mlp.gate.weight", "routing_gate"),
    ("model.layers.0.mlp.gate_proj.weight", "expert_ffn"),
    ("model.layers.3.mlp.experts.gate_up_proj", "expert_ffn"),
    ("model.layers.3.mlp.shared_expert_gate.weight", "routing_gate"),
    # Shared experts, by number and family.
    ("model.layers.3.mlp.shared_expert.gate_proj.weight", "expert_ffn"),
    ("model.layers.3.mlp.shared_experts.gate_proj.weight", "expert_ffn"),
    ("language_model.model.layers.3.feed_forward.shared_expert.down_proj.weight", "expert_ffn"),
    # Norms inside the attention.
    ("model.layers.3.self_attn.q_norm.weight", "layer_norm"),
    ("model.layers.3.self_attn.k_norm.weight", "layer_norm"),
    ("model.layers.3.self_attn.q_a_layernorm.weight", "layer_norm"),
    # Norms whose names contain "attention".
    ("model.layers.3.post_attention_layernorm.weight", "layer_norm"),
    ("layers.3.attention_norm.weight", "layer_norm"),
    # Biases are 1-D and no norms.
    ("model.layers.3.self_attn.q_proj.bias", "attention"),
    ("model.layers.3.self_attn.k_proj.bias", "attention"),
    ("model.layers.3.self_attn.v_proj.bias", "attention"),
    # Routers that are modules with a bare weight.
    ("model.layers.3.block_sparse_moe.router.weight", "routing_gate"),
    ("model.layers.3.block_sparse_moe.router.layer.weight", "routing_gate"),
    ("model.layers.3.block_sparse_moe.gate.weight", "routing_gate"),
    ("language_model.model.layers.3.feed_forward.router.weight", "routing_gate"),
    ("model.layers.3.mlp.gate.e_score_correction_bias", "routing_gate"),
    # Fused experts are parameters without `.weight`; Granite's are modules.
    ("model.layers.3.mlp.experts.down_proj", "expert_ffn"),
    ("language_model.model.layers.3.feed_forward.experts.gate_up_proj", "expert_ffn"),
    ("model.layers.3.block_sparse_moe.input_linear.weight", "expert_ffn"),
    ("model.layers.3.block_sparse_moe.output_linear.weight", "expert_ffn"),
    ("model.layers.3.mlp.experts.gate_up_proj_bias", "expert_ffn"),
    # Experts of checkpoints.
    ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "expert_ffn"),
    ("model.layers.3.mlp.experts.7.w2.weight", "expert_ffn"),
    ("model.layers.3.mlp.experts.63.gate_proj.weight", "expert_ffn"),
    # A component called `gate` that is no router, and a `router` inside what is otherwise attention.
    ("model.layers.3.mlp.experts.7.gate.weight", "expert_ffn"),
    ("model.layers.3.self_attn.gate.weight", "attention"),
    ("model.layers.3.self_attention.experts.router.layer.weight", "routing_gate"),
    # Embedding and LM head; when they are tied only the first name exists.
    ("model.embed_tokens.weight", "embedding"),
    ("lm_head.weight", "embedding"),
    ("language_model.lm_head.weight", "embedding"),
    # Llama-4's vision half, which repeats the text model's names.
    ("vision_model.model.layers.3.self_attn.q_proj.weight", "other"),
    ("vision_model.model.layers.3.post_attention_layernorm.weight", "other"),
    ("vision_model.model.layers.3.mlp.fc1.weight", "other"),
    ("vision_model.layernorm_pre.weight", "other"),
    ("vision_model.positional_embedding_vlm", "other"),
    ("multi_modal_projector.linear_1.weight", "other"),
    ("model.vision_model.model.layers.3.self_attn.q_proj.weight", "other"),
    # Unknown is `other`, never a guess.
    ("model.layers.3.temporal.scale", "other"),
    ("", "other"),
]


@pytest.mark.parametrize(("fqn", "category"), TRAPS)
def test_trap(fqn: str, category: Category) -> None:
    assert categorize(fqn) == category


RELATIVE: list[tuple[str, Category]] = [
    # The root is a decoder layer, an MoE block, an attention, an expert, one linear or a norm.
    ("mlp.gate.weight", "routing_gate"),
    ("mlp.experts.gate_up_proj", "expert_ffn"),
    ("self_attn.q_proj.weight", "attention"),
    ("self_attn.q_norm.weight", "layer_norm"),
    ("input_layernorm.weight", "layer_norm"),
    ("block_sparse_moe.router.weight", "routing_gate"),
    ("gate.weight", "routing_gate"),
    ("router.weight", "routing_gate"),
    ("router.layer.weight", "routing_gate"),
    ("shared_expert_gate.weight", "routing_gate"),
    ("experts.gate_up_proj", "expert_ffn"),
    ("experts.7.w3.weight", "expert_ffn"),
    ("shared_experts.up_proj.weight", "expert_ffn"),
    ("gate_up_proj", "expert_ffn"),
    ("down_proj", "expert_ffn"),
    ("gate_proj.weight", "expert_ffn"),
    ("w1.weight", "expert_ffn"),
    ("w2", "expert_ffn"),
    ("input_linear.weight", "expert_ffn"),
    ("q_proj.weight", "attention"),
    ("k_proj.bias", "attention"),
    ("q_norm.weight", "layer_norm"),
    ("embed_tokens.weight", "embedding"),
    ("norm.weight", "layer_norm"),
    ("lm_head.weight", "embedding"),
    ("weight", "other"),
    ("bias", "other"),
]


@pytest.mark.parametrize(("fqn", "category"), RELATIVE)
def test_relative_name(fqn: str, category: Category) -> None:
    assert categorize(fqn) == category


OTHER_FAMILIES: list[tuple[str, Category]] = [
    # torchtitan and the original Llama
    ("tok_embeddings.weight", "embedding"),
    ("layers.0.attention.wq.weight", "attention"),
    ("layers.0.attention.wo.weight", "attention"),
    ("layers.0.attention_norm.weight", "layer_norm"),
    ("layers.0.ffn_norm.weight", "layer_norm"),
    ("layers.0.feed_forward.w1.weight", "expert_ffn"),
    ("layers.0.moe.router.gate.weight", "routing_gate"),
    ("layers.0.moe.expert_bias", "routing_gate"),
    ("layers.0.moe.experts.w1", "expert_ffn"),
    ("layers.0.moe.shared_experts.w1.weight", "expert_ffn"),
    ("norm.weight", "layer_norm"),
    ("output.weight", "embedding"),
    # GPT-2
    ("transformer.wte.weight", "embedding"),
    ("transformer.wpe.weight", "embedding"),
    ("transformer.h.0.ln_1.weight", "layer_norm"),
    ("transformer.h.0.ln_2.bias", "layer_norm"),
    ("transformer.h.0.attn.c_attn.weight", "attention"),
    ("transformer.h.0.attn.c_proj.weight", "attention"),
    ("transformer.h.0.mlp.c_fc.weight", "expert_ffn"),
    ("transformer.h.0.mlp.c_proj.weight", "expert_ffn"),
    ("transformer.ln_f.weight", "layer_norm"),
    # OPT, GPT-NeoX, Falcon
    ("model.decoder.layers.0.fc1.weight", "expert_ffn"),
    ("model.decoder.layers.0.fc2.bias", "expert_ffn"),
    ("model.decoder.layers.0.self_attn.out_proj.weight", "attention"),
    ("model.decoder.layers.0.self_attn_layer_norm.weight", "layer_norm"),
    ("model.decoder.embed_positions.weight", "embedding"),
    ("gpt_neox.embed_in.weight", "embedding"),
    ("gpt_neox.layers.0.attention.query_key_value.weight", "attention"),
    ("gpt_neox.layers.0.attention.dense.weight", "attention"),
    ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "expert_ffn"),
    ("embed_out.weight", "embedding"),
    # BERT, where `output.dense` ends the attention or the feed-forward
    ("bert.embeddings.word_embeddings.weight", "embedding"),
    ("bert.embeddings.LayerNorm.weight", "layer_norm"),
    ("bert.encoder.layer.0.attention.self.query.weight", "attention"),
    ("bert.encoder.layer.0.attention.output.dense.weight", "attention"),
    ("bert.encoder.layer.0.attention.output.LayerNorm.bias", "layer_norm"),
    ("bert.encoder.layer.0.intermediate.dense.weight", "expert_ffn"),
    ("bert.encoder.layer.0.output.dense.weight", "expert_ffn"),
    ("bert.encoder.layer.0.output.LayerNorm.weight", "layer_norm"),
    # T5
    ("shared.weight", "embedding"),
    ("encoder.block.0.layer.0.SelfAttention.o.weight", "attention"),
    ("encoder.block.0.layer.1.DenseReluDense.wo.weight", "expert_ffn"),
    ("encoder.block.0.layer.1.layer_norm.weight", "layer_norm"),
    # Megatron
    ("embedding.word_embeddings.weight", "embedding"),
    ("decoder.layers.0.self_attention.linear_qkv.weight", "attention"),
    ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "layer_norm"),
    ("decoder.layers.0.mlp.linear_fc1.weight", "expert_ffn"),
    ("output_layer.weight", "embedding"),
]


@pytest.mark.parametrize(("fqn", "category"), OTHER_FAMILIES)
def test_other_families(fqn: str, category: Category) -> None:
    assert categorize(fqn) == category


Q = "model.layers.0.self_attn.q_proj.weight"
WRAPPED: list[tuple[str, str]] = [
    ("_orig_mod." + Q, Q),
    ("model.layers.0._orig_mod.self_attn.q_proj.weight", Q),
    ("model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight", Q),
    ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.weight", Q),
    ("_forward_module." + Q, Q),
    ("module." + Q, Q),
    ("module._orig_mod." + Q, Q),
    ("_orig_mod.module." + Q, Q),
    ("module.module." + Q, Q),
    ("base_model.model." + Q, Q),
    ("module.base_model.model." + Q, Q),
    ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", Q),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", Q),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.my_adapter.weight", Q),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", Q),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight", Q),
    ("model.layers.0.self_attn.q_proj.parametrizations.weight.original0", Q),
    ("base_model.model.model.embed_tokens.lora_embedding_A.default", "model.embed_tokens.weight"),
    ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
    ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
    # PEFT nests one wrapper for each fused expert parameter that it adapts.
    ("base_model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj", "layers.0.mlp.experts.down_proj"),
    # The root is the adapted linear itself.
    ("lora_A.default.weight", "weight"),
    # Nothing to strip.
    (Q, Q),
    ("encoder.module.weight", "encoder.module.weight"),
    ("my_orig_mod.weight", "my_orig_mod.weight"),
    ("submodule.weight", "submodule.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("fqn", "expected"), WRAPPED)
def test_canonical_name(fqn: str, expected: str) -> None:
    assert canonical_name(fqn) == expected
    assert canonical_name(expected) == expected


@pytest.mark.parametrize(
    ("fqn", "category"),
    [
        ("base_model.model.model.layers.0.mlp.gate_proj.lora_A.default.weight", "expert_ffn"),
        ("base_model.model.model.layers.0.mlp.gate.lora_B.default.weight", "routing_gate"),
        ("base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.default.weight", "expert_ffn"),
        ("base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight", "attention"),
        ("base_model.model.model.embed_tokens.lora_embedding_B.default", "embedding"),
        ("q_proj.lora_A.default.weight", "attention"),
        ("lora_A.default.weight", "other"),
        ("module.vision_model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "other"),
    ],
)
def test_adapters_take_the_category_of_what_they_adapt(fqn: str, category: Category) -> None:
    assert categorize(fqn) == category


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod.base_model.model."])
def test_a_wrapped_model_is_categorised_like_the_model(name: str, prefix: str) -> None:
    for fqn in full_size(name):
        assert canonical_name(prefix + fqn) == fqn


@pytest.mark.parametrize("name", MODELS)
def test_names_relative_to_the_decoder_layer(name: str) -> None:
    """An FSDP2 group per decoder layer knows its parameters by these names."""
    num_shortened = 0
    for fqn in full_size(name):
        relative = re.sub(r"^model\.layers\.\d+\.", "", fqn)
        num_shortened += relative != fqn
        assert categorize(relative) == categorize(fqn) != "other"
    assert num_shortened > 100


def test_categories_are_those_of_the_type() -> None:
    assert CATEGORIES == ("expert_ffn", "attention", "routing_gate", "layer_norm", "embedding", "other")
