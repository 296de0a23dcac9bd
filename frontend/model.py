"""The DeepSeek-V4 model as plain modules that call graph ops; `trace.py` turns it into graphs.

Module and parameter names are those of the checkpoint, so that paths in a graph are checkpoint
names.
"""

from __future__ import annotations

from torch import nn

from rewright.frontend.attention import Attention
from rewright.frontend.layers import Builder, Embedding, FloatLinear, RMSNorm, RopeTable, Step, Value
from rewright.frontend.moe import MoE
from rewright.ir import ops
from rewright.ir.types import DType


class Layer(nn.Module):
    """Attention and MoE on n residual streams [B,T,n,D], each wrapped in Hyper-Connections."""

    def __init__(self, b: Builder, path: str, index: int):
        super().__init__()
        c = b.config
        self.streams, self.iters, self.hc_eps, self.rms_eps = (
            c.hc_mult,
            c.hc_sinkhorn_iters,
            c.hc_eps,
            c.rms_norm_eps,
        )
        rows = (2 + c.hc_mult) * c.hc_mult
        for kind in ("attn", "ffn"):
            for name, shape in (
                ("fn", (rows, c.hc_mult * c.hidden_size)),
                ("base", (rows,)),
                ("scale", (3,)),
            ):
                setattr(self, f"hc_{kind}_{name}", b.tensor(f"{path}.hc_{kind}_{name}", shape, DType.F32))
        self.compressed = c.layer_ratio(index) > 0
        self.attn_norm = RMSNorm(b, f"{path}.attn_norm", c.hidden_size)
        self.attn = Attention(b, f"{path}.attn", c.layer_ratio(index))
        self.ffn_norm = RMSNorm(b, f"{path}.ffn_norm", c.hidden_size)
        self.ffn = MoE(b, f"{path}.ffn", c.is_hash_layer(index))

    def forward(self, streams: Value, step: Step, rope: Rope) -> Value:
        cos, sin = rope.compressed() if self.compressed else rope.window()
        u, post, comb = self._before(streams, "attn")
        y = self.attn(self.attn_norm(u), step, cos, sin)
        streams = ops.hc_combine(y, streams, post, comb, name="hc_attn.streams")
        u, post, comb = self._before(streams, "ffn")
        y = self.ffn(self.ffn_norm(u), step)
        return ops.hc_combine(y, streams, post, comb, name="hc_ffn.streams")

    def _before(self, streams: Value, kind: str) -> tuple[Value, Value, Value]:
        """Input of a sub-block, and the coefficients to put its output back."""
        mix = ops.hc_mix(streams, getattr(self, f"hc_{kind}_fn"), eps=self.rms_eps, name=f"hc_{kind}.mix")
        pre, post, comb = ops.hc_split(
            mix,
            getattr(self, f"hc_{kind}_scale"),
            getattr(self, f"hc_{kind}_base"),
            streams=self.streams,
            iters=self.iters,
            eps=self.hc_eps,
            name=f"hc_{kind}",
        )
        return ops.hc_collapse(streams, pre, name=f"hc_{kind}.u"), post, comb


class Rope(nn.Module):
    """The two position tables: one for window-only layers, one (YaRN) for layers that compress."""

    def __init__(self, b: Builder, path: str):
        super().__init__()
        self.window = RopeTable(b, f"{path}.window")
        self.compressed = RopeTable(b, f"{path}.compressed")


class Model(nn.Module):
    """`step`: tokens i32[B,T] and state -> logits f32[B,V] (or [B,T,V]) and the next state.

    Attributes:
        builder: what it was built from; holds the states' types and the constants' names.
    """

    def __init__(self, builder: Builder):
        super().__init__()
        b, c = builder, builder.config
        self.builder = builder
        self.streams, self.hidden, self.vocab = c.hc_mult, c.hidden_size, c.vocab_size
        self.hc_eps, self.rms_eps = c.hc_eps, c.rms_norm_eps
        self.rope = Rope(b, "rope")
        self.embed = Embedding(b, "embed")
        self.layers = nn.ModuleList(Layer(b, f"layers.{i}", i) for i in range(c.num_hidden_layers))
        self.hc_head_fn = b.tensor("hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden_size), DType.F32)
        self.hc_head_base = b.tensor("hc_head_base", (c.hc_mult,), DType.F32)
        self.hc_head_scale = b.tensor("hc_head_scale", (1,), DType.F32)
        self.norm = RMSNorm(b, "norm", c.hidden_size)
        self.head = FloatLinear(b, "head", c.vocab_size, c.hidden_size, DType.F32)

    def forward(self, step: Step) -> tuple[Value, dict[str, Value]]:
        streams = ops.hc_expand(self.embed(step.tokens), streams=self.streams, name="streams")
        for layer in self.layers:
            streams = layer(streams, step, self.rope)
        if not step.all_positions:
            streams = ops.take_last(streams, step.n_valid, name="last")
            streams = ops.reshape(streams, tail=[1, self.streams, self.hidden], keep=1, name="last.row")
        mix = ops.hc_mix(streams, self.hc_head_fn, eps=self.rms_eps, name="hc_head.mix")
        pre = ops.hc_head_split(
            mix, self.hc_head_scale, self.hc_head_base, eps=self.hc_eps, name="hc_head.pre"
        )
        logits = self.head(self.norm(ops.hc_collapse(streams, pre, name="hc_head.u")))
        if not step.all_positions:
            logits = ops.reshape(logits, tail=[self.vocab], keep=1, name="logits")
        return logits, step.state
