"""Tiny MoE models with a byte-level tokenizer, built in code and saved the way published models are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

NUM_BYTES = 256
EOS = "<eos>"
VOCAB_SIZE = 264  # 256 bytes and EOS, up to a multiple of 8


def save_tiny_model(
    folder: Path,
    kind: Literal["olmoe", "mixtral"] = "olmoe",
    *,
    tied: bool = False,
    dropout: float = 0.0,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
) -> Path:
    """Writes config, weights (fp32, ~0.1 M parameters) and tokenizer to `folder`, and returns it."""
    from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

    sizes = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts_per_tok": 2,
        "attention_dropout": dropout, "tie_word_embeddings": tied,
        "eos_token_id": NUM_BYTES, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    if kind == "olmoe":
        model = OlmoeForCausalLM(OlmoeConfig(num_experts=4, **sizes))
    else:
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=4, **sizes))
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def save_tiny_deepseek(folder: Path, *, seed: int = 0) -> Path:
    """Writes a tiny DeepSeek-MoE, which transformers has no class for, and its tokenizer to `folder`."""
    from fsdp_ciera.recipes.models import MODELS

    spec = MODELS["deepseek-moe-16b"]
    config = spec.tiny_config()
    config.vocab_size, config.eos_token_id = VOCAB_SIZE, NUM_BYTES
    torch.manual_seed(seed)
    spec.model_class()(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer whose ids 0..255 stand for the byte values in the order of their symbols, and 256 for EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert len(vocabulary) == NUM_BYTES
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    assert fast.eos_token_id == NUM_BYTES
    fast.save_pretrained(folder)
    return folder


def write_text(path: Path, num_lines: int = 200) -> Path:
    """Writes a deterministic text of `num_lines` lines of about 60 bytes."""
    words = ["shard", "gather", "block", "expert", "router", "layer", "cache", "delta", "bitmap", "epoch", "rank"]
    lines = (" ".join(words[(i * k + k * k) % len(words)] for k in range(1, 11)) for i in range(num_lines))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
