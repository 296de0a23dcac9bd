"""RMS norm with the quantisation of its result."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Attrs, Examples, Roles
from rewright.ir.ops.add import add
from rewright.ir.ops.norm import rms_norm
from rewright.ir.ops.quantize import quantize


def _roles(attrs: Attrs) -> Roles:
    kept = (("sum",) if attrs["keep_sum"] else ()) + (("normed",) if attrs["keep"] else ())
    return (*kept, "codes", "scale")


@composed(outputs=_roles)
def rms_norm_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    fmt: str,
    block: int,
    keep: bool = False,
    keep_sum: bool = False,
) -> list[Tensor]:
    """quantize(rms_norm(x + residual)) -> ([x + residual], [normed], codes, scale).

    Args:
        x: values [...,D].
        residual: added first, absent where there is none.
        weight: [D].
        eps: of the norm.
        fmt, block: of the quantisation.
        keep: whether the norm itself is a result.
        keep_sum: whether the sum is a result.
    """
    total = x if residual is None else add(x, residual)
    normed = rms_norm(total, weight, eps=eps)
    kept = ((total,) if keep_sum else ()) + ((normed,) if keep else ())
    return [*kept, *quantize(normed, fmt=fmt, block=block)]


@rms_norm_quant.examples
def _(gen: Examples):
    attrs = {"eps": 1e-6, "fmt": "e4m3", "block": 64}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for weight_dtype in (torch.bfloat16, torch.float32):
            x, residual = gen.randn(2, 3, 128, dtype=dtype), gen.randn(2, 3, 128, dtype=dtype)
            weight = gen.randn(128, dtype=weight_dtype)
            yield (x, None, weight), attrs
            yield (x, residual, weight), {**attrs, "keep": True, "keep_sum": True}
