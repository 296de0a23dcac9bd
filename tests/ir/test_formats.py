"""The low-precision formats against torch, against tables written out, and against exact arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rewright.ir.formats import (
    block_scale_exponent,
    decode_codes,
    decode_e2m1,
    decode_e8m0,
    decode_scale,
    dequantize_blocks,
    dequantize_weight,
    encode_e2m1,
    quantize_blocks,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MAX = {"e4m3": 448.0, "e2m1": 6.0}
FLOOR = {"e4m3": 1e-4, "e2m1": 6.0 * 2.0**-126}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
formats = pytest.mark.parametrize("fmt", MAX)


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def decode_e4m3(byte: int) -> float:
    """Sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinity, one NaN a sign."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e4m3_magnitudes() -> list[float]:
    return [decode_e4m3(byte) for byte in range(0x7F)]


def nearest(values: list[float], x: float) -> float:
    """The value nearest to x among ascending ones; of two equally near the one with the even code."""
    code = min(range(len(values)), key=lambda i: (abs(values[i] - x), i % 2))
    return values[code]


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0, 2.0**-127), (1, 2.0**-126), (120, 2.0**-7), (127, 1.0), (128, 2.0), (254, 2.0**127)],
)
def test_e8m0(byte: int, value: float) -> None:
    stored = torch.tensor([byte], dtype=torch.uint8)
    assert decode_e8m0(stored).item() == value
    assert decode_e8m0(stored.view(torch.float8_e8m0fnu)).item() == value


def test_e8m0_255_is_nan_and_no_other_byte() -> None:
    assert decode_e8m0(ALL_BYTES).isnan().nonzero().tolist() == [[255]]


def test_e8m0_is_a_power_of_two_for_each_byte() -> None:
    decoded = decode_e8m0(ALL_BYTES[:255]).double()
    assert decoded.tolist() == [2.0 ** (b - 127) for b in range(255)]


def test_scales_are_stored_as_e8m0_or_as_floats() -> None:
    assert decode_scale(ALL_BYTES[120:124].view(torch.float8_e8m0fnu)).tolist() == [
        2.0**e for e in range(-7, -3)
    ]
    assert decode_scale(f32(0.3, 7.0)).tolist() == f32(0.3, 7.0).tolist()
    assert decode_scale(torch.tensor([0.5], dtype=torch.bfloat16)).dtype is torch.float32


@pytest.mark.parametrize("storage", [torch.uint8, torch.int8])
def test_e2m1_bytes(storage: torch.dtype) -> None:
    """The low nibble is the even element, in signed storage too."""
    golden = [v for byte in range(256) for v in (E2M1[byte & 15], E2M1[byte >> 4])]
    decoded = decode_e2m1(ALL_BYTES.view(storage))
    assert decoded.tolist() == golden
    assert torch.equal(torch.signbit(decoded), torch.signbit(f32(*golden)))


def test_e2m1_keeps_leading_axes() -> None:
    packed = torch.tensor([[[0x21], [0x43]]], dtype=torch.uint8)
    assert decode_e2m1(packed).tolist() == [[[0.5, 1.0], [1.5, 2.0]]]


def test_e2m1_codes_survive() -> None:
    assert torch.equal(encode_e2m1(decode_e2m1(ALL_BYTES)), ALL_BYTES)


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0)
    rounded = f32(0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0)
    assert torch.equal(decode_e2m1(encode_e2m1(ties)), rounded)
    assert torch.equal(decode_e2m1(encode_e2m1(-ties)), -rounded)


def test_e2m1_beside_a_tie_goes_to_the_nearer_code() -> None:
    ties = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5)
    below = decode_e2m1(encode_e2m1(torch.nextafter(ties, f32(0.0))))
    above = decode_e2m1(encode_e2m1(torch.nextafter(ties, f32(9.0))))
    assert below.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
    assert above.tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0]


@given(st.floats(-6, 6, width=32))
def test_e2m1_rounds_to_nearest(x: float) -> None:
    encoded = decode_e2m1(encode_e2m1(f32(x, x)))
    assert encoded.tolist() == [math.copysign(nearest(list(E2M1[:8]), abs(x)), x)] * 2


def test_e4m3_decodes_every_code() -> None:
    decoded = decode_codes(ALL_BYTES.view(torch.float8_e4m3fn))
    for byte, value in enumerate(decoded.tolist()):
        expected = decode_e4m3(byte)
        assert value == expected or (math.isnan(value) and math.isnan(expected)), hex(byte)


def encode_e4m3(x: Tensor) -> Tensor:
    """bf16 -> e4m3 bytes in exact integer-valued arithmetic, saturating, ties to the even code."""
    magnitude = x.double().abs().clamp(max=448.0)
    # Codes of one binade are evenly spaced; below 2^-6 the spacing stays 2^-9.
    _, exponent = torch.frexp(magnitude)
    spacing = torch.ldexp(torch.ones_like(magnitude), exponent.clamp(min=-5) - 4)
    table = torch.tensor(e4m3_magnitudes(), dtype=torch.float64)
    steps = (magnitude / spacing).round()  # halves to even, as the spacing keeps the code's parity
    code = torch.searchsorted(table, steps * spacing).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 7)


def test_e4m3_encodes_every_bf16_like_torch() -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x[~x.isnan()]
    by_torch = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encode_e4m3(x), by_torch)


def test_quantising_every_bf16_under_scale_one() -> None:
    """`quantize_blocks` rounds like the software encoder where the block's scale is 1."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x[x.float().abs() <= 448]
    blocks = torch.stack([x, torch.full_like(x, 448.0)], dim=-1)
    codes, scale = quantize_blocks(blocks, "e4m3", 2)
    assert decode_e8m0(scale).unique().tolist() == [1.0]
    assert torch.equal(codes.view(torch.uint8)[:, 0], encode_e4m3(x))


@formats
def test_scale_of_an_exact_maximum(fmt: str) -> None:
    """448 * 2^k and 6 * 2^k give exactly 2^k, down to the floor under the maximum."""
    k = torch.arange(-60, 60)
    floor = math.ceil(math.log2(FLOOR[fmt] / MAX[fmt]))
    amax = torch.ldexp(torch.full((120,), MAX[fmt]), k)
    assert block_scale_exponent(amax, fmt).tolist() == k.clamp(min=floor).tolist()


@formats
@given(magnitude=st.floats(1.0, 2.0, width=32), exponent=st.integers(-12, 120))
def test_scale_is_the_smallest_that_fits(fmt: str, magnitude: float, exponent: int) -> None:
    amax = torch.ldexp(f32(magnitude), torch.tensor(exponent))
    scale = 2.0 ** block_scale_exponent(amax, fmt).item()
    quotient = (amax * f32(1.0 / MAX[fmt])).double().item()
    assert scale / 2 < quotient <= scale
    # The quotient is rounded to fp32, so the maximum may pass the limit by one unit; it is clamped.
    assert amax.double().item() <= MAX[fmt] * scale * (1 + 2.0**-22)


@formats
def test_scale_grows_by_one_just_above_an_exact_maximum(fmt: str) -> None:
    exact = f32(MAX[fmt])
    assert block_scale_exponent(exact * 1.001, fmt).item() == 1
    assert block_scale_exponent(exact * 0.999, fmt).item() == 0


@formats
def test_block_of_zeros(fmt: str) -> None:
    codes, scale = quantize_blocks(torch.zeros(2, 64), fmt, 32)
    assert not codes.view(torch.uint8).any()
    assert scale.shape == (2, 2)
    restored = dequantize_blocks(codes, scale, 32)
    assert torch.equal(restored, torch.zeros(2, 64))
    expected = {"e4m3": math.ceil(math.log2(1e-4 / 448)), "e2m1": -126}[fmt]
    assert decode_e8m0(scale).unique().tolist() == [2.0**expected]


def half_ulp(fmt: str, magnitude: float) -> float:
    """Half the distance of the two values of the format around `magnitude` (scale 1)."""
    values = e4m3_magnitudes() if fmt == "e4m3" else list(E2M1[:8])
    for low, high in pairwise(values):
        if magnitude <= high:
            return (high - low) / 2
    return 0.0


@formats
@given(
    block=st.lists(st.floats(-1.0, 1.0, width=32), min_size=32, max_size=32),
    exponent=st.integers(-100, 100),
)
def test_round_trip_is_within_half_an_ulp_of_the_emitted_scale(
    fmt: str, block: list[float], exponent: int
) -> None:
    x = torch.ldexp(f32(*block), torch.tensor(exponent))
    codes, scale = quantize_blocks(x, fmt, 32)
    restored = dequantize_blocks(codes, scale, 32)
    unit = decode_e8m0(scale).double().item()
    for got, want in zip(restored.double().tolist(), x.double().tolist(), strict=True):
        # Clamping takes off at most the one fp32 unit by which the maximum may pass the limit.
        slack = MAX[fmt] * unit * 2.0**-22
        assert abs(got - want) <= half_ulp(fmt, abs(want) / unit) * unit + slack


@formats
def test_blocks_have_scales_of_their_own(fmt: str) -> None:
    x = torch.cat([torch.full((1, 32), MAX[fmt]), torch.full((1, 32), MAX[fmt] * 2.0**-10)], dim=-1)
    codes, scale = quantize_blocks(x, fmt, 32)
    assert decode_e8m0(scale).tolist() == [[1.0, 2.0**-10]]
    assert torch.equal(dequantize_blocks(codes, scale, 32), x)


@formats
@given(st.integers(0, 2**32 - 1))
def test_quantising_again_changes_no_value(fmt: str, seed: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 10
    once = dequantize_blocks(*quantize_blocks(x, fmt, 32), 32)
    assert torch.equal(dequantize_blocks(*quantize_blocks(once, fmt, 32), 32), once)


def test_weight_in_e4m3_has_a_scale_per_128_by_128() -> None:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=gen).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (2, 3), generator=gen, dtype=torch.uint8)
    got = dequantize_weight(weight, scale.view(torch.float8_e8m0fnu))
    for row, column in ((0, 0), (127, 127), (128, 127), (127, 128), (199, 299), (130, 256)):
        factor = 2.0 ** (scale[row // 128, column // 128].item() - 127)
        assert got[row, column].item() == weight[row, column].float().item() * factor
    floats = decode_e8m0(scale)
    assert torch.equal(dequantize_weight(weight, floats), got)


def test_weight_in_e2m1_has_a_scale_per_row_and_32() -> None:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (2, 3, 32), generator=gen, dtype=torch.uint8)
    scale = torch.randint(120, 130, (2, 3, 2), generator=gen, dtype=torch.uint8)
    got = dequantize_weight(weight, scale.view(torch.float8_e8m0fnu))
    assert got.shape == (2, 3, 64)
    for e, row, column in ((0, 0, 0), (1, 2, 31), (0, 1, 32), (1, 0, 63)):
        byte = weight[e, row, column // 2].item()
        value = E2M1[byte >> 4 if column % 2 else byte & 15]
        assert got[e, row, column].item() == value * 2.0 ** (scale[e, row, column // 32].item() - 127)


def test_weight_without_scale_is_widened() -> None:
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(dequantize_weight(weight, None), weight.float())
