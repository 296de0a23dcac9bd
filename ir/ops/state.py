"""Writes of decode state: rings of recent rows, and growing caches of compressed entries.

Both give the next value of the state; the reference writes the operand in place, which the
interpreter allows where the old value has no later reader. A row with n_valid = 0 leaves its slot
bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.types import DType, ValueType


@op(updates="ring")
def ring_write(ring: Tensor, rows: Tensor, pos: Tensor, n_valid: Tensor, slot: Tensor) -> Tensor:
    """Store the last min(n_valid, R) of a chunk's rows at their position modulo R.

    ring[S,R,c], rows[B,T,c], pos/n_valid/slot i32[B] -> ring[S,R,c]. Row t of batch b belongs to
    position pos[b] + t of the sequence in slot[b].
    """
    size = ring.shape[1]
    for b, (p, n, s) in enumerate(zip(pos.tolist(), n_valid.tolist(), slot.tolist(), strict=True)):
        first = max(0, n - size)
        ring[s, torch.arange(p + first, p + n) % size] = rows[b, first:n]
    return ring


@ring_write.infer
def _(ring: ValueType, rows: ValueType, pos: ValueType, n_valid: ValueType, slot: ValueType) -> Types:
    require(len(ring.shape) == 3 and len(rows.shape) == 3, f"ring {ring} or rows {rows} has not three axes")
    require(
        ring.dtype is rows.dtype and ring.shape[2] == rows.shape[2], f"ring {ring} cannot hold rows {rows}"
    )
    require_batch(rows.shape[0], pos, n_valid, slot)
    return (ring,)


def require_batch(batch: int, *vectors: ValueType) -> None:
    """Refuse step vectors (pos, n_valid, slot, counts) that are not i32[B]."""
    for vector in vectors:
        require(vector == ValueType(DType.I32, (batch,)), f"{vector} is not i32[{batch}]")


@ring_write.cost
def _(call: Call) -> Cost:
    rows, ring = call.operands["rows"], call.operands["ring"]
    kept = rows.nbytes * min(rows.shape[1], ring.shape[1]) // rows.shape[1]
    return call.cost(reads={"ring": 0, "rows": kept}, writes=kept, flops=0)


def _batch(pos: tuple[int, ...], n_valid: tuple[int, ...], slot: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(v, dtype=torch.int32) for v in (pos, n_valid, slot))


@ring_write.examples
def _(gen: Examples):
    yield (gen.randn(3, 8, 4), gen.randn(2, 5, 4), *_batch((6, 0), (5, 0), (2, 0))), {}
    yield (gen.randn(1, 4, 4), gen.randn(1, 9, 4), *_batch((3,), (7,), (0,))), {}


@op(updates="cache")
def entry_write(
    cache: Tensor, entries: Tensor, count: Tensor, pos: Tensor, slot: Tensor, *, ratio: int
) -> Tensor:
    """Append a chunk's finished compressed entries to their cache.

    cache[S,N/ratio,c], entries[B,C,c], count/pos/slot i32[B] -> cache. Candidate j of batch b is
    entry pos[b] // ratio + j; candidates from count[b] on are not written.
    """
    for b, (n, p, s) in enumerate(zip(count.tolist(), pos.tolist(), slot.tolist(), strict=True)):
        first = p // ratio
        cache[s, first : first + n] = entries[b, :n]
    return cache


@entry_write.infer
def _(
    cache: ValueType, entries: ValueType, count: ValueType, pos: ValueType, slot: ValueType, *, ratio: int
) -> Types:
    require(len(cache.shape) == 3 and len(entries.shape) == 3, f"cache {cache} or entries {entries}")
    fits = cache.dtype is entries.dtype and cache.shape[2] == entries.shape[2]
    require(fits, f"cache {cache} cannot hold entries {entries}")
    require_batch(entries.shape[0], count, pos, slot)
    return (cache,)


@entry_write.cost
def _(call: Call) -> Cost:
    entries = call.operands["entries"].nbytes
    return call.cost(reads={"cache": 0}, writes=entries, flops=0)


@entry_write.examples
def _(gen: Examples):
    count, pos, slot = _batch((1, 0), (7, 2), (1, 0))
    yield (gen.randn(2, 8, 4), gen.randn(2, 2, 4), count, pos, slot), {"ratio": 4}
