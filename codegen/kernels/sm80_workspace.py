"""Memory that sm80 kernels need while they run."""

from __future__ import annotations

from rewright.codegen.kernel import Call
from rewright.codegen.kernels.sm80_limits import DECODE_ROWS
from rewright.ir.plan import ALIGN

_F32 = 4
_KEYS_PER_SPLIT = 32
_SPLITS_OF_FEW, _SPLITS_OF_MANY, _FEW_ROWS = 32, 8, 2
_BINS = 1 << 11
"""Bins of the histogram from which the threshold of a top-k is read."""


def streamed(call: Call) -> int:
    """Of matrix products: their inputs as the products read them (bf16, fp16 values and their scales), for
    steps of several tokens; a wide row of one token may need it too."""
    total = 0
    for value, (rows, columns) in _inputs(call).items():
        del value
        total += rows * (2 * _aligned(2 * columns) + _aligned(columns // 128))
    return total


def _inputs(call: Call) -> dict[str, tuple[int, int]]:
    """Rows and columns of every input of the call's products, eight tokens at a time."""
    found: dict[str, tuple[int, int]] = {}
    for single in call.each("linear", "grouped_linear", "expert_linear"):
        x = single.value("x")
        assert x is not None
        shape = call.types[x].shape
        each = shape[2] if single.unit.op.name == "expert_linear" and len(shape) == 4 else 1
        columns = shape[-1] * (shape[2] if single.unit.op.name == "grouped_linear" else 1)
        found[x] = (min(call.rows, DECODE_ROWS) * each, columns)
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def attention(call: Call) -> int:
    """Weighted sums, maximum and denominator of every head and split of the keys."""
    heads = call.attrs["heads"]
    head_dim = call.operands["q"].shape[-1] // heads
    most = _SPLITS_OF_FEW if call.rows <= _FEW_ROWS else _SPLITS_OF_MANY
    splits = min(most, -(-_keys(call) // _KEYS_PER_SPLIT))
    return splits * call.rows * heads * (head_dim + 2) * _F32


def _keys(call: Call) -> int:
    """Keys that a query sees at most."""
    keys = call.operands["window"].shape[1]
    indices = call.operand("indices")
    if indices is not None:
        return keys + indices.shape[-1]
    return keys + (call.attrs["capacity"] // call.attrs["ratio"] if call.attrs["ratio"] else 0)


def index_select(call: Call) -> int:
    """Scores of every entry, and a histogram for every token."""
    entries = call.attrs["capacity"] // call.attrs["ratio"]
    return call.rows * (entries + _BINS) * _F32
