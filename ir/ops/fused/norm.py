"""RMS norm with the quantisation of its result."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Attrs, Examples, Roles
from rewright.ir.ops.add import add
from rewright.ir.ops.fused.quant import quant_roles, quantized
from rewright.ir.ops.norm import rms_norm


def _roles(attrs: Attrs) -> Roles:
    kept = (("sum",) if attrs["keep_sum"] else ()) + (("normed",) if attrs["keep"] else ())
    return (*kept, *quant_roles(attrs))


@composed(outputs=_roles)
def rms_norm_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    fixed: Tensor | None,
    *,
    eps: float,
    fmt: str,
    block: int,
    static: bool = False,
    keep: bool = False,
    keep_sum: bool = False,
) -> list[Tensor]:
    """quantize(rms_norm(x + residual)) -> ([x + residual], [normed], codes, [scale]).

    Args:
        x: values [...,D].
        residual: added first, absent where there is none.
        weight: [D].
        eps: of the norm.
        fixed, fmt, block, static: of the quantisation (`fused/quant.py`).
        keep: whether the norm itself is a result.
        keep_sum: whether the sum is a result.
    """
    total = x if residual is None else add(x, residual)
    normed = rms_norm(total, weight, eps=eps)
    kept = ((total,) if keep_sum else ()) + ((normed,) if keep else ())
    return [*kept, *quantized(normed, fixed, fmt, block, static)]


@rms_norm_quant.examples
def _(gen: Examples):
    attrs = {"eps": 1e-6, "fmt": "e4m3", "block": 64}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for weight_dtype in (torch.bfloat16, torch.float32):
            x, residual = gen.randn(2, 3, 128, dtype=dtype), gen.randn(2, 3, 128, dtype=dtype)
            weight = gen.randn(128, dtype=weight_dtype)
            yield (x, None, weight, None), attrs
            yield (x, residual, weight, None), {**attrs, "keep": True, "keep_sum": True}
            yield (x, residual, weight, gen.e8m0(2)), {**attrs, "static": True, "keep": True}
