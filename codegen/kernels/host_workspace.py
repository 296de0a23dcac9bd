"""Memory that host kernels need while they run: one function for each family, as csrc/host takes it.

Every array that a kernel takes begins at a multiple of `ARRAY_ALIGN` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rewright.codegen.kernel import Call
from rewright.ir.types import ValueType

ARRAY_ALIGN = 64
TILE = 16
_F32 = _I32 = 4
_PAIR, _RUN = 12, 24
"""Bytes of a token-expert pair, and of a run of pairs that share a matrix."""


def _arrays(*sizes: int) -> int:
    return sum(-(-size // ARRAY_ALIGN) * ARRAY_ALIGN for size in sizes)


def _rows(type: ValueType) -> int:
    return math.prod(type.shape[:-1])


def _linear(call: Call) -> int:
    """The activation as fp32."""
    return _arrays(call.operands["x"].numel * _F32)


def _grouped_linear_quant(call: Call) -> int:
    """The activation as fp32, and the product before it is quantised."""
    x, weight = call.operands["x"], call.operands["weight"]
    product = x.shape[0] * x.shape[1] * weight.shape[0] * x.dtype.bits // 8
    return _linear(call) + _arrays(product)


def _pair_list(pairs: int) -> int:
    return _arrays(pairs * _PAIR, pairs * _RUN, 2 * 8)


def _expert_linear(call: Call) -> int:
    """The pairs, their activations, their products."""
    x, weight, pairs = call.operands["x"], call.operands["weight"], call.operands["experts"].numel
    return _pair_list(pairs) + _arrays(pairs * x.shape[-1] * _F32, pairs * weight.shape[1] * _F32)


def _moe(call: Call) -> int:
    """Choice and pairs; activations, gate, up and down products of every pair."""
    x, w1, w2 = call.operands["x"], call.operands["w1"], call.operands["w2"]
    table = call.operand("table")
    pairs = _rows(x) * (call.attrs["k"] if table is None else table.shape[1])
    choice = _arrays(pairs * _I32, pairs * _F32, pairs * _I32)
    widths = (x.shape[-1], w1.shape[1], w1.shape[1], w2.shape[1])
    return choice + _pair_list(pairs) + _arrays(*(pairs * width * _F32 for width in widths))


def _shared_expert(call: Call) -> int:
    """Activation, gate, up and down products, and a run for every sequence."""
    x, w1, w2 = call.operands["x"], call.operands["w1"], call.operands["w2"]
    widths = (x.shape[-1], w1.shape[0], w1.shape[0], w2.shape[0])
    return _arrays(*(_rows(x) * width * _F32 for width in widths), x.shape[0] * _RUN)


def _hc_mix(call: Call) -> int:
    """Streams as fp32, products in whole tiles, norm factors."""
    fn = call.operands["fn"]
    streams = call.operand("streams") or call.operands["before"]
    tokens = math.prod(streams.shape[:2])
    tiles = -(-fn.shape[0] // TILE)
    return _arrays(tokens * fn.shape[1] * _F32, tokens * tiles * TILE * _F32, tokens * _F32)


def _index_select(call: Call) -> int:
    """The scores."""
    entries = call.attrs["capacity"] // call.attrs["ratio"]
    return _arrays(call.rows * entries * _F32)


def _compress_write(call: Call) -> int:
    """Entries before they are normed."""
    batch, tokens, _ = call.operands["kv"].shape
    channels = call.operands["norm"].numel
    return _arrays(batch * -(-tokens // call.attrs["ratio"]) * channels * _F32)


WORKSPACE: Mapping[str, Callable[[Call], int]] = {
    "linear": _linear,
    "multi_linear": _linear,
    "grouped_linear": _linear,
    "grouped_linear_quant": _grouped_linear_quant,
    "expert_linear": _expert_linear,
    "moe": _moe,
    "shared_expert": _shared_expert,
    "hc_mix": _hc_mix,
    "hc_pre": _hc_mix,
    "hc_post_pre": _hc_mix,
    "hc_head": _hc_mix,
    "index_select": _index_select,
    "compress_write": _compress_write,
}
"""Bytes by op; kernels that are not listed need none."""
