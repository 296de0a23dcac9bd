"""Attention with the head norm and RoPE of its queries before it and the inverse RoPE behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Examples
from rewright.ir.ops.attention import sparse_attention
from rewright.ir.ops.layout import reshape
from rewright.ir.ops.norm import head_rms_norm
from rewright.ir.ops.rope import rope
from rewright.ir.ops.state import packed_state


@composed()
def attention(
    q: Tensor,
    kv: Tensor | None,
    window: Tensor,
    compressed: Tensor | None,
    indices: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    n_valid: Tensor,
    slot: Tensor,
    *,
    heads: int,
    eps: float,
    tail: list[int],
    ratio: int,
    capacity: int,
    scale: float,
    window_rows: str = "",
    compressed_rows: str = "",
) -> Tensor:
    """Projected queries [B,T,H*d] -> attended values [B,T,*tail].

    Args:
        q: queries as the projection leaves them; `heads` is H.
        kv, window, compressed, indices, sink, pos, n_valid, slot, ratio, capacity, scale, window_rows,
            compressed_rows: as in `sparse_attention`.
        cos, sin: tables of the queries' RoPE and of the inverse one behind.
        eps: of the head norm.
        tail: shape of a token's result, [G, H*d/G] for groups of heads.
    """
    normed = head_rms_norm(reshape(q, tail=[heads, -1]), eps=eps)
    attended = sparse_attention(
        rope(normed, cos, sin, pos),
        kv,
        window,
        compressed,
        indices,
        sink,
        pos,
        n_valid,
        slot,
        ratio=ratio,
        capacity=capacity,
        scale=scale,
        window_rows=window_rows,
        compressed_rows=compressed_rows,
    )
    return reshape(rope(attended, cos, sin, pos, inverse=True), tail=tail)


@attention.examples
def _(gen: Examples):
    f32 = torch.float32
    sink, tables = gen.randn(2, dtype=f32), (gen.randn(32, 4, dtype=f32), gen.randn(32, 4, dtype=f32))
    vectors = [torch.tensor(v, dtype=torch.int32) for v in ((13, 0), (3, 2), (2, 0))]
    one = [vectors[0], torch.tensor((1, 1), dtype=torch.int32), vectors[2]]
    attrs = {"heads": 2, "eps": 1e-6, "tail": [2, 16], "ratio": 4, "capacity": 32, "scale": 0.25}
    window, entries = gen.randn(3, 8, 16), gen.randn(3, 8, 16)
    q, kv, chosen = gen.randn(2, 3, 32), gen.randn(2, 3, 16), gen.integers(-1, 9, 2, 3, 3)
    yield (q, kv, window, None, None, sink, *tables, *vectors), {**attrs, "ratio": 0, "tail": [32]}
    yield (q, kv, window, entries, chosen, sink, *tables, *vectors), attrs
    yield (gen.randn(2, 1, 32), None, window, entries, None, sink, *tables, *one), attrs
    packed = {"window_rows": "e4m3:8:8", "compressed_rows": "e2m1:4:8"}
    window, entries = (packed_state(gen, text, 3, 8, 16) for text in packed.values())
    yield (q, kv, window, entries, chosen, sink, *tables, *vectors), {**attrs, **packed}
    yield (gen.randn(2, 1, 32), None, window, entries, None, sink, *tables, *one), {**attrs, **packed}
