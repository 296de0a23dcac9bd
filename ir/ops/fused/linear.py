"""Linears that share their input, and linears that quantise their result."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Attrs, Examples, Roles, require
from rewright.ir.ops.fused.quant import quant_roles, quantized
from rewright.ir.ops.linear import grouped_linear, linear

MOST_LINEARS = 8
"""Linears that one `multi_linear` can hold."""


def _roles(attrs: Attrs) -> Roles:
    return tuple(str(i) for i in range(len(attrs["outs"].split(","))))


@composed(outputs=_roles)
def multi_linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight0: Tensor,
    scale0: Tensor | None,
    weight1: Tensor,
    scale1: Tensor | None,
    weight2: Tensor | None,
    scale2: Tensor | None,
    weight3: Tensor | None,
    scale3: Tensor | None,
    weight4: Tensor | None,
    scale4: Tensor | None,
    weight5: Tensor | None,
    scale5: Tensor | None,
    weight6: Tensor | None,
    scale6: Tensor | None,
    weight7: Tensor | None,
    scale7: Tensor | None,
    *,
    outs: str,
) -> list[Tensor]:
    """`linear` of one activation with several weights: (x W0^T, x W1^T, ...).

    Args:
        x, x_scale: the activation, as in `linear`.
        weight0, scale0, ...: as in `linear`; the first ones, as many as there are `outs`.
        outs: dtypes of the results, separated by commas.
    """
    weights = (weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7)
    scales = (scale0, scale1, scale2, scale3, scale4, scale5, scale6, scale7)
    present = len([w for w in weights if w is not None])
    dtypes = outs.split(",")
    require(len(dtypes) == present, f"{present} weights for {len(dtypes)} results")
    require(None not in weights[:present], "a weight is left out between others")
    require(all(s is None for s in scales[present:]), "a scale without its weight")
    return [linear(x, x_scale, weights[i], scales[i], out=out) for i, out in enumerate(dtypes)]


@multi_linear.examples
def _(gen: Examples):
    def fp8(rows: int) -> tuple[Tensor, Tensor]:
        return gen.e4m3(rows, 256), gen.e8m0(-(-rows // 128), 2)

    x, x_scale = gen.e4m3(2, 3, 256), gen.e8m0(2, 3, 2)
    for count in (2, MOST_LINEARS):
        pairs = [t for i in range(count) for t in fp8(128 + 64 * i)]
        absent = [None] * (2 * MOST_LINEARS - len(pairs))
        yield (x, x_scale, *pairs, *absent), {"outs": ",".join(["bf16"] * count)}
    plain = [t for i in range(3) for t in (gen.randn(16 + i, 64), None)]
    absent = [None] * (2 * MOST_LINEARS - len(plain))
    yield (gen.randn(2, 3, 64), None, *plain, *absent), {"outs": "f32,bf16,f32"}


@composed(outputs=quant_roles)
def grouped_linear_quant(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    fixed: Tensor | None,
    *,
    fmt: str,
    block: int,
    static: bool = False,
) -> list[Tensor]:
    """quantize(grouped_linear(x)), the groups side by side: [B,T,G,K] -> (codes, [scale]) of [B,T,G*R].

    Args:
        x, weight, scale: as in `grouped_linear`.
        fixed, fmt, block, static: of the quantisation (`fused/quant.py`).
    """
    return [*quantized(grouped_linear(x, weight, scale, flat=True), fixed, fmt, block, static)]


@grouped_linear_quant.examples
def _(gen: Examples):
    attrs = {"fmt": "e4m3", "block": 128}
    fp8 = (gen.e4m3(256, 256), gen.e8m0(2, 2))
    yield (gen.randn(2, 3, 2, 256), *fp8, None), attrs
    yield (gen.randn(2, 1, 2, 64, dtype=torch.float32), gen.randn(256, 64), None, None), attrs
    yield (gen.randn(2, 3, 2, 256), *fp8, gen.e8m0(8)), {"fmt": "e4m3", "block": 32, "static": True}
