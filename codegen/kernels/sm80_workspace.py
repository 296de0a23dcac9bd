"""Memory that sm80 kernels need while they run."""

from __future__ import annotations

from rewright.codegen.kernel import Call
from rewright.codegen.kernels.sm80_limits import DECODE_ROWS
from rewright.ir.plan import ALIGN

_F32 = 4
_HEADS_PER_BLOCK, _KEYS_PER_TILE = 16, 32
_ROW_ALIGN = 16
"""Bytes that rows of scores begin at."""


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
    """Scores of every head and key, and the largest of every tile of keys."""
    heads, _ = _heads(call)
    groups, tiles = -(-heads // _HEADS_PER_BLOCK), -(-_keys(call) // _KEYS_PER_TILE)
    largest = call.rows * groups * tiles * _HEADS_PER_BLOCK
    return _aligned(largest * _KEYS_PER_TILE * _F32) + _aligned(largest * _F32)


def _heads(call: Call) -> tuple[int, int]:
    """Number and width of heads."""
    q = call.operands["q"].shape
    if call.unit.op.name == "sparse_attention":
        return q[2], q[3]
    return call.attrs["heads"], q[-1] // call.attrs["heads"]


def _keys(call: Call) -> int:
    """Keys that a query sees at most."""
    keys = call.operands["window"].shape[1]
    indices = call.operand("indices")
    if indices is not None:
        return keys + indices.shape[-1]
    return keys + (call.attrs["capacity"] // call.attrs["ratio"] if call.attrs["ratio"] else 0)


def index_select(call: Call) -> int:
    """Scores of every entry, in the format of the queries."""
    entries = call.attrs["capacity"] // call.attrs["ratio"]
    row = entries * call.operands["q"].dtype.bits // 8
    return _aligned(call.rows * (-(-row // _ROW_ALIGN) * _ROW_ALIGN))
