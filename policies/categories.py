"""Which category a parameter belongs to: a pure function of its name.

The name alone decides, never the module's type or the number of dimensions: the routers of transformers are plain
modules with a bare `weight` (Llama-4's is an `nn.Linear`), the q/k/v biases of Qwen2-MoE are as 1-D as a norm, and
OLMoE's query and key norms sit inside the attention. The rules know the fused spelling of transformers v5
(`mlp.experts.gate_up_proj`), the per-expert spelling of checkpoints (`mlp.experts.7.w1.weight`), torchtitan's and the
common dense families' (`attention.wq`, `attn.c_attn`, `fc1`).
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Category = Literal["expert_ffn", "attention", "routing_gate", "layer_norm", "embedding", "other"]
"""`expert_ffn` holds routed and shared experts and dense feed-forward layers; `routing_gate` the routers and the gate
of a shared expert; `embedding` the LM head too; `other` whatever no rule knows, which is never dropped silently."""

CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Every category, in the order in which tables and statistics list them."""

# Wrappers that insert a component anywhere in a name: torch.compile, activation checkpointing, FSDP1, Lightning Fabric;
# PEFT's module around the model and around a layer, and its copy of a fully trained module.
_WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module|base_model\.model"
    r"|base_layer|original_module|modules_to_save\.[^.]+)\."
)
# An adapter's own parameter becomes the `weight` of the module it adapts: "q_proj.lora_A.default.weight" (as trained),
# "q_proj.lora_A.weight" (as saved), "embed_tokens.lora_embedding_A.default" (a bare parameter).
_ADAPTER = re.compile(
    r"(?:^|(?<=\.))lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.(?!weight$|bias$)[^.]+)?(?P<leaf>\.weight|\.bias)?$"
)
# torch.nn.utils.parametrize: "q_proj.parametrizations.weight.original0".
_PARAMETRIZED = re.compile(r"(?:^|(?<=\.))parametrizations\.([^.]+)\.original\d*$")
# DDP, DataParallel and AveragedModel. Only at the start: further in, `module` is a name that a model chose.
_LEADING_MODULE = re.compile(r"^(?:module\.)+")


def canonical_name(fqn: str) -> str:
    """The name of a parameter as its model spells it, without what wrappers added to it.

    Strips torch.compile, activation checkpointing, FSDP1, a leading DDP `module.`, PEFT and parametrisations. A LoRA
    matrix gets the name of the weight it adapts:
    `"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"` is
    `"model.layers.0.self_attn.q_proj.weight"`.
    """
    name = fqn
    # Wrappers nest in any order (DDP around a compiled PEFT model), so until nothing changes any more.
    while (stripped := _LEADING_MODULE.sub("", _WRAPPER.sub("", name))) != name:
        name = stripped
    name = _PARAMETRIZED.sub(r"\1", name)
    return _ADAPTER.sub(lambda match: (match["leaf"] or ".weight")[1:], name)


def _rule(*alternatives: str) -> re.Pattern[str]:
    """A pattern whose alternatives start at a component of the name: an FSDP module knows its parameters only from
    its own root on, so `mlp.gate.weight` must read the same with and without `model.layers.0.` before it."""
    return re.compile(r"(?:^|(?<=\.))(?:" + "|".join(alternatives) + ")")


_LEAF = r"\.(?:weight|bias)$"

# [Note: the first rule that matches decides, so their order is part of them]
# A name can satisfy several rules. What settles it, each with a case in test_categories.py::test_trap:
#   - Llama-4's vision tower repeats the text model's names (`vision_model...self_attn.q_proj`): excluded first.
#   - Norms come before attention and experts, whose modules contain some (`self_attn.q_norm`).
#   - `router` comes before the experts and the attention (mixtures of attention experts route inside both); a module
#     called just `gate` comes after them, since `experts.3.gate` and `self_attn.gate` are no routers.
#   - `mlp.gate.weight` is a router, `mlp.gate_proj.weight` a feed-forward matrix, `mlp.shared_expert_gate.weight` a
#     router again, `mlp.experts.gate_up_proj` an expert: so whole components are compared, never prefixes.
#   - What is left under an `mlp` is feed-forward. That comes last: only then is it known to be no router.
_RULES: tuple[tuple[Category, re.Pattern[str]], ...] = (
    (
        "other",
        _rule(r"(?:vision_model|vision_tower|vision_encoder|visual|audio_tower|multi_modal_projector|mm_projector)\."),
    ),
    (
        "layer_norm",
        _rule(
            r"\w*(?:norm|Norm|NORM)\w*(?:\.\d+)?\.(?:weight|bias|scale)$",
            r"ln(?:_\w+|\d+)?" + _LEAF,
            r"layer_norm_(?:weight|bias)$",  # Transformer Engine keeps a norm's weight inside the linear after it
        ),
    ),
    (
        "embedding",
        _rule(
            r"\w*embed\w*(?:\.|$)",
            r"(?:wte|wpe|lm_head|output_layer)(?:\.|$)",
            r"shared" + _LEAF,  # T5 and BART: the embedding that encoder and decoder share
        ),
    ),
    # Llama's and torchtitan's LM head. Only at the root: deeper, `output` is the end of an attention or a feed-forward.
    ("embedding", re.compile(r"^(?:(?:model|language_model|transformer|decoder)\.)*output" + _LEAF)),
    (
        "routing_gate",
        _rule(
            r"router\.",
            r"shared_experts?_gate\.",
            r"(?:e_score_correction_bias|expert_bias)$",
        ),
    ),
    ("expert_ffn", _rule(r"(?:experts|shared_experts?|shared_mlp)(?:\.|$)")),
    (
        "attention",
        _rule(
            r"(?:self_attn|self_attention|attention|attn|cross_attn|encoder_attn|linear_attn|SelfAttention"
            r"|EncDecAttention)\.",
        ),
    ),
    ("routing_gate", _rule(r"gate\.(?:wg\.)?(?:weight|bias)$")),
    (
        "expert_ffn",
        _rule(
            r"(?:mlp|feed_forward|ffn|block_sparse_moe|moe|DenseReluDense)\.",
            # Fused experts are bare parameters (torchtitan's `w1` too), so no `.weight` need follow.
            r"(?:gate_proj|up_proj|down_proj|gate_up_proj)(?:_bias)?(?:\.|$)",
            r"w[123](?:\.weight|\.bias)?$",
            r"(?:fc[123]|linear_fc[12]|c_fc|fc_in|fc_out|dense_h_to_4h|dense_4h_to_h|input_linear|output_linear)"
            + _LEAF,
            # BERT calls its feed-forward so, and its attention's end `attention.output.dense`, which is settled above.
            r"(?:intermediate|output)\.dense" + _LEAF,
        ),
    ),
    # An FSDP module whose root is the attention itself sees only these.
    (
        "attention",
        _rule(
            r"(?:[qkvo]|qkv|kv|out)_proj" + _LEAF,
            r"(?:q_[ab]_proj|kv_a_proj_with_mqa|kv_[ab]_proj)" + _LEAF,
            r"(?:w[qkvo]|wqkv|c_attn|query_key_value|linear_qkv)" + _LEAF,
        ),
    ),
)


def categorize(fqn: str) -> Category:
    """The category of the parameter with this name, absolute or relative to some module.

    A name that no rule knows is `"other"`: a bare `"weight"`, since what it belongs to was left out, and everything of
    a vision tower. Give the full name where it is known: below a module that is the vision tower itself, its
    `self_attn.q_proj.weight` cannot be told from a language model's.
    """
    name = canonical_name(fqn)
    for category, pattern in _RULES:
        if pattern.search(name):
            return category
    return "other"
