"""Calls of ops with rows as wide as those of real models: what the examples of ops do not reach.

Blocks with fewer threads than columns, windows of more rows than are read at once, chunks longer than a
ring, steps of one token, masked sequences among others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rewright.ir.op import Examples

F32 = torch.float32
Operands = tuple[Tensor | None, ...]


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tables(gen: Examples, pairs: int, rows: int = 1024) -> tuple[Tensor, Tensor]:
    angles = gen.randn(rows, pairs, dtype=F32, std=3.0)
    return angles.cos(), angles.sin()


def compressor(
    gen: Examples, ratio: int, channels: int, tokens: int, pos: Tensor, n_valid: Tensor, **rounding: Any
) -> tuple[Operands, dict[str, Any]]:
    """A call of compress_write; windows of ratio 4 overlap."""
    overlap = ratio == 4
    width, batch = (2 if overlap else 1) * channels, len(pos)
    chunk = [gen.randn(batch, tokens, width, dtype=F32) for _ in range(2)]
    rings = [gen.randn(batch + 1, 2 * ratio if overlap else ratio, width, dtype=F32) for _ in range(2)]
    ape, cache, norm = (
        gen.randn(ratio, width, dtype=F32),
        gen.randn(batch + 1, 96, channels),
        gen.randn(channels),
    )
    at = (pos, n_valid, vector(*reversed(range(batch))))
    attrs = {"ratio": ratio, "overlap": overlap, "pooled": "bf16", "eps": 1e-6, "out": "bf16", **rounding}
    return (*chunk, ape, *rings, cache, norm, *tables(gen, 32), *at), attrs


ENTRY = {"fmt": "e4m3", "block": 64, "dims": [0, 448]}
INDEX_KEY = {"fmt": "e2m1", "block": 32, "rotate": True}
STEPS = vector(3, 42, 127, 255, 131), vector(1, 1, 1, 0, 1)
CHUNKS = vector(0, 130), vector(128, 77)


def wide_calls(gen: Examples) -> Iterator[tuple[str, Operands, dict[str, Any]]]:
    yield "rms_norm", (gen.randn(2, 2, 4096), gen.randn(4096)), {"eps": 1e-6}
    yield "head_rms_norm", (gen.randn(1, 2, 64, 512),), {"eps": 1e-6}
    yield "rope", (gen.randn(2, 2, 64, 512), *tables(gen, 32), vector(1000, 5000)), {"inverse": True}
    yield "hadamard", (gen.randn(1, 2, 64, 128),), {}
    yield "quantize", (gen.randn(2, 2, 4096, std=50.0),), {"fmt": "e4m3", "block": 128}
    yield "quantize", (gen.randn(1, 2, 64, 128, dtype=F32),), {"fmt": "e2m1", "block": 32}
    scales = torch.exp2(gen.integers(-4, 4, 2, 3, 32).float())
    yield "dequantize", (gen.e4m3(2, 3, 4096), scales, None), {"block": 128, "out": "bf16"}
    yield "embed", (gen.integers(-5, 40, 2, 3), gen.randn(32, 4096)), {"out": "bf16"}
    yield "take_last", (gen.randn(3, 4, 4, 4096), vector(4, 0, 1)), {}
    yield "reshape", (gen.randn(2, 3, 15),), {"tail": [5, 3]}
    yield "add", (gen.randn(2, 2, 4096), gen.randn(2, 2, 4096)), {}
    ring = gen.randn(3, 128, 512)
    yield "ring_write", (ring, gen.randn(2, 140, 512), vector(90, 3), vector(140, 7), vector(2, 0)), {}
    for tokens, n_valid in ((1, vector(1, 0)), (140, vector(140, 9))):
        row = (gen.randn(2, tokens, 512), gen.randn(512), *tables(gen, 32), vector(200, 5))
        attrs = {"eps": 1e-6, "out": "bf16", **ENTRY}
        yield "kv_rows", row, attrs
        yield "kv_write", (*row, n_valid, vector(2, 0), gen.randn(3, 128, 512)), attrs
    for step in (STEPS, CHUNKS):
        tokens = int(step[1].max())
        yield "compress_write", *compressor(gen, 4, 512, tokens, *step, **ENTRY)
        yield "compress_write", *compressor(gen, 4, 128, tokens, *step, **INDEX_KEY)
        yield "compress_write", *compressor(gen, 128, 512, tokens, *step, **ENTRY)
    chunk, rings = ([gen.randn(2, n, 512, dtype=F32) for _ in range(2)] for n in (300, 128))
    pool = {"ratio": 128, "overlap": False, "out": "f32"}
    yield "compress", (*chunk, *rings, vector(100, 0), vector(300, 127), vector(1, 0)), pool
    streams, coefficients = gen.randn(2, 2, 4, 4096), gen.randn(2, 2, 4, dtype=F32)
    yield "hc_mix", (streams, gen.randn(24, 16384, dtype=F32)), {"eps": 1e-6}
    yield "hc_mix", (streams, gen.randn(4, 16384, dtype=F32)), {"eps": 1e-6}
    yield "hc_collapse", (streams, coefficients), {}
    combination = (coefficients, gen.randn(2, 2, 4, 4, dtype=F32))
    yield "hc_combine", (gen.randn(2, 2, 4096), streams, *combination), {}
    yield "hc_expand", (gen.randn(2, 2, 4096),), {"streams": 4}
    split = (gen.randn(2, 9, 24, dtype=F32, std=3.0), gen.randn(3, dtype=F32), gen.randn(24, dtype=F32))
    yield "hc_split", split, {"streams": 4, "iters": 20, "eps": 1e-6}
    for experts, k in ((256, 6), (384, 8), (40, 8)):
        logits, bias = gen.randn(2, 3, experts, dtype=F32, std=8.0), gen.randn(experts)
        yield "route", (logits, bias, vector(3, 1)), {"k": k, "scale": 2.5}
    # Only a few different scores, so that ids decide.
    few = gen.integers(0, 3, 2, 3, 256).float()
    yield "route", (few, torch.zeros(256), vector(3, 1)), {"k": 6, "scale": 1.5}
    table = gen.integers(0, 256, 50, 6)
    tokens = (gen.integers(-3, 60, 2, 3), vector(3, 1))
    yield "route_hash", (gen.randn(2, 3, 256, dtype=F32), table, *tokens), {"scale": 1.5}
    hidden = (gen.randn(2, 2, 6, 2048, std=8.0), gen.randn(2, 2, 6, 2048, std=8.0))
    yield "swiglu", (*hidden, gen.randn(2, 2, 6, dtype=F32)), {"limit": 10.0}
    yield "expert_sum", (gen.randn(2, 2, 8, 4096), gen.integers(-1, 9, 2, 2, 8), gen.randn(2, 2, 4096)), {}
