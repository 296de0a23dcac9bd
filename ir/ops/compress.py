"""Pooling of past tokens into compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.ops.state import require_batch
from rewright.ir.types import DType, ValueType, dtype_from_text


@op()
def add_position_bias(gate: Tensor, ape: Tensor, pos: Tensor) -> Tensor:
    """Gate scores plus the bias of the token's place in its window: Z + ape[position mod ratio].

    gate f32[B,T,w], ape [ratio,w], pos i32[B] -> f32[B,T,w].
    """
    place = (pos.long()[:, None] + torch.arange(gate.shape[1])) % ape.shape[0]
    return gate + ape[place].float()


@add_position_bias.infer
def _(gate: ValueType, ape: ValueType, pos: ValueType) -> Types:
    require(gate.dtype is DType.F32 and len(gate.shape) == 3, f"gate is {gate}, not f32[B,T,w]")
    require(ape.dtype.is_float and len(ape.shape) == 2, f"ape is {ape}, not a float [ratio,w]")
    require(ape.shape[1] == gate.shape[2], f"gate {gate} and ape {ape} disagree")
    require_batch(gate.shape[0], pos)
    return (gate,)


@add_position_bias.cost
def _(call: Call) -> Cost:
    ape, gate = call.operands["ape"], call.operands["gate"]
    rows = min(gate.shape[0] * gate.shape[1], ape.shape[0])
    return call.cost(reads={"ape": rows * ape.nbytes // ape.shape[0]})


@add_position_bias.examples
def _(gen: Examples):
    f32 = torch.float32
    yield (gen.randn(2, 3, 8, dtype=f32), gen.randn(4, 8, dtype=f32), gen.integers(0, 9, 2)), {}


@op(outputs=("", "count"))
def compress(
    kv: Tensor,
    gate: Tensor,
    kv_ring: Tensor,
    gate_ring: Tensor,
    pos: Tensor,
    n_valid: Tensor,
    slot: Tensor,
    *,
    ratio: int,
    overlap: bool,
    out: str,
) -> tuple[Tensor, Tensor]:
    """Softmax-pool the entries that a chunk finishes -> (out[B,C,c], i32[B] number finished).

    Entry i pools tokens ratio*i .. ratio*i + ratio - 1, each channel with its own softmax of the
    gate scores over tokens. With `overlap` rows are 2c wide and the entry also pools the window
    before: the first c columns of tokens ratio*(i-1) .. ratio*i - 1 beside the last c columns of
    its own tokens; entry 0 has nothing before it. fp32, rounded once.

    Args:
        kv, gate: f32[B,T,w] of this chunk, gate with its position bias, w = 2c or c.
        kv_ring, gate_ring: f32[S,R,w] rows of earlier tokens by position modulo R, before this
            chunk is written; R >= 2 ratio with overlap, else R >= ratio.
        pos, n_valid, slot: i32[B].
        ratio: tokens per entry.
        out: dtype of the entries.

    Candidate j is entry pos // ratio + j, C = ceil(T / ratio); candidates that are not finished
    are zero.
    """
    batch, tokens, width = kv.shape
    channels = width // 2 if overlap else width
    entries = kv.new_zeros(batch, -(-tokens // ratio), channels)
    counts = []
    for b, (p, n, s) in enumerate(zip(pos.tolist(), n_valid.tolist(), slot.tolist(), strict=True)):
        first, end = p // ratio, (p + n) // ratio
        counts.append(end - first)
        if end == first:
            continue
        start = max(0, ratio * (first - 1 if overlap else first))
        past = torch.arange(start, p) % kv_ring.shape[1]
        k = torch.cat([kv_ring[s, past], kv[b, :n]])[: ratio * end - start]
        z = torch.cat([gate_ring[s, past], gate[b, :n]])[: ratio * end - start]
        if overlap:
            if first == 0:  # nothing precedes entry 0: zero rows of weight zero
                k = torch.cat([k.new_zeros(ratio, width), k])
                z = torch.cat([z.new_full((ratio, width), float("-inf")), z])
            k, z = (_overlapping(v.unflatten(0, (-1, ratio)), channels) for v in (k, z))
        else:
            k, z = k.unflatten(0, (-1, ratio)), z.unflatten(0, (-1, ratio))
        entries[b, : end - first] = (torch.softmax(z, dim=1) * k).sum(1)
    count = torch.tensor(counts, dtype=torch.int32)
    return entries.to(dtype_from_text(out).torch_dtype), count


def _overlapping(windows: Tensor, channels: int) -> Tensor:
    """[m+1,ratio,2c] windows -> [m,2*ratio,c]: each window's last half after its predecessor's first."""
    return torch.cat([windows[:-1, :, :channels], windows[1:, :, channels:]], dim=1)


@compress.infer
def _(
    kv: ValueType,
    gate: ValueType,
    kv_ring: ValueType,
    gate_ring: ValueType,
    pos: ValueType,
    n_valid: ValueType,
    slot: ValueType,
    *,
    ratio: int,
    overlap: bool,
    out: str,
) -> Types:
    require(kv == gate and kv.dtype is DType.F32 and len(kv.shape) == 3, f"kv {kv} and gate {gate} disagree")
    require(kv_ring == gate_ring and kv_ring.dtype is DType.F32, f"rings are {kv_ring} and {gate_ring}")
    batch, tokens, width = kv.shape
    rows = 2 * ratio if overlap else ratio
    require(kv_ring.shape[1] >= rows and kv_ring.shape[2] == width, f"ring {kv_ring} is too small for {kv}")
    require(not overlap or width % 2 == 0, f"{kv} has no two halves")
    require_batch(batch, pos, n_valid, slot)
    shape = (batch, -(-tokens // ratio), width // 2 if overlap else width)
    return ValueType(dtype_from_text(out), shape), ValueType(DType.I32, (batch,))


@compress.cost
def _(call: Call) -> Cost:
    kv, ratio = call.operands["kv"], call.attrs["ratio"]
    rows = 2 * ratio if call.attrs["overlap"] else ratio
    # A step of T tokens finishes T / ratio entries on average; each start reads its past rows once.
    starts = min(1.0, kv.shape[1] / ratio) * kv.shape[0]
    past = round(starts * rows * kv.shape[2] * 4)
    return call.cost(reads={"kv_ring": past, "gate_ring": past}, flops=5 * kv.numel * rows // ratio)


@compress.examples
def _(gen: Examples):
    f32 = torch.float32
    vectors = [torch.tensor(v, dtype=torch.int32) for v in ((6, 0), (5, 3), (1, 0))]
    for overlap, ratio, ring in ((True, 4, 8), (False, 4, 4)):
        chunk = [gen.randn(2, 5, 8, dtype=f32) for _ in range(2)]
        rings = [gen.randn(2, ring, 8, dtype=f32) for _ in range(2)]
        yield (*chunk, *rings, *vectors), {"ratio": ratio, "overlap": overlap, "out": "bf16"}
