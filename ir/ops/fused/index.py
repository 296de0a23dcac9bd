"""The indexer's query and its choice of entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewright.ir.compose import composed
from rewright.ir.op import Examples
from rewright.ir.ops.fused.quant import rounded
from rewright.ir.ops.index import index_score, index_topk
from rewright.ir.ops.layout import reshape
from rewright.ir.ops.rope import hadamard, rope
from rewright.ir.ops.state import packed_state


@composed()
def index_query(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    *,
    heads: int,
    fmt: str = "",
    block: int = 0,
    out: str = "",
) -> Tensor:
    """RoPE, Hadamard rotation and rounding of index queries: [B,T,H*c] -> [B,T,H,c].

    Args:
        q: projected queries.
        cos, sin, pos: as in `rope`.
        heads: H.
        fmt, block, out: rounding as in `quantize` and `dequantize`; none where `fmt` is empty.
    """
    turned: Any = hadamard(rope(reshape(q, tail=[heads, -1]), cos, sin, pos))
    return rounded(turned, fmt, block, None, out)


@index_query.examples
def _(gen: Examples):
    f32 = torch.float32
    tables = (gen.randn(16, 4, dtype=f32), gen.randn(16, 4, dtype=f32))
    pos = gen.integers(0, 8, 2)
    yield (gen.randn(2, 3, 64), *tables, pos), {"heads": 2, "fmt": "e2m1", "block": 16, "out": "bf16"}
    yield (gen.randn(2, 3, 64, dtype=f32), *tables, pos), {"heads": 4}


@composed()
def index_select(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    pos: Tensor,
    n_valid: Tensor,
    slot: Tensor,
    *,
    ratio: int,
    capacity: int,
    weight_scale: float,
    k: int,
    keys_rows: str = "",
) -> Tensor:
    """The k best entries of each query, as in `index_score` and `index_topk` -> i32[B,T,k].

    The [B,T,capacity/ratio] scores need not exist.
    """
    scores = index_score(
        q,
        weights,
        keys,
        pos,
        n_valid,
        slot,
        ratio=ratio,
        capacity=capacity,
        weight_scale=weight_scale,
        keys_rows=keys_rows,
    )
    return index_topk(scores, pos, n_valid, ratio=ratio, k=k)


@index_select.examples
def _(gen: Examples):
    vectors = [torch.tensor(v, dtype=torch.int32) for v in ((9, 0), (3, 0), (1, 0))]
    attrs = {"ratio": 4, "capacity": 16, "weight_scale": 0.25, "k": 2}
    yield (gen.randn(2, 3, 2, 8), gen.randn(2, 3, 2), gen.randn(2, 8, 8), *vectors), attrs
    keys = packed_state(gen, "e2m1:4:8", 2, 8, 8)
    yield (gen.randn(2, 3, 2, 8), gen.randn(2, 3, 2), keys, *vectors), {**attrs, "keys_rows": "e2m1:4:8"}
