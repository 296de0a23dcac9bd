"""What the passes assume of quantisation, tried on every code and every scale.

`requantize` takes Q(DQ(Q(x))) for Q(x): exact on values, though not on codes, as long as the first
scale is one that a quantiser chooses. A quantiser's scale is a power of two, and the codes fit the
scale that it gives out: the error is at most half a step of the format there. And the fused norm is
the unfused one for every mix of element types.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from graphs import Net, differing, facts, op_names, results, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rewright.ir import ops
from rewright.ir.formats import E2M1_MAX, E4M3_MAX, block_scale_exponent, decode_codes
from rewright.passes.manager import PassOptions, run_passes

FORMATS = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}
MOST = torch.finfo(torch.float32).max


def exponents(fmt: str) -> range:
    """Exponents of every scale that a quantiser can choose, for anything from 0 to the largest bf16."""
    ends = block_scale_exponent(torch.tensor([0.0, torch.finfo(torch.bfloat16).max]), fmt)
    return range(int(ends[0]), int(ends[1]) + 1)


def code_values(fmt: str) -> Tensor:
    """Every code as the quantiser stores it, without NaN: [N] of codes, or [N] packed pairs (v, 0)."""
    if fmt == "e4m3":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return codes[~codes.float().isnan()]
    return torch.arange(16, dtype=torch.uint8)


def blocks(fmt: str) -> Tensor:
    """Blocks of two codes: every pair of codes there is, as `quantize` gives them."""
    codes = code_values(fmt)
    first, second = (
        c.flatten() for c in torch.meshgrid(codes.view(torch.uint8), codes.view(torch.uint8), indexing="ij")
    )
    if fmt == "e2m1":
        return (first | second << 4)[:, None]
    return torch.stack([first, second], dim=-1).view(torch.float8_e4m3fn)


def scales(exponent: int, count: int) -> Tensor:
    return torch.full((count, 1), exponent + 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def again(codes: Tensor, scale: Tensor, fmt: str, out: str) -> tuple[Tensor, Tensor]:
    """Values before and after one more quantisation."""
    before = ops.dequantize(codes, scale, None, block=2, out=out)
    twice = ops.quantize(before, fmt=fmt, block=2)
    return before, ops.dequantize(*twice, None, block=2, out=out)


@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_requantising_keeps_every_value(fmt: str, out: str) -> None:
    """Every pair of codes in a block, under every scale; what overflows fp32 is no value."""
    pairs = blocks(fmt)
    assert len(pairs) == {"e4m3": 254**2, "e2m1": 16**2}[fmt]
    largest = decode_codes(pairs).abs().amax(-1)
    for exponent in exponents(fmt):
        fits = pairs[largest.double() * 2.0**exponent <= MOST]
        before, after = again(fits, scales(exponent, len(fits)), fmt, out)
        assert torch.equal(before, after), exponent


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_codes_may_change_with_the_scale(fmt: str) -> None:
    """Half the range under one scale is the whole range under the next smaller one."""
    half = torch.tensor([[FORMATS[fmt] / 2 * 1.001, 0.0]])  # rounds down to the half itself
    codes, scale = ops.quantize(half, fmt=fmt, block=2)
    back = ops.dequantize(codes, scale, None, block=2, out="f32")
    twice, second = ops.quantize(back, fmt=fmt, block=2)
    assert int(second.view(torch.uint8)) == int(scale.view(torch.uint8)) - 1
    assert decode_codes(codes)[0, 0] == FORMATS[fmt] / 2
    assert decode_codes(twice)[0, 0] == FORMATS[fmt]
    assert torch.equal(ops.dequantize(twice, second, None, block=2, out="f32"), back)


@pytest.mark.parametrize("fmt", ["e4m3"])
def test_a_scale_that_no_quantiser_chooses_may_lose_codes(fmt: str) -> None:
    """Why codes from elsewhere are left alone: under a smaller scale a second quantisation rounds."""
    floor = exponents(fmt)[0]
    pairs = blocks(fmt)
    kept = [torch.equal(*again(pairs, scales(floor - below, len(pairs)), fmt, "f32")) for below in range(6)]
    assert kept == [True, False, False, False, False, False]


def test_f16_between_the_two_loses_values() -> None:
    """Why a value between them in f16 is refused: it holds neither the largest nor the smallest."""
    pairs = blocks("e4m3")
    for exponent in (20, exponents("e4m3")[0]):
        codes = pairs[decode_codes(pairs).abs().amax(-1) >= 1]
        scale = scales(exponent, len(codes))
        exact = ops.dequantize(codes, scale, None, block=2, out="f32")
        assert not torch.equal(ops.dequantize(codes, scale, None, block=2, out="f16").float(), exact)


def half_a_step(fmt: str, scaled: float) -> float:
    """Half the distance between neighbours of the format at a magnitude."""
    mantissa, least = {"e4m3": (3, -6), "e2m1": (1, 0)}[fmt]
    exponent = max(math.frexp(scaled)[1] - 1 if scaled else least, least)
    return 2.0 ** (exponent - mantissa) / 2


BLOCK = 8
FLOATS = st.one_of(*(st.floats(-(2.0**e), 2.0**e, width=32) for e in (120, 2, -10)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=st.lists(FLOATS, min_size=BLOCK, max_size=BLOCK), shift=st.integers(-30, 3))
def test_the_scale_that_comes_out_is_the_one_the_codes_were_made_with(
    fmt: str, dtype: torch.dtype, drawn: list[float], shift: int
) -> None:
    """Error at most half a step under the emitted scale: a code made with the exact scale amax/max and
    given out with the rounded one would be off by up to a factor of two."""
    x = torch.ldexp(torch.tensor([drawn]), torch.tensor(shift)).to(dtype)
    codes, scale = ops.quantize(x, fmt=fmt, block=BLOCK)
    byte = int(scale.view(torch.uint8))
    step = 2.0 ** (byte - 127)
    assert byte - 127 in exponents(fmt)
    back = ops.dequantize(codes, scale, None, block=BLOCK, out="f32")
    for value, got in zip(x[0].tolist(), back[0].tolist(), strict=True):
        scaled = min(abs(value) / step, FORMATS[fmt])
        assert abs(value - got) <= half_a_step(fmt, scaled) * step * (1 + 2**-20)
    amax = float(x.float().abs().amax())
    assert amax <= FORMATS[fmt] * step * (1 + 2**-20), "the scale is too small"
    smaller = FORMATS[fmt] * step / 2 * (1 - 2**-20)
    assert amax >= smaller or byte - 127 == exponents(fmt)[0], "a smaller scale would do"


DTYPES = ("bf16", "f16", "f32")


@pytest.mark.parametrize(
    ("x_type", "weight_type", "summed"), list(itertools.product(DTYPES, DTYPES, (False, True)))
)
def test_norm_and_quantisation_of_every_type(x_type: str, weight_type: str, summed: bool) -> None:
    """With a residual and without; what a variant does not read is NaN."""
    net = Net()
    x, residual, _ = net.inputs(f"{x_type}[2,3,128]", "x", "residual", "unread")
    weight = net.weight("w", f"{weight_type}[128]")
    total = net.add("sum", x, residual) if summed else x
    codes, scale = net.quantize("q", net.rms_norm("norm", total, weight, eps=1e-6), fmt="e4m3", block=64)
    graph = net.graph(codes=codes, scale=scale)
    done = run_passes(graph, facts(), PassOptions.of(only="fuse_norm_quant", verify=True))
    assert op_names(done.graph) == ["rms_norm_quant"]
    assert [str(t) for t in done.graph.ops[0].meta["types"]] == ["f8e4m3[2,3,128]", "e8m0[2,3,2]"]
    known = values(graph)
    for name in ("unread", *(() if summed else ("residual",))):
        known[name] = torch.full_like(known[name], float("nan"))
    got = results(done.graph, known)
    assert differing(got, results(graph, known)) == []
    assert decode_codes(got["codes"]).isfinite().all()
