"""The MoE models of the paper's evaluation, from their published configurations, as transformers v5 classes.

transformers knows four of the six. DeepSeek-MoE and MiniCPM-MoE exist only as remote code that no longer imports under
v5, so each gets a class here, put together from parts of transformers that compute the same function, and a mapping
that reads and writes checkpoints under the published names. "The same function" is not "the same bits": the publishers'
code rounds bf16 in a different order.

transformers is an extra (`pip install fsdp-ciera[recipes]`) and is imported only when a function needs it.

[Note: where the configurations come from]
The figures are those of copies of the published files, since the files themselves were out of reach when this was
written. What the checkpoint folder says always wins: `load_pretrained` reads the folder's own `config.json`. Checked by
test_categories.py::test_full_size_counts, whose totals tell a wrong width, depth or number of experts at once.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

_OWN_CLASSES = (
    "DeepseekMoeConfig",
    "DeepseekMoeModel",
    "DeepseekMoeForCausalLM",
    "MiniCPMMoeConfig",
    "MiniCPMMoeForCausalLM",
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model: where it is published, which class runs it, and how large it is."""

    name: str
    """Key in `MODELS`, and the name by which recipes call it."""

    hub_id: str
    """Where the checkpoint is published. Nothing here downloads it."""

    class_name: str
    """A class of transformers, or one of this module's own."""

    config_class_name: str
    """The configuration class that goes with it, from the same place."""

    model_types: tuple[str, ...]
    """The `model_type` values of the `config.json` files that `load_pretrained` accepts for this model."""

    published: Mapping[str, Any]
    """The published configuration, in the field names of `config_class_name`."""

    tiny: Mapping[str, Any]
    """What `tiny_config` changes in it: sizes only, so that a test runs the architecture that training runs."""

    notes: str
    """What to know before training it."""

    def __post_init__(self) -> None:
        for name in ("published", "tiny"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def config(self) -> Any:
        """The published configuration, as the transformers class that `model_class()` takes."""
        # Copied deeply: a configuration keeps the lists and dicts that it is given, and users edit it.
        return _class_named(self.config_class_name)(**copy.deepcopy(dict(self.published)))

    def tiny_config(self) -> Any:
        """The same architecture with 64 hidden units, 8 experts and a vocabulary of 256: for tests on a CPU.

        Every width is a multiple of 8, since the grouped matrix multiply of the experts needs rows of 16 bytes.
        """
        return _class_named(self.config_class_name)(**copy.deepcopy({**self.published, **self.tiny}))

    def model_class(self) -> Any:
        """The class that runs this model. Imports transformers."""
        return _class_named(self.class_name)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(original_max_position: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_max_position,
    }


_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_QWEN_NOTES = (
    "q, k and v have biases; one shared expert per layer, whose gate is a sigmoid of its own. For the router's "
    "balance loss call the model with output_router_logits=True."
)

_SPECS = (
    ModelSpec(
        name="olmoe-1b-7b",
        hub_id="allenai/OLMoE-1B-7B-0924",
        class_name="OlmoeForCausalLM",
        config_class_name="OlmoeConfig",
        model_types=("olmoe",),
        published={
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
            "clip_qkv": None,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _rope(10000.0),
            "tie_word_embeddings": False,
            "pad_token_id": 1,
            "eos_token_id": 50279,
        },
        tiny={**_TINY, "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
        notes="RMS norms over the whole query and key, before the heads are split; they are norms, not attention.",
    ),
    ModelSpec(
        name="deepseek-moe-16b",
        hub_id="deepseek-ai/deepseek-moe-16b-base",
        class_name="DeepseekMoeForCausalLM",
        config_class_name="DeepseekMoeConfig",
        model_types=("deepseek",),
        published={
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 28,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _rope(10000.0),
            "tie_word_embeddings": False,
        },
        tiny={
            **_TINY,
            "num_hidden_layers": 3,  # the dense layer 0 and two with experts
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
        notes="Layer 0 is dense. The two shared experts are one MLP without a gate. The sequence-level balance loss of "
        "its pre-training (alpha 0.001) is not computed.",
    ),
    ModelSpec(
        name="minicpm-moe-8x2b",
        hub_id="openbmb/MiniCPM-MoE-8x2B",
        class_name="MiniCPMMoeForCausalLM",
        config_class_name="MiniCPMMoeConfig",
        model_types=("minicpm",),
        published={
            "vocab_size": 122753,
            "hidden_size": 2304,
            "intermediate_size": 5760,
            "num_hidden_layers": 40,
            "num_attention_heads": 36,
            "num_key_value_heads": 36,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "scale_emb": 12,
            "dim_model_base": 256,
            "scale_depth": 1.4,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _rope(10000.0),
            "tie_word_embeddings": True,
        },
        tiny={**_TINY, "intermediate_size": 32, "dim_model_base": 16},
        notes="The LM head is the embedding (tied, counted once): FSDP2 needs both in one group, so leave them to the "
        "root. Router weights are always renormalised over the top two.",
    ),
    ModelSpec(
        name="mixtral-8x7b",
        hub_id="mistralai/Mixtral-8x7B-v0.1",
        class_name="MixtralForCausalLM",
        config_class_name="MixtralConfig",
        model_types=("mixtral",),
        published={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _rope(1e6),
            "tie_word_embeddings": False,
        },
        tiny={**_TINY, "num_key_value_heads": 2, "intermediate_size": 32},
        notes="Eight experts: on more than eight ranks FSDP2's default split leaves ranks without an expert.",
    ),
    ModelSpec(
        name="qwen1.5-moe-a2.7b",
        hub_id="Qwen/Qwen1.5-MoE-A2.7B",
        class_name="Qwen2MoeForCausalLM",
        config_class_name="Qwen2MoeConfig",
        model_types=("qwen2_moe",),
        published={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,  # a dense layer's, of which there is none
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _rope(1e6),
            "tie_word_embeddings": False,
        },
        tiny={
            **_TINY,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        notes="The Qwen2-MoE that fits one node. " + _QWEN_NOTES,
    ),
    ModelSpec(
        name="qwen2-57b-a14b",
        hub_id="Qwen/Qwen2-57B-A14B",
        class_name="Qwen2MoeForCausalLM",
        config_class_name="Qwen2MoeConfig",
        model_types=("qwen2_moe",),
        published={
            "vocab_size": 151936,
            "hidden_size": 3584,
            "intermediate_size": 18944,  # a dense layer's, of which there is none
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _rope(1e6),
            "tie_word_embeddings": False,
        },
        tiny={
            **_TINY,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        notes="115 GB of weights. " + _QWEN_NOTES,
    ),
    ModelSpec(
        name="llama-4-scout",
        hub_id="meta-llama/Llama-4-Scout-17B-16E",
        class_name="Llama4ForCausalLM",
        config_class_name="Llama4TextConfig",
        model_types=("llama4", "llama4_text"),
        published={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,  # a dense layer's, of which Scout has none
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _llama3_rope(original_max_position=8192),
            "tie_word_embeddings": False,
        },
        tiny={
            **_TINY,
            "num_hidden_layers": 4,  # the fourth is the one without RoPE
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "num_local_experts": 8,
            "attention_chunk_size": 64,
            "rope_parameters": _llama3_rope(original_max_position=128),
        },
        notes="The text model; vision tower and projector stay in the checkpoint. The experts of transformers run "
        "every token through every expert, 16 times the activations. No balance loss in this class. Its query and key "
        "norms have no parameters.",
    ),
)

MODELS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
"""The models by name."""


def build_model(
    name: str,
    *,
    tiny: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """A model with random weights from torch's global generator, every parameter in `dtype`.

    `device="meta"` costs no memory at any size: for counting, planning and sharding first. After `to_empty`, call the
    model's `init_weights()`: it fills the rotary frequencies too, which are buffers that no checkpoint holds.

    Raises `ValueError` for a name that is not in `MODELS`.
    """
    spec = _spec(name)
    config = spec.tiny_config() if tiny else spec.config()
    with torch.device(device):
        return cast(nn.Module, spec.model_class()._from_config(config, dtype=dtype))


def load_pretrained(folder: str | Path, name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model in a checkpoint folder of the published layout (`config.json` and its weight files), in `dtype`.

    The sizes are those of the folder's `config.json`; `name` says which model the folder must hold. Nothing is ever
    downloaded. Folders that the model's own `save_pretrained` wrote have the published layout again.

    Raises `FileNotFoundError` for a folder without `config.json`, and `ValueError` if it holds another model, asks for
    something that our class does not compute, or does not fill exactly the parameters of the model. Experts that do not
    fit together are transformers' own `RuntimeError`.
    """
    spec = _spec(name)
    folder = Path(folder)
    config = _read_config(folder, spec)
    model, info = spec.model_class().from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below, together with the others
    )
    problems = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(key for key in info["unexpected_keys"] if not _SKIPPED_KEYS.search(key)),
        "of another shape": sorted(key for key, *_ in info["mismatched_keys"]),
    }
    problems = {kind: keys for kind, keys in problems.items() if keys}
    if problems:
        listed = "; ".join(f"{len(keys)} {kind} (first: {keys[0]})" for kind, keys in problems.items())
        raise ValueError(f"{folder} does not fit {spec.class_name}: {listed}. Is it a checkpoint of {spec.hub_id}?")
    return cast(nn.Module, model)


def register_auto_classes() -> None:
    """Makes `AutoConfig` and `AutoModelForCausalLM` read published DeepSeek-MoE and MiniCPM-MoE folders.

    For code that is given a folder and no name. Remote code in such a folder is then not asked for. Doing it twice does
    no harm.
    """
    transformers = _import_transformers()
    for config_name, model_name in (
        ("DeepseekMoeConfig", "DeepseekMoeForCausalLM"),
        ("MiniCPMMoeConfig", "MiniCPMMoeForCausalLM"),
    ):
        config_class = _class_named(config_name)
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        transformers.AutoModelForCausalLM.register(config_class, _class_named(model_name), exist_ok=True)


# What a published checkpoint may hold beyond the text model: old files carry the rotary frequencies, Llama-4's its
# vision half.
_SKIPPED_KEYS = re.compile(r"\.rotary_emb\.inv_freq$|^vision_model\.|^multi_modal_projector\.")


def _spec(name: str) -> ModelSpec:
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}: use one of {', '.join(MODELS)}")
    return MODELS[name]


def _read_config(folder: Path, spec: ModelSpec) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} must be a checkpoint folder of {spec.hub_id}")
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("model_type") not in spec.model_types:
        raise ValueError(
            f"{path} says model_type {fields.get('model_type')!r}, but {spec.name} is {' or '.join(spec.model_types)}: "
            "pass the name of the model that the folder holds"
        )
    # Scout's checkpoint is a model of text and images, of which the text model takes its part.
    fields = fields.get("text_config", fields)
    # [Note: the published Llama-4 says 4 where transformers wants a bool]
    # The configuration is validated strictly, and the published files have `attn_temperature_tuning: 4` for "on".
    # Checked by test_models.py::test_llama4_published_layout.
    if isinstance(fields.get("attn_temperature_tuning"), int):
        fields["attn_temperature_tuning"] = bool(fields["attn_temperature_tuning"])
    return _class_named(spec.config_class_name).from_dict(fields)


def _class_named(name: str) -> Any:
    if name in _OWN_CLASSES:
        return _own_classes()[name]
    return getattr(_import_transformers(), name)


def __getattr__(name: str) -> Any:
    """Our own classes, made when they are first asked for: they subclass transformers', which stays optional.

    Being attributes of this module they can be pickled, like any other class.
    """
    if name in _OWN_CLASSES:
        return _own_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("the models need transformers: pip install 'fsdp-ciera[recipes]'") from error
    return transformers


@functools.cache
def _own_classes() -> Mapping[str, Any]:
    # [Note: checkpoint mappings hang on the model type, not on the class]
    # transformers looks a mapping up under the class's name first, and fully_shard renames classes ("FSDPDeepseek..."):
    # a mapping under the class's name would be lost for sharded models. With one under both, the inner model would
    # apply it a second time. Checked by test_models.py::test_fully_shard.
    _import_transformers()
    classes = {**_make_deepseek_classes(), **_make_minicpm_classes()}
    for name, cls in classes.items():
        cls.__module__, cls.__qualname__, cls.__name__ = __name__, name, name
    return MappingProxyType(classes)


def _make_deepseek_classes() -> dict[str, Any]:
    """DeepSeek-MoE: the text trunk of DeepSeek-OCR-2 under an LM head.

    The trunk is this very architecture: plain multi-head attention, softmax routing without renormalising the top k,
    shared experts without a gate. The other way, `Qwen2MoeForCausalLM` with the gate of its shared expert frozen at
    zero and that expert's output projection doubled (a sigmoid of zero is a half), computes the same function but
    trains another model: Adam's relative step on the doubled matrix is halved, weight decay acts on twice the value,
    and a frozen gate travels in every gather. Its names would not be the published ones either.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.generation import GenerationMixin
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast
    from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
    from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import (
        DeepseekOcr2TextModel,
        DeepseekOcr2TextPreTrainedModel,
        DeepseekOcr2TextTopkRouter,
    )

    class DeepseekMoeConfig(DeepseekOcr2TextConfig):  # type: ignore[misc]
        """The fields of the published `config.json`, and the layer types that follow from them."""

        model_type = "deepseek"

        first_k_dense_replace: int = 0
        moe_layer_freq: int = 1
        norm_topk_prob: bool = False
        scoring_func: str = "softmax"
        mlp_layer_types: list[str] | None = None

        def __post_init__(self, **kwargs: Any) -> None:
            # The trunk ignores both fields, so another value would be computed wrongly without a word.
            if self.norm_topk_prob or self.scoring_func != "softmax":
                raise ValueError(
                    f"norm_topk_prob={self.norm_topk_prob}, scoring_func={self.scoring_func!r}: DeepSeek-MoE is "
                    "supported with norm_topk_prob=False and scoring_func='softmax', as published"
                )
            if self.mlp_layer_types is None:
                self.mlp_layer_types = [
                    "sparse" if i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0 else "dense"
                    for i in range(self.num_hidden_layers)
                ]
            super().__post_init__(**kwargs)

    # [Note: a router in fp32 does not go into one FSDP2 group with bf16 experts]
    # The trunk creates its routers in fp32, and lists them to be kept so whatever dtype is asked for. FSDP2 gathers a
    # group as one flat buffer and refuses mixed dtypes ("FSDP expects uniform original parameter dtype", pytorch issue
    # 156784). The published checkpoint has bf16 routers and the router's forward casts up to fp32 anyway, so ours have
    # the model's dtype. Both the trunk and the model drop the list: from_pretrained unites those of all submodules.
    # Checked by test_models.py::test_every_parameter_has_the_dtype_asked_for and ::test_fully_shard.
    class DeepseekMoeModel(DeepseekOcr2TextModel):  # type: ignore[misc]
        """The trunk, with routers in the dtype of the model."""

        config_class = DeepseekMoeConfig
        _keep_in_fp32_modules_strict = None
        _can_set_experts_implementation_cached_value = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for module in self.modules():
                if isinstance(module, DeepseekOcr2TextTopkRouter):
                    module.weight = nn.Parameter(module.weight.detach().to(torch.get_default_dtype()))

    class DeepseekMoeForCausalLM(DeepseekOcr2TextPreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """DeepSeek-MoE with its LM head; parameters under the published names, experts fused."""

        config_class = DeepseekMoeConfig
        _keep_in_fp32_modules_strict = None
        # [Note: transformers looks for its experts decorator in the source of the class's own module]
        # A subclass elsewhere fails that search, and silently gets the slow loop over experts, or a ValueError when
        # another implementation is asked for. The experts are transformers' own and do dispatch.
        # Checked by test_models.py::test_experts_implementations.
        _can_set_experts_implementation_cached_value = True
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' spelling
        _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
        _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = DeepseekMoeModel(config)
            self.vocab_size = config.vocab_size
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            cache: Any = None,
            inputs_embeds: torch.Tensor | None = None,
            labels: torch.Tensor | None = None,
            use_cache: bool | None = None,
            logits_to_keep: int = 0,
            **kwargs: Any,
        ) -> Any:
            """Logits, and with `labels` the mean cross-entropy of the next token."""
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
            # A slice from -0 is everything, which is what 0 stands for.
            logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:, :])
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
            return MoeCausalLMOutputWithPast(
                loss=loss,
                logits=logits,
                cache=outputs.cache,
                hidden_states=outputs.hidden_states,
                attentions=outputs.attentions,
                router_logits=outputs.router_logits,
            )

    # Its published names are Qwen2-MoE's, as far as they need converting.
    register_checkpoint_conversion_mapping(
        DeepseekMoeConfig.model_type, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True
    )
    return {
        "DeepseekMoeConfig": DeepseekMoeConfig,
        "DeepseekMoeModel": DeepseekMoeModel,
        "DeepseekMoeForCausalLM": DeepseekMoeForCausalLM,
    }


def _make_minicpm_classes() -> dict[str, Any]:
    """MiniCPM-MoE: GraniteMoe, whose four multipliers are MiniCPM's scalings under other names."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

    class MiniCPMMoeConfig(GraniteMoeConfig):  # type: ignore[misc]
        """The fields of the published `config.json`, and the multipliers of GraniteMoe that follow from them."""

        model_type = "minicpm"
        attribute_map = {"num_experts": "num_local_experts"}  # noqa: RUF012 - transformers' spelling

        scale_emb: int | float = 1
        dim_model_base: int = 1
        scale_depth: int | float = 1
        tie_word_embeddings: bool = True  # MiniCPM's default, which its files leave out

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            self.embedding_multiplier = float(self.scale_emb)
            self.residual_multiplier = self.scale_depth / self.num_hidden_layers**0.5
            self.attention_multiplier = (self.hidden_size // self.num_attention_heads) ** -0.5
            self.logits_scaling = self.hidden_size / self.dim_model_base

    class MiniCPMMoeForCausalLM(GraniteMoeForCausalLM):  # type: ignore[misc]
        """MiniCPM-MoE. A class of its own, so that Granite's checkpoints are read as ever."""

        config_class = MiniCPMMoeConfig
        # [Note: transformers looks for its experts decorator in the source of the class's own module], see above.
        _can_set_experts_implementation_cached_value = True

    register_checkpoint_conversion_mapping(
        MiniCPMMoeConfig.model_type,
        [
            WeightRenaming(r"\.mlp\.gate\.weight", ".block_sparse_moe.router.weight"),
            # The fused matrix is [gate; up], which MiniCPM calls w1 and w3; w2 is down.
            WeightConverter(
                source_patterns=[".mlp.experts.*.w1.weight", ".mlp.experts.*.w3.weight"],
                target_patterns=".block_sparse_moe.experts.gate_up_proj",
                operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                source_patterns=".mlp.experts.*.w2.weight",
                target_patterns=".block_sparse_moe.experts.down_proj",
                operations=[MergeModulelist(dim=0)],
            ),
        ],
        overwrite=True,
    )
    return {"MiniCPMMoeConfig": MiniCPMMoeConfig, "MiniCPMMoeForCausalLM": MiniCPMMoeForCausalLM}
