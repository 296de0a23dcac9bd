"""Experts: the gated activation with its quantisation, the shared expert, the routed experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Examples, require
from rewright.ir.ops.experts import expert_linear, expert_sum
from rewright.ir.ops.fused.quant import quant_roles, quantized
from rewright.ir.ops.linear import linear
from rewright.ir.ops.route import route, route_hash, swiglu


@composed(outputs=quant_roles)
def swiglu_quant(
    gate: Tensor,
    up: Tensor,
    weights: Tensor | None,
    fixed: Tensor | None,
    *,
    limit: float,
    fmt: str,
    block: int,
    static: bool = False,
) -> list[Tensor]:
    """quantize(swiglu(gate, up, weights)): [...,I] -> (codes, [scale]).

    Args:
        gate, up, weights, limit: as in `swiglu`.
        fixed, fmt, block, static: of the quantisation (`fused/quant.py`).
    """
    return [*quantized(swiglu(gate, up, weights, limit=limit), fixed, fmt, block, static)]


@swiglu_quant.examples
def _(gen: Examples):
    attrs = {"limit": 10.0, "fmt": "e4m3", "block": 64}
    yield (gen.randn(2, 3, 128, std=20.0), gen.randn(2, 3, 128, std=20.0), None, None), attrs
    weights = gen.randn(2, 3, 2, dtype=torch.float32)
    yield (gen.randn(2, 3, 2, 128), gen.randn(2, 3, 2, 128), weights, None), attrs
    static = {**attrs, "block": 32, "static": True}
    yield (gen.randn(2, 3, 2, 128), gen.randn(2, 3, 2, 128), weights, gen.e8m0(4)), static


def _hidden(
    gate: Any, up: Any, weights: Any, fixed: Any, limit: float, fmt: str, block: int
) -> tuple[Any, Any]:
    """Input of the down projection: (values, None), or (codes, scale)."""
    hidden = swiglu(gate, up, weights, limit=limit)
    match quantized(hidden, fixed, fmt, block, static=fixed is not None):
        case (codes, scale):
            return codes, scale
        case (codes,):
            return codes, fixed
        case _:
            return hidden, None


@composed()
def shared_expert(
    x: Tensor,
    x_scale: Tensor | None,
    w1: Tensor,
    s1: Tensor | None,
    w3: Tensor,
    s3: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    fixed: Tensor | None,
    *,
    limit: float,
    hidden: str,
    out: str,
    fmt: str = "",
    block: int = 0,
) -> Tensor:
    """w2 . swiglu(w1 . x, w3 . x): [B,T,D] -> [B,T,D].

    Args:
        x, x_scale: activation, as in `linear`.
        w1, s1, w3, s3, w2, s2: gate, up and down matrices with their scales.
        limit: of `swiglu`.
        hidden, out: dtypes of the inner products and of the result.
        fmt, block: quantisation between the products; none where `fmt` is empty.
        fixed: its scales e8m0[I/block] where they are known beforehand.
    """
    gate = linear(x, x_scale, w1, s1, out=hidden)
    up = linear(x, x_scale, w3, s3, out=hidden)
    inner, scale = _hidden(gate, up, None, fixed, limit, fmt, block)
    return linear(inner, scale, w2, s2, out=out)


@shared_expert.examples
def _(gen: Examples):
    def fp8(rows: int, cols: int) -> tuple[Tensor, Tensor]:
        return gen.e4m3(rows, cols), gen.e8m0(-(-rows // 128), cols // 128)

    weights = (*fp8(128, 256), *fp8(128, 256), *fp8(256, 128))
    attrs = {"limit": 10.0, "hidden": "bf16", "out": "bf16"}
    quant = {"fmt": "e4m3", "block": 128}
    yield (gen.e4m3(2, 3, 256), gen.e8m0(2, 3, 2), *weights, None), {**attrs, **quant}
    static = {**attrs, "fmt": "e4m3", "block": 32}
    yield (gen.e4m3(2, 3, 256), gen.e8m0(8), *weights, gen.e8m0(4)), static
    plain = (gen.randn(16, 32), None, gen.randn(16, 32), None, gen.randn(32, 16), None, None)
    yield (gen.randn(2, 3, 32), None, *plain), attrs


@composed()
def moe(
    x: Tensor,
    x_scale: Tensor | None,
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    tokens: Tensor | None,
    n_valid: Tensor,
    w1: Tensor,
    s1: Tensor | None,
    w3: Tensor,
    s3: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    shared: Tensor,
    fixed: Tensor | None,
    *,
    k: int = 0,
    route_scale: float,
    limit: float,
    hidden: str,
    out: str,
    fmt: str = "",
    block: int = 0,
) -> Tensor:
    """Routed experts from gate logits to the sum with the shared expert's output: [B,T,D] -> [B,T,D].

    Args:
        x, x_scale: activation, as in `expert_linear`.
        logits: f32[B,T,E] of the gate.
        bias: as in `route`, with `k`; absent where the layer routes by token.
        table, tokens: as in `route_hash`; absent where it routes by score.
        n_valid: i32[B].
        w1, s1, w3, s3, w2, s2: gate, up and down matrices [E,N,K] with their scales.
        shared: output of the shared expert [B,T,D].
        route_scale: factor of the routing weights.
        limit, hidden, out, fixed, fmt, block: as in `shared_expert`.
    """
    require((bias is None) != (table is None), "experts are chosen by bias or by table")
    require((table is None) == (tokens is None), "a table and tokens go together")
    require((table is None) == (k > 0), "k belongs to a choice by score")
    if table is None:
        experts, weights = route(logits, bias, n_valid, k=k, scale=route_scale)
    else:
        experts, weights = route_hash(logits, table, tokens, n_valid, scale=route_scale)
    gate = expert_linear(x, x_scale, w1, s1, experts, out=hidden)
    up = expert_linear(x, x_scale, w3, s3, experts, out=hidden)
    inner, scale = _hidden(gate, up, weights, fixed, limit, fmt, block)
    return expert_sum(expert_linear(inner, scale, w2, s2, experts, out=out), experts, shared)


@moe.examples
def _(gen: Examples):
    f32 = torch.float32
    n_valid = torch.tensor([3, 1], dtype=torch.int32)
    logits, shared = gen.randn(2, 3, 5, dtype=f32), gen.randn(2, 3, 128)
    bias, table = gen.randn(5, dtype=f32), gen.integers(0, 5, 11, 2, dtype=torch.int64)
    tokens = gen.integers(0, 11, 2, 3)
    attrs = {"route_scale": 1.5, "limit": 10.0, "hidden": "bf16", "out": "bf16"}
    fp4 = [t for _ in range(3) for t in (gen.e2m1(5, 128, 128), gen.e8m0(5, 128, 4))]
    x = (gen.e4m3(2, 3, 128), gen.e8m0(2, 3, 1))
    quant = {"fmt": "e4m3", "block": 128}
    yield (*x, logits, bias, None, None, n_valid, *fp4, shared, None), {**attrs, **quant, "k": 2}
    fixed = (x[0], gen.e8m0(4))
    static = {**attrs, "fmt": "e4m3", "block": 32, "k": 2}
    yield (*fixed, logits, bias, None, None, n_valid, *fp4, shared, gen.e8m0(4)), static
    plain = [t for _ in range(3) for t in (gen.randn(5, 128, 128), None)]
    yield (gen.randn(2, 3, 128), None, logits, None, table, tokens, n_valid, *plain, shared, None), attrs
