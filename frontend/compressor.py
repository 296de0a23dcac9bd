"""Compression of past tokens into entries, and the indexer that picks among them."""

from __future__ import annotations

from torch import nn

from rewright.frontend.layers import Builder, FloatLinear, Linear, RMSNorm, Step, Value, round_trip
from rewright.ir import ops
from rewright.ir.types import DType


class Compressor(nn.Module):
    """Keeps a cache of entries that pool `ratio` tokens each; returns its next value.

    Args:
        dim: width of an entry.
        ratio: tokens per entry. At ratio 4 windows overlap: an entry pools its own tokens and the
            four before.
        rotate: entries are index keys: rotated by a Hadamard matrix and rounded as a whole; otherwise
            the dims without position are rounded.
    """

    def __init__(self, b: Builder, path: str, dim: int, ratio: int, rotate: bool):
        super().__init__()
        config = b.config
        self.ratio, self.overlap, self.rotate = ratio, ratio == 4, rotate
        self.numerics, self.act = b.numerics, b.act.text
        kind = "index" if rotate else "csa" if self.overlap else "hca"
        self.stop = None if rotate else dim - config.qk_rope_head_dim
        self.rounding = b.kv.rounding(kind)
        packed = b.kv.rows(kind, dim if self.stop is None else self.stop)
        self.cache_rows = str(packed or "")
        width = 2 * dim if self.overlap else dim
        self.wkv = FloatLinear(b, f"{path}.wkv", width, config.hidden_size, DType.F32)
        self.wgate = FloatLinear(b, f"{path}.wgate", width, config.hidden_size, DType.F32)
        self.ape = b.tensor(f"{path}.ape", (ratio, width), DType.F32)
        self.norm = RMSNorm(b, f"{path}.norm", dim)
        rows = 2 * ratio if self.overlap else ratio
        self.kv_ring = b.state(f"{path}.kv_ring", DType.F32, rows, width)
        self.gate_ring = b.state(f"{path}.gate_ring", DType.F32, rows, width)
        self.cache = b.keys(f"{path}.cache", packed, b.limits.max_context // ratio, dim)

    def forward(self, x: Value, step: Step, cos: Value, sin: Value) -> Value:
        at = (step.pos, step.n_valid, step.slot)
        state = step.state
        kv = self.wkv(x)
        gate = ops.add_position_bias(self.wgate(x), self.ape, step.pos, name="gate")
        entries, count = ops.compress(
            kv,
            gate,
            state[self.kv_ring],
            state[self.gate_ring],
            *at,
            ratio=self.ratio,
            overlap=self.overlap,
            out=self.act,
            name="pooled",
        )
        state[self.kv_ring] = ops.ring_write(state[self.kv_ring], kv, *at, name="kv_ring.next")
        state[self.gate_ring] = ops.ring_write(state[self.gate_ring], gate, *at, name="gate_ring.next")
        entries = ops.rope(self.norm(entries), cos, sin, step.pos, stride=self.ratio, name="entries.rope")
        if self.rotate:
            entries = ops.hadamard(entries, name="entries.rotated")
        entries = round_trip(entries, self.numerics, self.rounding, "entries", stop=self.stop)
        state[self.cache] = ops.entry_write(
            state[self.cache],
            entries,
            count,
            step.pos,
            step.slot,
            ratio=self.ratio,
            cache_rows=self.cache_rows,
            name="cache.next",
        )
        return state[self.cache]


class Indexer(nn.Module):
    """Scores the entries of a ratio-4 layer and keeps the best `index_topk`.

    Its keys are always updated; while no more entries can exist than are kept, nothing is scored
    and None stands for all of them.
    """

    def __init__(self, b: Builder, path: str, ratio: int):
        super().__init__()
        config = b.config
        self.heads, self.dim, self.ratio, self.topk = (
            config.index_n_heads,
            config.index_head_dim,
            ratio,
            config.index_topk,
        )
        self.numerics, self.rounding = b.numerics, b.kv.rounding("index")
        self.wq_b = Linear(b, f"{path}.wq_b", self.heads * self.dim, config.q_lora_rank)
        self.weights_proj = FloatLinear(b, f"{path}.weights_proj", self.heads, config.hidden_size, b.act)
        self.compressor = Compressor(b, f"{path}.compressor", self.dim, ratio, rotate=True)

    def forward(self, x: Value, qr: Value, step: Step, cos: Value, sin: Value) -> Value | None:
        keys = self.compressor(x, step, cos, sin)
        entries = step.capacity // self.ratio
        if entries <= self.topk:
            return None
        q = ops.reshape(self.wq_b(qr), tail=[self.heads, self.dim], name="q.heads")
        q = ops.hadamard(ops.rope(q, cos, sin, step.pos, name="q.rope"), name="q.rotated")
        q = round_trip(q, self.numerics, self.rounding, "q")
        scores = ops.index_score(
            q,
            self.weights_proj(x),
            keys,
            step.pos,
            step.n_valid,
            step.slot,
            ratio=self.ratio,
            capacity=step.capacity,
            weight_scale=(self.dim * self.heads) ** -0.5,
            keys_rows=self.compressor.cache_rows,
            name="scores",
        )
        return ops.index_topk(scores, step.pos, step.n_valid, ratio=self.ratio, k=self.topk, name="chosen")
