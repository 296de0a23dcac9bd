"""RoPE tables: cos and sin by position for the two kinds of layers.

Window-only layers use base `rope_theta`; layers that compress use `compress_rope_theta` with YaRN:
frequencies of pairs that turn fewer than beta_slow times within the original length are divided by
the factor, those above beta_fast are kept, a linear ramp lies between. The angle is the fp32 product
position * frequency, as in the released code; its cos and sin are taken in fp64 and rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rewright.frontend.config import ModelConfig


def rope_constants(config: ModelConfig, max_context: int) -> dict[str, Tensor]:
    """Every constant of the model by graph name, f32[max_context, rope dims / 2]."""
    tables = {"window": _frequencies(config, config.rope_theta), "compressed": _yarn_frequencies(config)}
    constants = {}
    for name, frequencies in tables.items():
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), frequencies).double()
        constants[f"rope.{name}.cos"] = angles.cos().float()
        constants[f"rope.{name}.sin"] = angles.sin().float()
    return constants


def _frequencies(config: ModelConfig, base: float) -> Tensor:
    """base^(-2i/r) in fp32 for the pairs i = 0 .. r/2 - 1."""
    dims = config.qk_rope_head_dim
    return 1.0 / (base ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))


def _yarn_frequencies(config: ModelConfig) -> Tensor:
    scaling, dims = config.rope_scaling, config.qk_rope_head_dim
    base = config.compress_rope_theta

    def pair_of(turns: float) -> float:
        """The pair that makes `turns` turns over the original length."""
        length = scaling.original_max_position_embeddings
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dims - 1)
    span = max(high - low, 1e-3)
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    frequencies = _frequencies(config, base)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
