"""The key/value row of a token, and its way into the window ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Examples
from rewright.ir.ops.fused.quant import rounded
from rewright.ir.ops.norm import rms_norm
from rewright.ir.ops.rope import rope
from rewright.ir.ops.state import packed_state, ring_write


def _row(
    x: Any, weight: Any, cos: Any, sin: Any, pos: Any, eps: float, fmt: str, block: int, dims: Any, out: str
) -> Any:
    turned = rope(rms_norm(x, weight, eps=eps), cos, sin, pos)
    return rounded(turned, fmt, block, dims, out)


@composed()
def kv_rows(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    *,
    eps: float,
    fmt: str = "",
    block: int = 0,
    dims: list[int] | None = None,
    out: str = "",
) -> Tensor:
    """RMS norm, RoPE and rounding of keys: [B,T,d] -> [B,T,d].

    Args:
        x, weight, eps: as in `rms_norm`.
        cos, sin, pos: as in `rope`.
        fmt, block, dims, out: rounding as in `quantize` and `dequantize`; none where `fmt` is empty.
    """
    return _row(x, weight, cos, sin, pos, eps, fmt, block, dims, out)


@composed(updates="window")
def kv_write(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    n_valid: Tensor,
    slot: Tensor,
    window: Tensor,
    *,
    eps: float,
    fmt: str = "",
    block: int = 0,
    dims: list[int] | None = None,
    out: str = "",
    window_rows: str = "",
) -> Tensor:
    """`kv_rows`, stored: the next value of the window ring [S,W,d].

    Args:
        x, weight, cos, sin, pos, eps, fmt, block, dims, out: as in `kv_rows`.
        n_valid, slot, window: as in `ring_write`; `window_rows` is its `ring_rows`.
    """
    rows = _row(x, weight, cos, sin, pos, eps, fmt, block, dims, out)
    return ring_write(window, rows, pos, n_valid, slot, ring_rows=window_rows)


def _examples(gen: Examples):
    f32 = torch.float32
    tables = (gen.randn(16, 4, dtype=f32), gen.randn(16, 4, dtype=f32))
    pos = torch.tensor([9, 2], dtype=torch.int32)
    for rounding in ({}, {"fmt": "e4m3", "block": 8, "dims": [0, 8], "out": "bf16"}):
        yield (gen.randn(2, 3, 16), gen.randn(16), *tables, pos), {"eps": 1e-6, **rounding}


@kv_rows.examples
def _(gen: Examples):
    yield from _examples(gen)


@kv_write.examples
def _(gen: Examples):
    n_valid, slot = (torch.tensor(v, dtype=torch.int32) for v in ((3, 0), (2, 0)))
    for operands, attrs in _examples(gen):
        yield (*operands, n_valid, slot, gen.randn(3, 8, 16)), attrs
    for operands, attrs in _examples(gen):
        for text in ("e4m3:8:8", "e2m1:4:8"):
            window = packed_state(gen, text, 3, 8, 16)
            yield (*operands, n_valid, slot, window), {**attrs, "window_rows": text}
