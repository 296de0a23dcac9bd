"""Every graph op. `docs/add-an-op.md` tells how to add one."""

from rewright.ir.ops.add import add
from rewright.ir.ops.attention import sparse_attention
from rewright.ir.ops.compress import add_position_bias, compress
from rewright.ir.ops.embed import embed, take_last
from rewright.ir.ops.experts import expert_linear, expert_sum
from rewright.ir.ops.fused.attention import attention
from rewright.ir.ops.fused.compress import compress_write
from rewright.ir.ops.fused.hyper_connection import hc_head, hc_post_pre, hc_pre
from rewright.ir.ops.fused.index import index_query, index_select
from rewright.ir.ops.fused.kv import kv_rows, kv_write
from rewright.ir.ops.fused.linear import grouped_linear_quant, multi_linear
from rewright.ir.ops.fused.moe import moe, shared_expert, swiglu_quant
from rewright.ir.ops.fused.norm import rms_norm_quant
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
from rewright.ir.ops.quantize import dequantize, quantize, quantize_static
from rewright.ir.ops.rope import hadamard, rope
from rewright.ir.ops.route import route, route_hash, swiglu
from rewright.ir.ops.state import entry_write, ring_write

__all__ = [
    "add",
    "add_position_bias",
    "attention",
    "compress",
    "compress_write",
    "dequantize",
    "embed",
    "entry_write",
    "expert_linear",
    "expert_sum",
    "grouped_linear",
    "grouped_linear_quant",
    "hadamard",
    "hc_collapse",
    "hc_combine",
    "hc_expand",
    "hc_head",
    "hc_head_split",
    "hc_mix",
    "hc_post_pre",
    "hc_pre",
    "hc_split",
    "head_rms_norm",
    "index_query",
    "index_score",
    "index_select",
    "index_topk",
    "kv_rows",
    "kv_write",
    "linear",
    "moe",
    "multi_linear",
    "quantize",
    "quantize_static",
    "reshape",
    "ring_write",
    "rms_norm",
    "rms_norm_quant",
    "rope",
    "route",
    "route_hash",
    "shared_expert",
    "sparse_attention",
    "swiglu",
    "swiglu_quant",
    "take_last",
]
