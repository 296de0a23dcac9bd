"""The lightning indexer: scores of compressed entries, and the choice of the best."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.kv_format import holds, load_rows, row_bytes
from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.ops.state import packed_state, require_batch
from rewright.ir.types import DType, ValueType


def visible_entries(pos: int, token: int, ratio: int) -> int:
    """Compressed entries that the query at position pos + token sees, its own included."""
    return (pos + token + 1) // ratio


@op()
def index_score(
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
    keys_rows: str = "",
) -> Tensor:
    """Relevance of every visible entry: [B,T,H,c], [B,T,H], keys[S,N,c] -> q's dtype [B,T,capacity/ratio].

    score_t = sum_h relu(q_h . k_t) * (weights_h * weight_scale). Each step is rounded to q's dtype
    as in the released code: dot product (fp32 inside), scaled weight, product, sum. Entries that a
    query does not see are -inf, and so are all entries of masked rows. `keys_rows` is the format of
    packed keys (`kv_format.py`).
    """
    batch, tokens = q.shape[:2]
    scores = q.new_full((batch, tokens, capacity // ratio), float("-inf"))
    scaled = weights * weight_scale
    for b, (p, n, s) in enumerate(zip(pos.tolist(), n_valid.tolist(), slot.tolist(), strict=True)):
        visible = (p + n) // ratio
        if n == 0 or visible == 0:
            continue
        seen = load_rows(keys[s], slice(visible), keys_rows)
        dots = torch.einsum("thc,ec->teh", q[b, :n].float(), seen.float()).to(q.dtype)
        values = (torch.relu(dots) * scaled[b, :n, None, :]).sum(-1)
        limit = (p + 1 + torch.arange(n)) // ratio
        hidden = torch.arange(visible) >= limit[:, None]
        scores[b, :n, :visible] = values.masked_fill(hidden, float("-inf"))
    return scores


@index_score.infer
def _(
    q: ValueType,
    weights: ValueType,
    keys: ValueType,
    pos: ValueType,
    n_valid: ValueType,
    slot: ValueType,
    *,
    ratio: int,
    capacity: int,
    weight_scale: float,
    keys_rows: str = "",
) -> Types:
    require(q.dtype.is_float and len(q.shape) == 4, f"q is {q}, not a float [B,T,H,c]")
    require(weights == q.with_shape(*q.shape[:3]), f"q {q} and weights {weights} disagree")
    fits = len(keys.shape) == 3 and holds(keys, q.dtype, q.shape[3], keys_rows)
    require(fits, f"q {q} and keys {keys} disagree")
    require(
        capacity % ratio == 0 and capacity // ratio <= keys.shape[1], f"keys {keys} hold less than {capacity}"
    )
    require_batch(q.shape[0], pos, n_valid, slot)
    return (q.with_shape(*q.shape[:2], capacity // ratio),)


@index_score.cost
def _(call: Call) -> Cost:
    q, keys = call.operands["q"], call.operands["keys"]
    entries = min(call.context, call.attrs["capacity"]) // call.attrs["ratio"] * q.shape[0]
    key_bytes = entries * row_bytes(keys)
    score_bytes = entries * q.shape[1] * q.dtype.bits // 8
    flops = 2 * entries * q.shape[1] * q.shape[2] * q.shape[3]
    return call.cost(reads={"keys": key_bytes}, writes=score_bytes, flops=flops)


def _vectors(*rows: tuple[int, ...]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.int32) for row in rows]


@index_score.examples
def _(gen: Examples):
    vectors = _vectors((9, 0), (3, 0), (1, 0))
    attrs = {"ratio": 4, "capacity": 16, "weight_scale": 0.25}
    yield (gen.randn(2, 3, 2, 8), gen.randn(2, 3, 2), gen.randn(2, 8, 8), *vectors), attrs
    q, weights = gen.randn(2, 3, 2, 64), gen.randn(2, 3, 2)
    keys = packed_state(gen, "e2m1:32:64", 2, 8, 64)
    yield (q, weights, keys, *vectors), {**attrs, "keys_rows": "e2m1:32:64"}


@op()
def index_topk(scores: Tensor, pos: Tensor, n_valid: Tensor, *, ratio: int, k: int) -> Tensor:
    """The k best visible entries of each query, best first: [B,T,n] -> i32[B,T,k].

    Equal scores: the lower index first. Places without an entry hold -1.
    """
    batch, tokens, _ = scores.shape
    chosen = torch.full((batch, tokens, k), -1, dtype=torch.int32)
    for b, (p, n) in enumerate(zip(pos.tolist(), n_valid.tolist(), strict=True)):
        visible = (p + n) // ratio
        if n == 0 or visible == 0:
            continue
        order = scores[b, :n, :visible].float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
        limit = (p + 1 + torch.arange(n)) // ratio
        # Entries out of sight score -inf, so they come last: cut each list at the visible count.
        beyond = torch.arange(order.shape[1]) >= limit[:, None]
        chosen[b, :n, : order.shape[1]] = order.int().masked_fill(beyond, -1)
    return chosen


@index_topk.infer
def _(scores: ValueType, pos: ValueType, n_valid: ValueType, *, ratio: int, k: int) -> Types:
    require(scores.dtype.is_float and len(scores.shape) == 3, f"scores are {scores}, not a float [B,T,n]")
    require(0 < k <= scores.shape[2], f"k = {k} of {scores.shape[2]} entries")
    require_batch(scores.shape[0], pos, n_valid)
    return (ValueType(DType.I32, (*scores.shape[:2], k)),)


@index_topk.cost
def _(call: Call) -> Cost:
    scores = call.operands["scores"]
    entries = scores.shape[0] * scores.shape[1] * min(call.context // call.attrs["ratio"], scores.shape[2])
    return call.cost(reads={"scores": entries * scores.dtype.bits // 8}, flops=entries)


@index_topk.examples
def _(gen: Examples):
    yield (gen.integers(0, 3, 2, 3, 8).float(), *_vectors((9, 20), (3, 2))), {"ratio": 4, "k": 3}
