"""Matrix products with weights in their stored format."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.formats import dequantize_blocks, dequantize_weight
from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.types import DType, ValueType, dtype_from_text

ACTIVATION_BLOCK = 128
"""Elements that share a scale which is found as the activation is quantised."""


def dense_activation(x: Tensor, x_scale: Tensor | None) -> Tensor:
    """A float activation, or FP8 codes with their scales, as f32."""
    return x.float() if x_scale is None else dequantize_blocks(x, x_scale, x.shape[-1] // x_scale.shape[-1])


def require_weight(weight: ValueType, scale: ValueType | None) -> None:
    """Refuse a weight [...,N,K] whose scale does not fit its format."""
    if scale is None:
        require(weight.dtype.is_float, f"weight {weight} needs a scale")
        return
    *lead, n, k = weight.shape
    if weight.dtype is DType.E2M1:
        blocks = (*lead, n, k // 32)
    else:
        require(weight.dtype is DType.F8E4M3, f"weight {weight} takes no scale")
        blocks = (*lead, -(-n // 128), -(-k // 128))
    require(scale.dtype in (DType.E8M0, DType.F32), f"scale is {scale}")
    require(scale.shape == blocks, f"scale {scale} does not fit the blocks of weight {weight}")


def require_activation(x: ValueType, x_scale: ValueType | None) -> None:
    """Refuse an activation whose scales do not fit: per 128 of the last axis, or [K/block] for all rows."""
    if x_scale is None:
        require(x.dtype.is_float, f"activation {x} needs a scale")
        return
    require(x.dtype is DType.F8E4M3, f"activation {x} takes no scale")
    if len(x_scale.shape) == 1:
        fits = x_scale.shape[0] > 0 and x.shape[-1] % x_scale.shape[0] == 0
    else:
        fits = x_scale.shape == (*x.shape[:-1], x.shape[-1] // ACTIVATION_BLOCK)
    require(x_scale.dtype is DType.E8M0 and fits, f"scale {x_scale} does not fit {x}")


@op()
def linear(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor | None, *, out: str) -> Tensor:
    """x W^T: [...,K], [N,K] -> out[...,N], accumulated in fp32 and rounded once.

    Args:
        x: activation, float or e4m3 codes.
        x_scale: e8m0[...,K/128] where x is quantised, or e8m0[K/block] if its scales are the same for
            all rows.
        weight: [N,K] as stored: float, or e4m3 with a scale per 128 x 128.
        scale: block scales of the weight.
        out: dtype of the result.

    The products of dequantised values equal those of scaled block sums: all scales are powers of
    two. A product of bf16 with bf16 into bf16 is torch's own.
    """
    dtype = dtype_from_text(out).torch_dtype
    if x.dtype == weight.dtype == dtype:
        return x @ weight.mT
    y = dense_activation(x, x_scale) @ dequantize_weight(weight, scale).mT
    return y.to(dtype)


@linear.infer
def _(
    x: ValueType, x_scale: ValueType | None, weight: ValueType, scale: ValueType | None, *, out: str
) -> Types:
    require_activation(x, x_scale)
    require_weight(weight, scale)
    require(
        len(weight.shape) == 2 and weight.shape[1] == x.shape[-1], f"{x} and weight {weight} disagree on K"
    )
    return (ValueType(dtype_from_text(out), (*x.shape[:-1], weight.shape[0])),)


@linear.cost
def _(call: Call) -> Cost:
    return call.cost(flops=2 * call.outputs[0].numel * call.operands["weight"].shape[-1])


@linear.examples
def _(gen: Examples):
    fp8 = (gen.e4m3(192, 256), gen.e8m0(2, 2))
    yield (gen.e4m3(2, 3, 256), gen.e8m0(2, 3, 2), *fp8), {"out": "bf16"}
    yield (gen.e4m3(2, 3, 256), gen.e8m0(8), *fp8), {"out": "bf16"}
    yield (gen.e4m3(2, 3, 256), gen.e8m0(2), *fp8), {"out": "bf16"}
    yield (gen.randn(2, 3, 256), None, *fp8), {"out": "bf16"}
    yield (gen.randn(2, 3, 64), None, gen.randn(16, 64), None), {"out": "bf16"}
    yield (gen.randn(2, 3, 64), None, gen.randn(16, 64), None), {"out": "f32"}


@op()
def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None, *, flat: bool = False) -> Tensor:
    """One matrix per group: [B,T,G,K], weight [G*R,K] -> [B,T,G,R] of x's dtype, or [B,T,G*R] if `flat`.

    Rows g*R .. (g+1)*R-1 of the weight belong to group g. The activation is not quantised, also
    where the weight is stored as FP8: that is widened to x's dtype, exactly into bf16 for ordinary
    scales, and multiplied there (fp32 accumulation, rounded once).
    """
    matrices = dequantize_weight(weight, scale).to(x.dtype).unflatten(0, (x.shape[-2], -1))
    y = torch.einsum("btgk,grk->btgr", x, matrices).contiguous()
    return y.flatten(2) if flat else y


@grouped_linear.infer
def _(x: ValueType, weight: ValueType, scale: ValueType | None, *, flat: bool = False) -> Types:
    require_activation(x, None)
    require_weight(weight, scale)
    require(len(x.shape) == 4 and weight.shape[1] == x.shape[3], f"{x} and weight {weight} disagree on K")
    groups = x.shape[2]
    require(weight.shape[0] % groups == 0, f"{weight.shape[0]} rows are no multiple of {groups} groups")
    tail = (weight.shape[0],) if flat else (groups, weight.shape[0] // groups)
    return (x.with_shape(*x.shape[:2], *tail),)


@grouped_linear.cost
def _(call: Call) -> Cost:
    return call.cost(flops=2 * call.outputs[0].numel * call.operands["weight"].shape[-1])


@grouped_linear.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 2, 256), gen.e4m3(256, 256), gen.e8m0(2, 2)), {}
    yield (gen.randn(1, 1, 2, 64), gen.randn(16, 64), None), {"flat": True}
