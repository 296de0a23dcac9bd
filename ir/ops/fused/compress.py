"""Compression of a chunk into entries, from gate scores to the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Examples
from rewright.ir.ops.compress import add_position_bias, compress
from rewright.ir.ops.fused.quant import rounded
from rewright.ir.ops.norm import rms_norm
from rewright.ir.ops.rope import hadamard, rope
from rewright.ir.ops.state import entry_write, packed_state, ring_write

_STATE = ("kv_ring", "gate_ring", "cache")


@composed(outputs=_STATE, updates=dict(zip(_STATE, _STATE, strict=True)))
def compress_write(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    kv_ring: Tensor,
    gate_ring: Tensor,
    cache: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    n_valid: Tensor,
    slot: Tensor,
    *,
    ratio: int,
    overlap: bool,
    pooled: str,
    eps: float,
    rotate: bool = False,
    fmt: str = "",
    block: int = 0,
    dims: list[int] | None = None,
    out: str = "",
    cache_rows: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Pool, norm, turn, round and store the entries that a chunk finishes, and store its rows.

    -> next values of (kv_ring, gate_ring, cache)

    Args:
        kv, gate: f32[B,T,w] of this chunk, gate without its position bias.
        ape: [ratio,w] position bias.
        kv_ring, gate_ring, ratio, overlap: as in `compress`; `pooled` is its `out`.
        cache, cache_rows: as in `entry_write`.
        norm, eps: as in `rms_norm`.
        cos, sin: as in `rope`.
        rotate: whether entries are Hadamard-rotated (index keys).
        fmt, block, dims, out: rounding as in `quantize` and `dequantize`; none where `fmt` is empty.
    """
    at = (pos, n_valid, slot)
    biased = add_position_bias(gate, ape, pos)
    entries, count = compress(kv, biased, kv_ring, gate_ring, *at, ratio=ratio, overlap=overlap, out=pooled)
    next_kv = ring_write(kv_ring, kv, *at)
    next_gate = ring_write(gate_ring, biased, *at)
    rows: Any = rope(rms_norm(entries, norm, eps=eps), cos, sin, pos, stride=ratio)
    if rotate:
        rows = hadamard(rows)
    rows = rounded(rows, fmt, block, dims, out)
    next_cache = entry_write(cache, rows, count, pos, slot, ratio=ratio, cache_rows=cache_rows)
    return next_kv, next_gate, next_cache


@compress_write.examples
def _(gen: Examples):
    f32 = torch.float32
    vectors = [torch.tensor(v, dtype=torch.int32) for v in ((6, 0), (5, 3), (1, 0))]
    tables = (gen.randn(16, 4, dtype=f32), gen.randn(16, 4, dtype=f32))
    kinds = (
        (True, 32, {"rotate": True, "fmt": "e2m1", "block": 16, "out": "bf16"}),
        (False, 16, {"fmt": "e4m3", "block": 8, "dims": [0, 8], "out": "bf16"}),
        (False, 16, {}),
    )
    for overlap, width, rounding in kinds:
        chunk = [gen.randn(2, 5, width, dtype=f32) for _ in range(2)]
        rings = [gen.randn(2, 8 if overlap else 4, width, dtype=f32) for _ in range(2)]
        ape, cache = gen.randn(4, width, dtype=f32), gen.randn(2, 8, 16)
        operands = (*chunk, ape, *rings, cache, gen.randn(16), *tables, *vectors)
        attrs = {"ratio": 4, "overlap": overlap, "pooled": "bf16", "eps": 1e-6, **rounding}
        yield operands, attrs
        if rounding:
            packed = f"{rounding['fmt']}:{rounding['block']}:{rounding.get('dims', [0, 16])[1]}"
            cache = packed_state(gen, packed, 2, 8, 16)
            yield (*chunk, ape, *rings, cache, *operands[6:]), {**attrs, "cache_rows": packed}
