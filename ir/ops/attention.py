"""Attention over the window and the compressed entries, with sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.kv_format import holds, load_rows, row_bytes
from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.ops.state import packed_state, require_batch
from rewright.ir.types import DType, ValueType


@op()
def sparse_attention(
    q: Tensor,
    kv: Tensor | None,
    window: Tensor,
    compressed: Tensor | None,
    indices: Tensor | None,
    sink: Tensor,
    pos: Tensor,
    n_valid: Tensor,
    slot: Tensor,
    *,
    ratio: int,
    capacity: int,
    scale: float,
    window_rows: str = "",
    compressed_rows: str = "",
) -> Tensor:
    """Multi-query attention where one vector is key and value: q[B,T,H,d] -> [B,T,H,d].

    The query at position p sees the tokens p-W+1 .. p, of which those before the chunk come from
    the ring, and compressed entries: those in its index list, or without a list all of the
    floor((p+1)/ratio) finished ones. The sink of a head adds to the denominator only:
    o = sum_t exp(s_t - M) k_t / (sum_t exp(s_t - M) + exp(sink - M)), M the largest score.

    Args:
        q: queries.
        kv: [B,T,d] keys of this chunk; absent where the ring holds them already, which is right for
            T = 1 only (the one row that is overwritten is out of sight).
        window: [S,W,d] ring of earlier keys by position modulo W, with `kv` before this chunk is
            written.
        compressed: [S,N/ratio,d] entries, those finished in this chunk included.
        indices: i32[B,T,k] entries to attend; negative or not yet visible ones are absent.
        sink: f32[H].
        pos, n_valid, slot: i32[B]; rows from n_valid on give zeros.
        ratio: tokens per entry, 0 without compression.
        capacity: tokens of context that this variant reads at most.
        scale: factor of q . k.
        window_rows, compressed_rows: formats of packed rows (`kv_format.py`).

    fp32 inside. On bf16 input the weights are rounded to bf16 for the product with the values
    while the denominator sums them unrounded, as in the released kernel; the maximum is the final
    one and not a running one. Sums run in the released code's list order: window oldest first,
    then the entries as listed.
    """
    out = torch.zeros_like(q)
    for b, (p, n, s) in enumerate(zip(pos.tolist(), n_valid.tolist(), slot.tolist(), strict=True)):
        if n == 0:
            continue
        table, wanted = _window(None if kv is None else kv[b, :n], window[s], p, n, window_rows)
        if compressed is not None:
            entries = load_rows(compressed[s], slice((p + n) // ratio), compressed_rows)
            chosen = None if indices is None else indices[b, :n]
            wanted = torch.cat(
                [wanted, _entries(entries.shape[0], chosen, p, n, ratio, table.shape[0])], dim=1
            )
            table = torch.cat([table, entries])
        rows = max(1, _GATHER_ELEMENTS // (wanted.shape[1] * table.shape[1]))
        for first in range(0, n, rows):
            part = slice(first, min(first + rows, n))
            out[b, part] = _attend(q[b, part], table, wanted[part], sink, scale)
    return out


_GATHER_ELEMENTS = 1 << 25
"""Gathered key elements held at once."""


def _window(chunk: Tensor | None, ring: Tensor, p: int, n: int, rows: str) -> tuple[Tensor, Tensor]:
    """Keys of positions max(0, p-W+1) .. p+n-1, and for each of the n queries its W oldest-first
    rows of that table (-1: none)."""
    size = ring.shape[0]
    first = max(0, p - size + 1)
    past = load_rows(ring, torch.arange(first, p if chunk is not None else p + n) % size, rows)
    table = past if chunk is None else torch.cat([past, chunk])
    at = p + torch.arange(n)[:, None]
    wanted = (at - size + 1).clamp_min(0) + torch.arange(min(size, p + n))
    return table, (wanted - first).masked_fill(wanted > at, -1)


def _entries(count: int, chosen: Tensor | None, p: int, n: int, ratio: int, offset: int) -> Tensor:
    """For each of n queries the rows of its compressed entries, which begin at `offset` (-1: none)."""
    visible = (p + 1 + torch.arange(n)[:, None]) // ratio
    wanted = torch.arange(count).expand(n, -1) if chosen is None else chosen.long()
    absent = (wanted < 0) | (wanted >= visible)
    # A place of the lists that no query uses would only cost a gather.
    return (wanted + offset).masked_fill(absent, -1)[:, ~absent.all(0)]


def _attend(q: Tensor, table: Tensor, wanted: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Softmax with sink over each query's rows of the table: [n,H,d], [m,d], [n,k] -> [n,H,d]."""
    absent = wanted < 0
    keys = table[wanted.clamp_min(0)].float().masked_fill(absent[..., None], 0.0)
    scores = torch.einsum("nhd,nkd->nhk", q.float(), keys) * scale
    scores = scores.masked_fill(absent[:, None, :], float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    denominator = weights.sum(-1, keepdim=True) + torch.exp(sink.float()[:, None] - top)
    values = torch.einsum("nhk,nkd->nhd", weights.to(q.dtype).float(), keys)
    return (values / denominator).to(q.dtype)


@sparse_attention.infer
def _(
    q: ValueType,
    kv: ValueType | None,
    window: ValueType,
    compressed: ValueType | None,
    indices: ValueType | None,
    sink: ValueType,
    pos: ValueType,
    n_valid: ValueType,
    slot: ValueType,
    *,
    ratio: int,
    capacity: int,
    scale: float,
    window_rows: str = "",
    compressed_rows: str = "",
) -> Types:
    require(len(q.shape) == 4 and q.dtype.is_float, f"q is {q}, not a float [B,T,H,d]")
    batch, tokens, heads, dim = q.shape
    require(kv is None or kv == q.with_shape(batch, tokens, dim), f"kv {kv} does not fit q {q}")
    require(kv is not None or tokens == 1, f"the ring cannot hold the keys of {tokens} tokens for the first")
    fits = len(window.shape) == 3 and holds(window, q.dtype, dim, window_rows)
    require(fits, f"window {window} does not fit q {q}")
    require((compressed is None) == (ratio == 0), "compressed entries and a ratio go together")
    if compressed is not None:
        fits = len(compressed.shape) == 3 and holds(compressed, q.dtype, dim, compressed_rows)
        require(fits, f"entries {compressed}, q {q}")
        require(
            capacity // ratio <= compressed.shape[1], f"entries {compressed} hold less than {capacity} tokens"
        )
    if indices is not None:
        require(compressed is not None, "indices without compressed entries")
        require(indices.dtype is DType.I32 and indices.shape[:2] == (batch, tokens), f"indices are {indices}")
    require(sink.dtype.is_float and sink.shape == (heads,), f"sink {sink} is not a float [{heads}]")
    require_batch(batch, pos, n_valid, slot)
    return (q,)


@sparse_attention.cost
def _(call: Call) -> Cost:
    q, window = call.operands["q"], call.operands["window"]
    batch, tokens, heads, dim = q.shape
    context = min(call.context, call.attrs["capacity"])
    old = min(max(context - tokens, 0), window.shape[1] - 1)
    in_ring = old + (tokens if "kv" not in call.operands else 0)
    reads = {"window": batch * in_ring * row_bytes(window)}
    keys = old + tokens
    if "compressed" in call.operands:
        entries = context // call.attrs["ratio"]
        if "indices" in call.operands:
            entries = min(entries, tokens * call.operands["indices"].shape[2])
        reads["compressed"] = batch * entries * row_bytes(call.operands["compressed"])
        keys += entries
    return call.cost(reads=reads, flops=4 * batch * tokens * heads * keys * dim)


def _vectors(*rows: tuple[int, ...]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.int32) for row in rows]


@sparse_attention.examples
def _(gen: Examples):
    sink = gen.randn(2, dtype=torch.float32)
    attrs = {"ratio": 4, "capacity": 32, "scale": 0.25}
    for dtype in (torch.bfloat16, torch.float32):
        q, kv = gen.randn(2, 3, 2, 16, dtype=dtype), gen.randn(2, 3, 16, dtype=dtype)
        window, entries = gen.randn(3, 8, 16, dtype=dtype), gen.randn(3, 8, 16, dtype=dtype)
        vectors = _vectors((13, 0), (3, 2), (2, 0))
        yield (q, kv, window, None, None, sink, *vectors), {**attrs, "ratio": 0}
        yield (q, kv, window, entries, None, sink, *vectors), attrs
        yield (q, kv, window, entries, gen.integers(-1, 9, 2, 3, 3), sink, *vectors), attrs
        vectors = _vectors((13, 0), (1, 1), (2, 0))
        yield (q[:, :1].clone(), None, window, entries, None, sink, *vectors), attrs
    for window_rows, compressed_rows, dim in (("e4m3:8:8", "e2m1:4:8", 16), ("e4m3:64:64", "", 96)):
        q, kv = gen.randn(2, 3, 2, dim), gen.randn(2, 3, dim)
        window = packed_state(gen, window_rows, 3, 8, dim)
        entries = packed_state(gen, compressed_rows, 3, 8, dim) if compressed_rows else gen.randn(3, 8, dim)
        chosen, packed = gen.integers(-1, 9, 2, 3, 3), {"window_rows": window_rows}
        vectors, one = _vectors((13, 0), (3, 2), (2, 0)), _vectors((13, 0), (1, 1), (2, 0))
        yield (q, kv, window, None, None, sink, *vectors), {**attrs, "ratio": 0, **packed}
        packed |= {"compressed_rows": compressed_rows}
        yield (q, kv, window, entries, chosen, sink, *vectors), {**attrs, **packed}
        yield (q[:, :1].clone(), None, window, entries, None, sink, *one), {**attrs, **packed}
