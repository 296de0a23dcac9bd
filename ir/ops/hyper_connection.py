"""Hyper-Connections: n residual streams mixed around every sub-block.

Shapes: streams X[B,T,n,D]; coefficients m[B,T,(2+n)n] split into pre[B,T,n], post[B,T,n] and
comb[B,T,n,n]. Source of the formulas: manifold-constrained Hyper-Connections as DeepSeek-V4 uses
them, the order of the Sinkhorn steps included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.types import DType, ValueType


@op()
def hc_expand(x: Tensor, *, streams: int) -> Tensor:
    """Start of the residual streams: [B,T,D] -> [B,T,n,D], n copies."""
    return x[:, :, None, :].repeat(1, 1, streams, 1)


@hc_expand.infer
def _(x: ValueType, *, streams: int) -> Types:
    require(x.dtype.is_float and len(x.shape) == 3, f"{x} is not a float [B,T,D]")
    return (x.with_shape(*x.shape[:2], streams, x.shape[2]),)


@hc_expand.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 16),), {"streams": 4}


@op()
def hc_mix(streams: Tensor, fn: Tensor, *, eps: float) -> Tensor:
    """Mixing logits: X[B,T,n,D], fn[M,nD] -> f32[B,T,M].

    With x the flattened streams in fp32: (fn . x) * rsqrt(mean(x^2) + eps); the norm factor is
    applied after the product.
    """
    x = streams.flatten(-2).float()
    return (x @ fn.float().mT) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def require_streams(streams: ValueType) -> None:
    """Refuse what is no float [B,T,n,D]."""
    require(
        streams.dtype.is_float and len(streams.shape) == 4, f"streams are {streams}, not a float [B,T,n,D]"
    )


@hc_mix.infer
def _(streams: ValueType, fn: ValueType, *, eps: float) -> Types:
    require_streams(streams)
    size = streams.shape[2] * streams.shape[3]
    require(fn.dtype.is_float and len(fn.shape) == 2, f"fn is {fn}, not a float [M,nD]")
    require(fn.shape[1] == size, f"fn {fn} does not fit streams {streams}")
    return (ValueType(DType.F32, (*streams.shape[:2], fn.shape[0])),)


@hc_mix.cost
def _(call: Call) -> Cost:
    return call.cost(flops=2 * call.outputs[0].numel * call.operands["fn"].shape[1])


@hc_mix.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 4, 16), gen.randn(24, 64, dtype=torch.float32)), {"eps": 1e-6}


@op(outputs=("pre", "post", "comb"))
def hc_split(
    mix: Tensor, scale: Tensor, base: Tensor, *, streams: int, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing logits -> coefficients, all fp32.

    pre = sigmoid(m * scale0 + base) + eps; post = 2 sigmoid(m * scale1 + base); comb is the n x n
    matrix m * scale2 + base made doubly stochastic: softmax over rows, + eps, columns divided by
    (their sum + eps), then iters - 1 times rows and columns alike (Sinkhorn).
    """
    n = streams
    pre_logits, post_logits, comb_logits = mix.split([n, n, n * n], dim=-1)
    pre_base, post_base, comb_base = base.split([n, n, n * n])
    pre = torch.sigmoid(pre_logits * scale[0] + pre_base) + eps
    post = 2.0 * torch.sigmoid(post_logits * scale[1] + post_base)
    comb = (comb_logits * scale[2] + comb_base).unflatten(-1, (n, n))
    comb = torch.softmax(comb, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


@hc_split.infer
def _(mix: ValueType, scale: ValueType, base: ValueType, *, streams: int, iters: int, eps: float) -> Types:
    size = (2 + streams) * streams
    require(mix.dtype is DType.F32 and mix.shape[-1:] == (size,), f"mix {mix} is not f32[..,{size}]")
    require(base.dtype.is_float and base.shape == (size,), f"base {base} is not a float [{size}]")
    require(scale.dtype.is_float and scale.shape == (3,), f"scale {scale} is not a float [3]")
    lead = mix.shape[:-1]
    vector = mix.with_shape(*lead, streams)
    return vector, vector, mix.with_shape(*lead, streams, streams)


@hc_split.cost
def _(call: Call) -> Cost:
    streams = call.attrs["streams"]
    return call.cost(flops=4 * call.operands["mix"].numel * call.attrs["iters"] * streams // (streams + 2))


@hc_split.examples
def _(gen: Examples):
    for n in (1, 2, 4, 5):
        size, f32 = (2 + n) * n, torch.float32
        operands = (gen.randn(2, 3, size, dtype=f32), gen.randn(3, dtype=f32), gen.randn(size, dtype=f32))
        yield operands, {"streams": n, "iters": 20, "eps": 1e-6}


@op()
def hc_head_split(mix: Tensor, scale: Tensor, base: Tensor, *, eps: float) -> Tensor:
    """Coefficients of the final collapse: f32[B,T,n] -> sigmoid(m * scale + base) + eps."""
    return torch.sigmoid(mix * scale + base) + eps


@hc_head_split.infer
def _(mix: ValueType, scale: ValueType, base: ValueType, *, eps: float) -> Types:
    require(mix.dtype is DType.F32 and len(mix.shape) == 3, f"mix is {mix}, not f32[B,T,n]")
    require(base.dtype.is_float and base.shape == mix.shape[-1:], f"mix {mix} and base {base} disagree")
    require(scale.dtype.is_float and scale.shape == (1,), f"scale {scale} is not a float [1]")
    return (mix,)


@hc_head_split.examples
def _(gen: Examples):
    f32 = torch.float32
    yield (gen.randn(2, 3, 4, dtype=f32), gen.randn(1, dtype=f32), gen.randn(4, dtype=f32)), {"eps": 1e-6}


@op()
def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sub-block input: sum_j pre_j X_j in fp32, rounded once: [B,T,n,D], f32[B,T,n] -> [B,T,D]."""
    return (streams.float() * pre[..., None]).sum(-2).to(streams.dtype)


@hc_collapse.infer
def _(streams: ValueType, pre: ValueType) -> Types:
    require_streams(streams)
    require(pre == ValueType(DType.F32, streams.shape[:3]), f"streams {streams} and pre {pre} disagree")
    return (streams.with_shape(*streams.shape[:2], streams.shape[3]),)


@hc_collapse.cost
def _(call: Call) -> Cost:
    return call.cost(flops=2 * call.operands["streams"].numel)


@hc_collapse.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 4, 16), gen.randn(2, 3, 4, dtype=torch.float32)), {}


@op()
def hc_combine(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sub-block: X'_k = post_k y + sum_j comb_jk X_j in fp32, rounded once.

    y[B,T,D] is the sub-block's output, X[B,T,n,D] the streams before it; the sum runs over the
    first index of comb.
    """
    mixed = (comb[..., None] * streams.float()[:, :, :, None, :]).sum(2)
    return (post[..., None] * y.float()[:, :, None, :] + mixed).to(streams.dtype)


@hc_combine.infer
def _(y: ValueType, streams: ValueType, post: ValueType, comb: ValueType) -> Types:
    require_streams(streams)
    b, t, n, d = streams.shape
    require(y.dtype.is_float and y.shape == (b, t, d), f"y {y} and streams {streams} disagree")
    require(post == ValueType(DType.F32, (b, t, n)), f"post {post} and streams {streams} disagree")
    require(comb == ValueType(DType.F32, (b, t, n, n)), f"comb {comb} and streams {streams} disagree")
    return (streams,)


@hc_combine.cost
def _(call: Call) -> Cost:
    streams = call.operands["streams"]
    return call.cost(flops=2 * streams.numel * (streams.shape[2] + 1))


@hc_combine.examples
def _(gen: Examples):
    f32 = torch.float32
    coefficients = (gen.randn(2, 3, 4, dtype=f32), gen.randn(2, 3, 4, 4, dtype=f32))
    yield (gen.randn(2, 3, 16), gen.randn(2, 3, 4, 16), *coefficients), {}
