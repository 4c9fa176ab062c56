"""Shards, and changes of them that make value_delta take each of its forms."""

from __future__ import annotations

import torch

from fsdp_ciera.codecs.sections import Coding
from fsdp_ciera.kernels.formats import FORMATS

NAMES = ["self_attn.q_proj.weight", "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    raw = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


FORMS = {
    # name: (codings of positions, codings of moves) that value_delta takes for it, of 20,000 values
    "few": ({Coding.PLAIN, Coding.ZSTD}, {Coding.NIBBLES, Coding.NIBBLES_ZSTD}),
    "many": ({Coding.BITMAP, Coding.BITMAP_ZSTD, Coding.ZSTD}, {Coding.NIBBLES_ZSTD}),
    "clusters": ({Coding.BITMAP_ZSTD}, {Coding.NIBBLES_ZSTD}),
    "most": ({Coding.DENSE}, {Coding.NIBBLES_ZSTD}),
    "far": ({Coding.DENSE}, {Coding.ZSTD}),
    "noisy": ({Coding.DENSE}, {Coding.PLAIN}),  # moves that zstd cannot shrink, and literals
    "some replaced": ({Coding.DENSE}, {Coding.NIBBLES_ZSTD, Coding.ZSTD}),
    "mostly small ones": ({Coding.ZSTD}, {Coding.NIBBLES_ZSTD}),
    "small ones far, large ones replaced": ({Coding.ZSTD}, {Coding.PLAIN, Coding.ZSTD, Coding.NIBBLES_ZSTD}),
    "few replaced": ({Coding.PLAIN, Coding.ZSTD}, {Coding.NIBBLES, Coding.NIBBLES_ZSTD, Coding.ZSTD}),
    "all replaced": ({Coding.ALL}, {Coding.PLAIN}),
}


def changed(shard: torch.Tensor, form: str, seed: int = 0) -> torch.Tensor:
    """`shard` after changes that make value_delta take a certain form."""
    dtype, num_values = shard.dtype, len(shard)
    generator = torch.Generator().manual_seed(1000 + seed)  # not the shard's own numbers
    bits = shard.view(FORMATS[dtype].int_dtype)
    draw = torch.rand(num_values, generator=generator)
    sign = torch.where(torch.rand(num_values, generator=generator) < 0.5, -1, 1).to(bits.dtype)
    noise = random_bits((num_values,), dtype, generator).view(bits.dtype)
    often_if_small = draw < torch.where(shard.float().abs() < 0.25, 0.8, 0.02)
    far = sign * torch.randint(1, 99, (num_values,), generator=generator).to(bits.dtype)
    fresh = {
        "mostly small ones": torch.where(often_if_small, bits + sign, bits),
        "small ones far, large ones replaced": torch.where(
            often_if_small, torch.where(shard.float().abs() < 0.25, bits + far, noise), bits
        ),
        "few": torch.where(draw < 0.01, bits + sign, bits),
        "many": torch.where(draw < 0.3, bits + sign, bits),
        "clusters": torch.where(torch.arange(num_values) % 512 < 150, bits + sign, bits),
        "most": torch.where(draw < 0.9, bits + sign, bits),
        "far": bits + sign * torch.randint(40, 80, (num_values,), generator=generator).to(bits.dtype),
        "noisy": torch.where(
            draw < 0.05, noise, bits + torch.randint(-127, 128, (num_values,), generator=generator).to(bits.dtype)
        ),
        "some replaced": torch.where(draw < 0.3, noise, bits + sign),
        "few replaced": torch.where(draw < 0.01, noise, bits),
        "all replaced": noise,
    }[form]
    return fresh.to(bits.dtype).view(dtype)
