"""Token embedding, and the choice of the rows that get logits."""

from __future__ import annotations

from torch import Tensor

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.ops.state import require_batch
from rewright.ir.types import DType, ValueType, dtype_from_text


@op()
def embed(tokens: Tensor, weight: Tensor, *, out: str) -> Tensor:
    """Rows of the embedding table: i32[B,T], [V,D] -> out[B,T,D].

    Token ids are clamped into the table: what reaches the device never becomes a bad address
    (the host refuses such ids with a message before).
    """
    rows = weight[tokens.long().clamp(0, weight.shape[0] - 1)]
    return rows.to(dtype_from_text(out).torch_dtype)


@embed.infer
def _(tokens: ValueType, weight: ValueType, *, out: str) -> Types:
    require(tokens.dtype is DType.I32 and len(tokens.shape) == 2, f"tokens is {tokens}, not i32[B,T]")
    require(weight.dtype.is_float and len(weight.shape) == 2, f"weight is {weight}, not a float [V,D]")
    return (ValueType(dtype_from_text(out), (*tokens.shape, weight.shape[1])),)


@embed.cost
def _(call: Call) -> Cost:
    weight, tokens = call.operands["weight"], call.operands["tokens"]
    return call.cost(reads={"weight": tokens.numel * weight.nbytes // weight.shape[0]}, flops=0)


@embed.examples
def _(gen: Examples):
    yield (gen.integers(0, 11, 2, 3), gen.randn(11, 8)), {"out": "bf16"}
    yield (gen.integers(0, 11, 1, 1), gen.randn(11, 8)), {"out": "f32"}


@op()
def take_last(x: Tensor, n_valid: Tensor) -> Tensor:
    """The row of the last valid token: [B,T,...], i32[B] -> [B,...]; row 0 where none is valid."""
    last = (n_valid.long() - 1).clamp(0, x.shape[1] - 1)
    return x[range(x.shape[0]), last]


@take_last.infer
def _(x: ValueType, n_valid: ValueType) -> Types:
    require(len(x.shape) >= 2, f"{x} is not [B,T,..]")
    require_batch(x.shape[0], n_valid)
    return (x.with_shape(x.shape[0], *x.shape[2:]),)


@take_last.cost
def _(call: Call) -> Cost:
    return call.cost(reads={"x": call.outputs[0].nbytes}, flops=0)


@take_last.examples
def _(gen: Examples):
    yield (gen.randn(3, 4, 8), gen.integers(0, 5, 3)), {}
