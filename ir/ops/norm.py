"""RMS normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.types import ValueType


@op()
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMS-normalise the last axis: [...,D], [D] -> [...,D] of x's dtype.

    fp32 inside, rounded once: weight * (x * rsqrt(mean(x^2) + eps)).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed).to(x.dtype)


@rms_norm.infer
def _(x: ValueType, weight: ValueType, *, eps: float) -> Types:
    require(x.dtype.is_float and weight.dtype.is_float, f"{x} or weight {weight} is not a float")
    require(weight.shape == x.shape[-1:], f"weight {weight} does not match the last axis of {x}")
    return (x,)


@rms_norm.cost
def _(call: Call) -> Cost:
    return call.cost(flops=4 * call.operands["x"].numel)


@rms_norm.examples
def _(gen: Examples):
    for x_dtype in (torch.bfloat16, torch.float16, torch.float32):
        for weight_dtype in (torch.bfloat16, torch.float32):
            yield (gen.randn(2, 3, 64, dtype=x_dtype), gen.randn(64, dtype=weight_dtype)), {"eps": 1e-6}


@op()
def head_rms_norm(x: Tensor, *, eps: float) -> Tensor:
    """Weightless RMS norm of each query head: [...,d] -> [...,d].

    The released code runs this as a chain of bf16 tensor operations (square, mean, add, rsqrt,
    multiply, each rounded); on bf16 input so does this, with torch's own operations. On f32 input
    it is plain fp32.

    torch's bf16 rsqrt on a CPU rounds once in its vector loop and twice in the scalar rest, so the
    last heads of a step may differ by one bf16 step; docs/numerics.md says why that is kept. Batch
    rows run one by one, so that the others in a batch change nothing.
    """
    return torch.cat([_normalized(row, eps) for row in x.split(1)])


def _normalized(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@head_rms_norm.infer
def _(x: ValueType, *, eps: float) -> Types:
    require(x.dtype.is_float and len(x.shape) > 0, f"{x} is not a float [..,d]")
    return (x,)


@head_rms_norm.cost
def _(call: Call) -> Cost:
    return call.cost(flops=3 * call.operands["x"].numel)


@head_rms_norm.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 4, 32),), {"eps": 1e-6}
    yield (gen.randn(2, 3, 4, 32, dtype=torch.float32),), {"eps": 1e-6}
