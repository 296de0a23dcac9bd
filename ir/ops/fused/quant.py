"""Quantisation attributes that fused ops have in common.

`fmt` "" stands for no quantisation. `rounded` is quantise and dequantise, the rounding that keys
and index vectors get.
"""

from __future__ import annotations

from typing import Any

from rewright.ir.op import Attrs, Roles
from rewright.ir.ops.quantize import dequantize, quantize


def quant_roles(attrs: Attrs) -> Roles:
    """Roles of the quantised form of a result, none where it is not quantised."""
    return ("codes", "scale") if attrs["fmt"] else ()


def quantized(x: Any, fmt: str, block: int) -> tuple[Any, ...]:
    """(codes, scale) of x, or nothing where `fmt` is empty."""
    return quantize(x, fmt=fmt, block=block) if fmt else ()


def rounded(x: Any, fmt: str, block: int, dims: list[int] | None, out: str) -> Any:
    """x through `fmt` and back in the range `dims` of the last axis, or x itself where `fmt` is empty."""
    if not fmt:
        return x
    codes, scale = quantize(x, fmt=fmt, block=block, dims=dims)
    return dequantize(codes, scale, None if dims is None else x, block=block, out=out, dims=dims)
