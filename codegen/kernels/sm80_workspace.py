"""Memory that sm80 kernels need while they run: partial sums, one set for every worker."""

from __future__ import annotations

from rewright.codegen.kernel import Call

WORKERS = 132
"""Thread blocks of a launch at most: multiprocessors of the largest card."""

_F32 = 4
_TILE_ROWS, _TILE_COLUMNS = 16, 8
_KEYS_PER_SPLIT = 32
_SPLITS_OF_FEW, _SPLITS_OF_MANY, _FEW_ROWS = 32, 8, 2
_BINS = 1 << 11
"""Bins of the histogram from which the threshold of a top-k is read."""


def streamed(call: Call) -> int:
    """Of matrix products: the tile that each worker hands to the next, and where the streams' mixing
    logits are formed behind them the partial dots and sum of squares of every worker."""
    tiles = WORKERS * _TILE_ROWS * _TILE_COLUMNS * _F32
    logits = sum(mix.results[0].shape[-1] + 1 for mix in call.each("hc_mix"))
    return tiles + WORKERS * call.rows * logits * _F32


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
