"""Memory that sm80 kernels need while they run: partial sums, one set for every worker."""

from __future__ import annotations

from rewright.codegen.kernel import Call

WORKERS = 132
"""Thread blocks of a launch at most: multiprocessors of the largest card."""

_F32 = 4
_TILE_ROWS, _TILE_COLUMNS = 16, 8
_HEADS_PER_BLOCK, _KEYS_PER_TILE = 16, 32
_MOST_SPLITS, _MOST_BLOCKS = 32, 256
_ALIGN, _ROW_ALIGN = 64, 16
"""Bytes that parts of a workspace begin at, and rows of scores."""


def streamed(call: Call) -> int:
    """Of matrix products: the tile that each worker hands to the next, and where the streams' mixing
    logits are formed behind them the partial dots and sum of squares of every worker."""
    tiles = WORKERS * _TILE_ROWS * _TILE_COLUMNS * _F32
    logits = sum(mix.results[0].shape[-1] + 1 for mix in call.each("hc_mix"))
    return tiles + WORKERS * call.rows * logits * _F32


def attention(call: Call) -> int:
    """Weighted sums, maximum and denominator of every head and split of the keys. There are as many splits
    as there are tiles of keys, as long as the blocks of a launch do not get too many."""
    heads, head_dim = _heads(call)
    groups, tiles = -(-heads // _HEADS_PER_BLOCK), -(-_keys(call) // _KEYS_PER_TILE)
    most = min(max(_MOST_BLOCKS // (call.rows * groups), 1), _MOST_SPLITS)
    sums = min(most, tiles) * call.rows * heads
    return _aligned(sums * head_dim * _F32) + _aligned(sums * 2 * _F32)


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


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
