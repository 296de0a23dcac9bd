"""Rotary position embedding and the Hadamard rotation of index vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.ops.state import require_batch
from rewright.ir.types import DType, ValueType


@op()
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, *, stride: int = 1, inverse: bool = False
) -> Tensor:
    """Rotate the trailing 2R dims of [B,T,...,d]: adjacent pairs (x[2i], x[2i+1]), fp32, rounded once.

    Args:
        x: values; row t of batch b sits at position (pos[b] // stride + t) * stride, which for
            stride 1 is a token and for a larger stride the first token of a compressed entry.
        cos, sin: f32[N,R] tables by position.
        pos: i32[B].
        inverse: rotate back.

    Rows past the table (masked tail rows) read its last row.
    """
    pairs = cos.shape[1]
    rows = (pos.long()[:, None] // stride + torch.arange(x.shape[1])) * stride
    rows = rows.clamp(0, cos.shape[0] - 1)
    shape = (*rows.shape, *(1,) * (x.dim() - 3), pairs)
    c, s = cos[rows].view(shape), sin[rows].view(shape)
    if inverse:
        s = -s
    even, odd = x[..., -2 * pairs :].float().unflatten(-1, (pairs, 2)).unbind(-1)
    turned = torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2)
    return torch.cat([x[..., : -2 * pairs], turned.to(x.dtype)], dim=-1)


@rope.infer
def _(
    x: ValueType, cos: ValueType, sin: ValueType, pos: ValueType, *, stride: int = 1, inverse: bool = False
) -> Types:
    rank = len(x.shape)
    require(x.dtype.is_float and rank >= 3, f"{x} is not a float [B,T,..,d]")
    require(cos == sin and cos.dtype is DType.F32 and len(cos.shape) == 2, f"tables are {cos} and {sin}")
    require(2 * cos.shape[1] <= x.shape[-1], f"tables {cos} turn more than the last axis of {x}")
    require_batch(x.shape[0], pos)
    return (x,)


@rope.cost
def _(call: Call) -> Cost:
    x, table = call.operands["x"], call.operands["cos"]
    row = x.shape[0] * x.shape[1] * table.shape[1] * 4
    return call.cost(reads={"cos": row, "sin": row}, flops=3 * x.numel // x.shape[-1] * 2 * table.shape[1])


@rope.examples
def _(gen: Examples):
    tables = (gen.randn(16, 4, dtype=torch.float32), gen.randn(16, 4, dtype=torch.float32))
    pos = gen.integers(0, 8, 2)
    yield (gen.randn(2, 3, 4, 16), *tables, pos), {}
    yield (gen.randn(2, 3, 4, 16), *tables, pos), {"inverse": True}
    yield (gen.randn(2, 2, 16), *tables, pos), {"stride": 4}


@op()
def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis in natural (Sylvester) order.

    y_j = n^(-1/2) sum_k (-1)^popcount(j AND k) x_k for n a power of two; fp32, rounded once.
    """
    n = x.shape[-1]
    y = x.float()
    width = 1
    while width < n:
        low, high = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        width *= 2
    return (y * n**-0.5).to(x.dtype)


@hadamard.infer
def _(x: ValueType) -> Types:
    n = x.shape[-1]
    require(x.dtype.is_float and n & (n - 1) == 0, f"the last axis of {x} is no power of two")
    return (x,)


@hadamard.cost
def _(call: Call) -> Cost:
    x = call.operands["x"]
    return call.cost(flops=x.numel * (x.shape[-1].bit_length() - 1))


@hadamard.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 128),), {}
    yield (gen.randn(2, 3, 4, 32, dtype=torch.float32),), {}
