"""Hyper-Connections around a sub-block: coefficients, collapse, norm; and the collapse before the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Attrs, Examples, Roles
from rewright.ir.ops.embed import take_last
from rewright.ir.ops.fused.quant import quant_roles, quantized
from rewright.ir.ops.hyper_connection import hc_collapse, hc_combine, hc_head_split, hc_mix, hc_split
from rewright.ir.ops.layout import reshape
from rewright.ir.ops.norm import rms_norm


def _pre_roles(attrs: Attrs) -> Roles:
    return (*(("x",) if attrs["keep"] else ()), *quant_roles(attrs), "post", "comb")


@composed(outputs=_pre_roles)
def hc_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    fixed: Tensor | None,
    *,
    n: int,
    iters: int,
    eps: float,
    hc_eps: float,
    norm_eps: float = 0.0,
    fmt: str = "",
    block: int = 0,
    static: bool = False,
    keep: bool = True,
) -> list[Tensor]:
    """Streams X[B,T,n,D] -> input of a sub-block and what puts its output back.

    ([x[B,T,D]], [codes, [scale] of x], post f32[B,T,n], comb f32[B,T,n,n])

    Args:
        streams: X.
        fn, scale, base: as in `hc_mix` and `hc_split`.
        norm: weight of the RMS norm of x; absent where x is the collapsed streams themselves.
        n, iters, eps, hc_eps: streams, Sinkhorn steps, eps of the RMS in `hc_mix`, eps of `hc_split`.
        norm_eps: eps of the norm.
        fixed, fmt, block, static: quantisation of x (`fused/quant.py`); none where `fmt` is empty.
        keep: whether x itself is a result.
    """
    coefficients = (n, iters, eps, hc_eps)
    quant = (fixed, fmt, block, static)
    return _pre(streams, fn, scale, base, norm, coefficients, norm_eps, quant, keep)


def _pre(
    streams: Any,
    fn: Any,
    scale: Any,
    base: Any,
    norm: Any,
    coefficients: tuple[int, int, float, float],
    norm_eps: float,
    quant: tuple[Any, str, int, bool],
    keep: bool,
) -> list[Any]:
    """Results of `hc_pre`; coefficients are (n, iters, eps, hc_eps), quant is (fixed, fmt, block, static)."""
    n, iters, eps, hc_eps = coefficients
    mix = hc_mix(streams, fn, eps=eps)
    pre, post, comb = hc_split(mix, scale, base, streams=n, iters=iters, eps=hc_eps)
    x = hc_collapse(streams, pre)
    if norm is not None:
        x = rms_norm(x, norm, eps=norm_eps)
    return [*((x,) if keep else ()), *quantized(x, *quant), post, comb]


@composed(outputs=lambda attrs: ("streams", *_pre_roles(attrs)))
def hc_post_pre(
    y: Tensor,
    before: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    fixed: Tensor | None,
    *,
    n: int,
    iters: int,
    eps: float,
    hc_eps: float,
    norm_eps: float = 0.0,
    fmt: str = "",
    block: int = 0,
    static: bool = False,
    keep: bool = True,
) -> list[Tensor]:
    """`hc_combine` of one sub-block, then `hc_pre` of the next -> (streams, ... as in `hc_pre`).

    Args:
        y: output of the sub-block [B,T,D].
        before: streams before it [B,T,n,D].
        post, comb: its coefficients.
        fn, scale, base, norm, fixed: of the next sub-block; the rest as in `hc_pre`.
    """
    streams = hc_combine(y, before, post, comb)
    coefficients = (n, iters, eps, hc_eps)
    quant = (fixed, fmt, block, static)
    return [streams, *_pre(streams, fn, scale, base, norm, coefficients, norm_eps, quant, keep)]


def _pre_examples(gen: Examples):
    f32 = torch.float32
    normed = {"norm_eps": 1e-5, "fmt": "e4m3"}
    kinds = (
        (4, {}),
        (2, {**normed, "block": 64, "keep": False}),
        (2, {**normed, "block": 32, "static": True}),
    )
    for n, extra in kinds:
        size = (2 + n) * n
        weights = (
            gen.randn(size, n * 64, dtype=f32, std=0.1),
            gen.randn(3, dtype=f32),
            gen.randn(size, dtype=f32),
        )
        norm = gen.randn(64) if extra else None
        fixed = gen.e8m0(2) if extra.get("static") else None
        attrs = {"n": n, "iters": 3, "eps": 1e-6, "hc_eps": 1e-4, **extra}
        yield n, (*weights, norm, fixed), attrs


@hc_pre.examples
def _(gen: Examples):
    for n, weights, attrs in _pre_examples(gen):
        yield (gen.randn(2, 3, n, 64), *weights), attrs


@hc_post_pre.examples
def _(gen: Examples):
    f32 = torch.float32
    for n, weights, attrs in _pre_examples(gen):
        coefficients = (gen.randn(2, 3, n, dtype=f32), gen.randn(2, 3, n, n, dtype=f32))
        yield (gen.randn(2, 3, 64), gen.randn(2, 3, n, 64), *coefficients, *weights), attrs


@composed()
def hc_head(
    streams: Tensor,
    n_valid: Tensor | None,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    *,
    n: int,
    eps: float,
    hc_eps: float,
    norm_eps: float = 0.0,
) -> Tensor:
    """The final collapse: streams X[B,T,n,D] -> [B,T,D], or the last valid token's row [B,D].

    Args:
        streams: X.
        n_valid: i32[B]; present where only the last valid token is wanted.
        fn, scale, base: as in `hc_mix` and `hc_head_split`.
        norm: weight of the RMS norm behind it, absent where there is none.
        n, eps, hc_eps, norm_eps: as in `hc_pre`.
    """
    chosen: Any = streams
    if n_valid is not None:
        chosen = reshape(take_last(streams, n_valid), tail=[1, n, -1], keep=1)
    pre = hc_head_split(hc_mix(chosen, fn, eps=eps), scale, base, eps=hc_eps)
    x: Any = hc_collapse(chosen, pre)
    if n_valid is not None:
        x = reshape(x, tail=[-1], keep=1)
    return x if norm is None else rms_norm(x, norm, eps=norm_eps)


@hc_head.examples
def _(gen: Examples):
    f32 = torch.float32
    weights = (gen.randn(4, 64, dtype=f32), gen.randn(1, dtype=f32), gen.randn(4, dtype=f32))
    attrs = {"n": 4, "eps": 1e-6, "hc_eps": 1e-4}
    yield (gen.randn(2, 3, 4, 16), None, *weights, None), attrs
    yield (
        (gen.randn(2, 3, 4, 16), gen.integers(0, 4, 2), *weights, gen.randn(16)),
        {**attrs, "norm_eps": 1e-5},
    )
