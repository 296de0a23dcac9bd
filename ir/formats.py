"""Exact conversion of the low-precision formats: e4m3, e2m1 and ue8m0.

Formulas: OCP FP8 and MX specifications for the codes; block scales are the smallest power of two
that brings the block's largest magnitude into range, found from the fp32 bit pattern and not from
a logarithm, as the released model was trained with.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Smallest magnitudes that the released quantisers divide by (guards an all-zero block).
_AMAX_FLOOR = {"e4m3": 1e-4, "e2m1": E2M1_MAX * 2.0**-126}
_MAX = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}


@cache
def _e8m0_table() -> Tensor:
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    values[255] = float("nan")
    return values.float()


@cache
def _e2m1_pairs() -> Tensor:
    """Both values of every packed byte, f32[256,2], low nibble first."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES)
    codes = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    return torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)


def decode_e8m0(scale: Tensor) -> Tensor:
    """e8m0[...] -> f32[...], 2^(byte - 127); byte 255 is NaN."""
    return _e8m0_table()[scale.view(torch.uint8).int()]


def decode_scale(scale: Tensor) -> Tensor:
    """A block scale stored as e8m0 or as a float -> f32[...]."""
    return decode_e8m0(scale) if scale.dtype == torch.float8_e8m0fnu else scale.float()


def decode_e2m1(packed: Tensor) -> Tensor:
    """Packed e2m1, uint8[..., K/2] -> f32[..., K]; the low nibble is the even element."""
    return _e2m1_pairs()[packed.int()].flatten(-2)


def encode_e2m1(x: Tensor) -> Tensor:
    """f32[..., K] within [-6, 6] -> packed e2m1 uint8[..., K/2], ties to the even code."""
    magnitudes = x.new_tensor(_E2M1_MAGNITUDES)
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = torch.bucketize(x.abs(), middle)  # a tie lands on the lower code
    tie = (below < 7) & (x.abs() == middle[below.clamp(max=6)])
    code = below + (tie & (below % 2 == 1)) + 8 * torch.signbit(x)
    code = code.to(torch.uint8).unflatten(-1, (-1, 2))
    return code[..., 0] | (code[..., 1] << 4)


def block_scale_exponent(amax: Tensor, fmt: str) -> Tensor:
    """Exponent e (int32) of the power-of-two scale 2^e of blocks with the given f32 amax.

    The smallest e with amax * fp32(1/max) <= 2^e, where max is the format's largest value.
    """
    t = amax.clamp_min(_AMAX_FLOOR[fmt]) * torch.tensor(1.0 / _MAX[fmt], dtype=torch.float32)
    bits = t.view(torch.int32)
    return (bits >> 23) - 127 + (bits & 0x7FFFFF != 0).int()


def quantize_blocks(x: Tensor, fmt: str, block: int) -> tuple[Tensor, Tensor]:
    """Quantise the last axis in blocks: float[..., K] -> (codes of [..., K], e8m0[..., K/block])."""
    blocks = x.float().unflatten(-1, (-1, block))
    exponent = block_scale_exponent(blocks.abs().amax(-1), fmt)
    limit = _MAX[fmt]
    # A product with 2^-e is exact like the quotient by 2^e, and 2^-e is normal for every e here.
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-limit, limit).flatten(-2)
    codes = scaled.to(torch.float8_e4m3fn) if fmt == "e4m3" else encode_e2m1(scaled)
    return codes, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantize_fixed(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Quantise the last axis with given scales: float[..., K], e8m0[K/block] -> codes of [..., K].

    Magnitudes beyond a block's range become its largest one.
    """
    blocks = x.float().unflatten(-1, (scale.shape[-1], -1))
    exponent = scale.view(torch.uint8).int() - 127
    limit = _MAX[fmt]
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-limit, limit).flatten(-2)
    return scaled.to(torch.float8_e4m3fn) if fmt == "e4m3" else encode_e2m1(scaled)


def decode_codes(codes: Tensor) -> Tensor:
    """Codes of either format -> f32 without scales."""
    return decode_e2m1(codes) if codes.dtype == torch.uint8 else codes.float()


def dequantize_blocks(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """(codes of [..., K], scale[..., K/block]) -> f32[..., K]."""
    values = decode_codes(codes).unflatten(-1, (-1, block))
    return (values * decode_scale(scale)[..., None]).flatten(-2)


def dequantize_weight(weight: Tensor, scale: Tensor | None) -> Tensor:
    """A stored matrix -> f32[..., N, K].

    Without a scale the weight is widened. e2m1 scales cover 1 x 32 elements, e4m3 scales 128 x 128
    (the last row and column of blocks may be cut by the shape).
    """
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return dequantize_blocks(weight, scale, 32)
    n, k = weight.shape[-2:]
    s = decode_scale(scale)
    s = s.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k]
    return weight.float() * s
