"""What quantisation does to rows: the relative error of a row, and how often values saturate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.ir.formats import dequantize_blocks, quantize_blocks, quantize_fixed
from rewright.ir.static_scales import Segment


@dataclass(frozen=True, slots=True)
class QuantError:
    """|x - q(x)| / |x| of a row, Euclidean norms: median and 95th percentile over rows."""

    median: float
    p95: float


def dynamic_error(rows: Tensor, fmt: str, block: int) -> QuantError:
    """Of f32[n,K] with a scale for every block of every row."""
    codes, scale = quantize_blocks(rows, fmt, block)
    return _error(rows, dequantize_blocks(codes, scale, block))


def static_error(rows: Tensor, fmt: str, segment: Segment) -> QuantError:
    """Of f32[n,K] with the scales of a segment."""
    scale = segment.tensor()
    return _error(rows, dequantize_blocks(quantize_fixed(rows, scale, fmt), scale, segment.block))


def _error(rows: Tensor, rounded: Tensor) -> QuantError:
    length = rows.norm(dim=-1)
    relative = ((rows - rounded).norm(dim=-1) / length)[length > 0]
    if not relative.numel():
        return QuantError(0.0, 0.0)
    median, p95 = torch.quantile(relative, torch.tensor([0.5, 0.95])).tolist()
    return QuantError(median, p95)


def saturated(rows: Tensor, fmt: str, segment: Segment) -> int:
    """Values of [n,K] beyond the range of their block."""
    limit = {"e4m3": 448.0, "e2m1": 6.0}[fmt]
    limits = limit * torch.exp2(torch.tensor(segment.exponents).float()).repeat_interleave(segment.block)
    return int((rows.float().abs() > limits).sum())
