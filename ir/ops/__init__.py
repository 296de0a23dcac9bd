"""Every graph op. `docs/add-an-op.md` tells how to add one."""

from rewright.ir.ops.attention import sparse_attention
from rewright.ir.ops.compress import add_position_bias, compress
from rewright.ir.ops.embed import embed, take_last
from rewright.ir.ops.experts import expert_linear, expert_sum
from rewright.ir.ops.hyper_connection import (
    hc_collapse,
    hc_combine,
    hc_expand,
    hc_head_split,
    hc_mix,
    hc_split,
)
from rewright.ir.ops.index import index_score, index_topk
from rewright.ir.ops.layout import reshape
from rewright.ir.ops.linear import grouped_linear, linear
from rewright.ir.ops.norm import head_rms_norm, rms_norm
from rewright.ir.ops.quantize import dequantize, quantize
from rewright.ir.ops.rope import hadamard, rope
from rewright.ir.ops.route import route, route_hash, swiglu
from rewright.ir.ops.state import entry_write, ring_write

__all__ = [
    "add_position_bias",
    "compress",
    "dequantize",
    "embed",
    "entry_write",
    "expert_linear",
    "expert_sum",
    "grouped_linear",
    "hadamard",
    "hc_collapse",
    "hc_combine",
    "hc_expand",
    "hc_head_split",
    "hc_mix",
    "hc_split",
    "head_rms_norm",
    "index_score",
    "index_topk",
    "linear",
    "quantize",
    "reshape",
    "ring_write",
    "rms_norm",
    "rope",
    "route",
    "route_hash",
    "sparse_attention",
    "swiglu",
    "take_last",
]
