"""Block quantisation with power-of-two scales, and its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.formats import dequantize_blocks, quantize_blocks, quantize_fixed
from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.types import DType, ValueType, dtype_from_text

_CODES = {"e4m3": DType.F8E4M3, "e2m1": DType.E2M1}


@op(outputs=("", "scale"))
def quantize(x: Tensor, *, fmt: str, block: int, dims: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Quantise the last axis in blocks: float[...,K] -> (codes[...,K'], e8m0[...,K'/block]).

    Args:
        x: values.
        fmt: "e4m3" or "e2m1".
        block: elements that share a scale.
        dims: [start, stop) of the last axis to quantise, K' = stop - start; all of it by default.
    """
    start, stop = dims or (0, x.shape[-1])
    return quantize_blocks(x[..., start:stop], fmt, block)


@quantize.infer
def _(x: ValueType, *, fmt: str, block: int, dims: list[int] | None = None) -> Types:
    require(fmt in _CODES, f"unknown format {fmt!r}")
    require(x.dtype.is_float, f"{x} is not a float")
    start, stop = dims or (0, x.shape[-1])
    require(0 <= start < stop <= x.shape[-1], f"dims {start}:{stop} do not fit {x}")
    size = stop - start
    require(size % block == 0, f"{size} elements are no multiple of the block {block}")
    lead = x.shape[:-1]
    return ValueType(_CODES[fmt], (*lead, size)), ValueType(DType.E8M0, (*lead, size // block))


@quantize.cost
def _(call: Call) -> Cost:
    x, codes = call.operands["x"], call.outputs[0]
    return call.cost(reads={"x": codes.numel * x.dtype.bits // 8}, flops=3 * codes.numel)


@quantize.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 256),), {"fmt": "e4m3", "block": 128}
    yield (gen.randn(2, 1, 128, std=100.0),), {"fmt": "e4m3", "block": 64, "dims": [0, 64]}
    yield (gen.randn(2, 1, 4, 128),), {"fmt": "e2m1", "block": 32}
    yield (torch.zeros(1, 1, 64),), {"fmt": "e2m1", "block": 32}


@op(since="precision")
def quantize_static(x: Tensor, fixed: Tensor, *, fmt: str, block: int) -> Tensor:
    """Quantise the last axis with scales known beforehand: float[...,K], e8m0[K/block] -> codes[...,K].

    Args:
        x: values. Magnitudes beyond a block's range become its largest one.
        fixed: scale of every block, the same for all rows (`ir/static_scales.py`).
        fmt: "e4m3" or "e2m1".
        block: elements that share a scale.
    """
    return quantize_fixed(x, fixed, fmt)


@quantize_static.infer
def _(x: ValueType, fixed: ValueType, *, fmt: str, block: int) -> Types:
    require(fmt in _CODES, f"unknown format {fmt!r}")
    require(x.dtype.is_float, f"{x} is not a float")
    blocks = ValueType(DType.E8M0, (x.shape[-1] // block,))
    require(
        x.shape[-1] % block == 0 and fixed == blocks, f"scales {fixed} do not fit {x} in blocks of {block}"
    )
    return (x.with_dtype(_CODES[fmt]),)


@quantize_static.cost
def _(call: Call) -> Cost:
    return call.cost(flops=2 * call.outputs[0].numel)


@quantize_static.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 256), gen.e8m0(2)), {"fmt": "e4m3", "block": 128}
    yield (gen.randn(2, 1, 128, dtype=torch.float32), gen.e8m0(4)), {"fmt": "e4m3", "block": 32}
    yield (gen.randn(2, 3, 2, 64), gen.e8m0(1)), {"fmt": "e4m3", "block": 64}
    yield (gen.randn(2, 1, 4, 128), gen.e8m0(4)), {"fmt": "e2m1", "block": 32}


@op()
def dequantize(
    codes: Tensor, scale: Tensor, base: Tensor | None, *, block: int, out: str, dims: list[int] | None = None
) -> Tensor:
    """Inverse of `quantize`: (codes[...,K'], scale[...,K'/block], base[...,K]) -> out[...,K].

    Args:
        codes, scale: results of `quantize`.
        base: values that fill the last axis outside `dims`; absent where dims covers all of it.
        block: elements that share a scale.
        out: dtype of the result. A product of a code and its scale is exact in bf16.
        dims: the range that was quantised.
    """
    values = dequantize_blocks(codes, scale, block).to(dtype_from_text(out).torch_dtype)
    if base is None or dims is None:
        return values
    start, stop = dims
    return torch.cat([base[..., :start], values, base[..., stop:]], dim=-1)


@dequantize.infer
def _(
    codes: ValueType,
    scale: ValueType,
    base: ValueType | None,
    *,
    block: int,
    out: str,
    dims: list[int] | None = None,
) -> Types:
    require(codes.dtype in _CODES.values(), f"codes are {codes}")
    blocks = (*codes.shape[:-1], codes.shape[-1] // block)
    require(scale.dtype in (DType.E8M0, DType.F32), f"scale is {scale}")
    require(scale.shape == blocks, f"scale {scale} does not match {codes} in blocks of {block}")
    require((base is None) == (dims is None), "base and dims go together")
    dtype = dtype_from_text(out)
    if base is None or dims is None:
        return (codes.with_dtype(dtype),)
    start, stop = dims
    require(stop - start == codes.shape[-1] and stop <= base.shape[-1], f"dims {start}:{stop}, codes {codes}")
    require(base.shape[:-1] == codes.shape[:-1], f"base {base} and codes {codes} differ in shape")
    require(base.dtype is dtype, f"base {base} is not {out}")
    return (base,)


@dequantize.cost
def _(call: Call) -> Cost:
    outside = call.outputs[0].numel - call.operands["codes"].numel
    reads = {"base": outside * call.operands["base"].dtype.bits // 8} if "base" in call.operands else {}
    return call.cost(reads=reads, flops=call.operands["codes"].numel)


@dequantize.examples
def _(gen: Examples):
    yield (gen.e4m3(2, 3, 256), gen.e8m0(2, 3, 2), None), {"block": 128, "out": "bf16"}
    yield (gen.e2m1(2, 3, 64), gen.e8m0(2, 3, 2), None), {"block": 32, "out": "bf16"}
    base = gen.randn(2, 3, 128)
    yield (gen.e4m3(2, 3, 64), gen.e8m0(2, 3, 1), base), {"block": 64, "out": "bf16", "dims": [0, 64]}
