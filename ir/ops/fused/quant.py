"""Quantisation attributes that fused ops have in common.

`fmt` "" stands for no quantisation; `static` for one with scales that operand `fixed` gives, as in
`quantize_static`: then codes are all there is to give on. `rounded` is quantise and dequantise, the
rounding that keys and index vectors get.
"""

from __future__ import annotations

from typing import Any

from rewright.ir.op import Attrs, Roles, require
from rewright.ir.ops.quantize import dequantize, quantize, quantize_static


def quant_roles(attrs: Attrs) -> Roles:
    """Roles of the quantised form of a result, none where it is not quantised."""
    if not attrs["fmt"]:
        return ()
    return ("codes",) if attrs["static"] else ("codes", "scale")


def quantized(x: Any, fixed: Any, fmt: str, block: int, static: bool) -> tuple[Any, ...]:
    """(codes, scale) of x, (codes,) with fixed scales, or nothing where `fmt` is empty."""
    require((fixed is not None) == static, "fixed scales belong to a static quantisation")
    require(bool(fmt) or not static, "fixed scales without a format")
    if not fmt:
        return ()
    return (quantize_static(x, fixed, fmt=fmt, block=block),) if static else quantize(x, fmt=fmt, block=block)


def rounded(x: Any, fmt: str, block: int, dims: list[int] | None, out: str) -> Any:
    """x through `fmt` and back in the range `dims` of the last axis, or x itself where `fmt` is empty."""
    if not fmt:
        return x
    codes, scale = quantize(x, fmt=fmt, block=block, dims=dims)
    return dequantize(codes, scale, None if dims is None else x, block=block, out=out, dims=dims)
