"""Attention of one layer: low-rank queries, one shared key/value head, sinks, grouped output."""

from __future__ import annotations

from torch import nn

from rewright.frontend.compressor import Compressor, Indexer
from rewright.frontend.layers import Builder, Linear, RMSNorm, Step, Value, matrix, round_trip
from rewright.ir import ops
from rewright.ir.types import DType


class GroupedLinear(nn.Module):
    """The output projection wo_a: one matrix per group of heads, activation never quantised."""

    inline = True

    def __init__(self, b: Builder, path: str, rows: int, cols: int):
        super().__init__()
        self.weight, self.scale = matrix(b.storage.matrix(path, rows, cols), (rows, cols))

    def forward(self, x: Value) -> Value:
        return ops.grouped_linear(x, self.weight, self.scale, name="")


class Attention(nn.Module):
    """[B,T,D] -> [B,T,D]. `ratio` 0 sees the window only, 4 adds chosen entries, others all entries."""

    def __init__(self, b: Builder, path: str, ratio: int):
        super().__init__()
        c = b.config
        self.ratio, self.numerics, self.eps = ratio, b.numerics, c.rms_norm_eps
        self.heads, self.dim, self.groups = c.num_attention_heads, c.head_dim, c.o_groups
        self.nope, self.rank = c.nope_head_dim, c.o_lora_rank
        self.wq_a = Linear(b, f"{path}.wq_a", c.q_lora_rank, c.hidden_size)
        self.q_norm = RMSNorm(b, f"{path}.q_norm", c.q_lora_rank)
        self.wq_b = Linear(b, f"{path}.wq_b", self.heads * self.dim, c.q_lora_rank)
        self.wkv = Linear(b, f"{path}.wkv", self.dim, c.hidden_size)
        self.kv_norm = RMSNorm(b, f"{path}.kv_norm", self.dim)
        self.attn_sink = b.tensor(f"{path}.attn_sink", (self.heads,), DType.F32)
        self.wo_a = GroupedLinear(b, f"{path}.wo_a", self.groups * c.o_lora_rank, c.group_width)
        self.wo_b = Linear(b, f"{path}.wo_b", c.hidden_size, self.groups * c.o_lora_rank)
        self.compressor = (
            Compressor(b, f"{path}.compressor", self.dim, ratio, rotate=False) if ratio else None
        )
        self.indexer = Indexer(b, f"{path}.indexer", ratio) if ratio == 4 else None
        self.rounding = b.kv.rounding("window")
        packed = b.kv.rows("window", self.nope)
        self.window = b.keys(f"{path}.window", packed, c.sliding_window, self.dim)
        self.window_rows = str(packed or "")

    def forward(self, x: Value, step: Step, cos: Value, sin: Value) -> Value:
        at = (step.pos, step.n_valid, step.slot)
        qr = self.q_norm(self.wq_a(x))
        q = ops.reshape(self.wq_b(qr), tail=[self.heads, self.dim], name="q.heads")
        q = ops.head_rms_norm(q, eps=self.eps, name="q.normed")
        q = ops.rope(q, cos, sin, step.pos, name="q")
        kv = ops.rope(self.kv_norm(self.wkv(x)), cos, sin, step.pos, name="kv")
        kv = round_trip(kv, self.numerics, self.rounding, "kv", stop=self.nope)
        indices = self.indexer(x, qr, step, cos, sin) if self.indexer is not None else None
        entries = self.compressor(x, step, cos, sin) if self.compressor is not None else None
        window = step.state[self.window]
        o = ops.sparse_attention(
            q,
            kv,
            window,
            entries,
            indices,
            self.attn_sink,
            *at,
            ratio=self.ratio,
            capacity=step.capacity,
            scale=self.dim**-0.5,
            window_rows=self.window_rows,
            compressed_rows=self.compressor.cache_rows if self.compressor is not None else "",
            name="attended",
        )
        # After the last reader: a chunk longer than the window would overwrite keys still needed.
        step.state[self.window] = ops.ring_write(
            window, kv, *at, ring_rows=self.window_rows, name="window.next"
        )
        o = ops.rope(o, cos, sin, step.pos, inverse=True, name="o")
        o = ops.reshape(o, tail=[self.groups, self.heads * self.dim // self.groups], name="o.groups")
        z = ops.reshape(self.wo_a(o), tail=[self.groups * self.rank], name="z")
        return self.wo_b(z)
