"""Writes of decode state: rings of recent rows, and growing caches of compressed entries.

Both give the next value of the state; the reference writes the operand in place, which the
interpreter allows where the old value has no later reader. A row with n_valid = 0 leaves its slot
bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.kv_format import holds, row_bytes, row_format, store_rows
from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.types import DType, ValueType


@op(updates="ring")
def ring_write(
    ring: Tensor, rows: Tensor, pos: Tensor, n_valid: Tensor, slot: Tensor, *, ring_rows: str = ""
) -> Tensor:
    """Store the last min(n_valid, R) of a chunk's rows at their position modulo R.

    ring[S,R,c], rows[B,T,c], pos/n_valid/slot i32[B] -> ring. Row t of batch b belongs to
    position pos[b] + t of the sequence in slot[b]. `ring_rows` is the format of packed rows
    (`kv_format.py`).
    """
    size = ring.shape[1]
    for b, (p, n, s) in enumerate(zip(pos.tolist(), n_valid.tolist(), slot.tolist(), strict=True)):
        first = max(0, n - size)
        store_rows(ring[s], torch.arange(p + first, p + n) % size, rows[b, first:n], ring_rows)
    return ring


@ring_write.infer
def _(
    ring: ValueType,
    rows: ValueType,
    pos: ValueType,
    n_valid: ValueType,
    slot: ValueType,
    *,
    ring_rows: str = "",
) -> Types:
    require(len(ring.shape) == 3 and len(rows.shape) == 3, f"ring {ring} or rows {rows} has not three axes")
    fits = holds(ring, rows.dtype, rows.shape[2], ring_rows)
    require(fits, f"ring {ring} cannot hold rows {rows}")
    require_batch(rows.shape[0], pos, n_valid, slot)
    return (ring,)


def require_batch(batch: int, *vectors: ValueType) -> None:
    """Refuse step vectors (pos, n_valid, slot, counts) that are not i32[B]."""
    for vector in vectors:
        require(vector == ValueType(DType.I32, (batch,)), f"{vector} is not i32[{batch}]")


@ring_write.cost
def _(call: Call) -> Cost:
    rows, ring = call.operands["rows"], call.operands["ring"]
    count = rows.shape[0] * min(rows.shape[1], ring.shape[1])
    reads = {"ring": 0, "rows": count * row_bytes(rows)}
    return call.cost(reads=reads, writes=count * row_bytes(ring), flops=0)


def _batch(pos: tuple[int, ...], n_valid: tuple[int, ...], slot: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(v, dtype=torch.int32) for v in (pos, n_valid, slot))


@ring_write.examples
def _(gen: Examples):
    yield (gen.randn(3, 8, 4), gen.randn(2, 5, 4), *_batch((6, 0), (5, 0), (2, 0))), {}
    yield (gen.randn(1, 4, 4), gen.randn(1, 9, 4), *_batch((3,), (7,), (0,))), {}
    for text, columns in PACKED_EXAMPLES:
        vectors = _batch((6, 0), (5, 0), (2, 0))
        yield (
            (packed_state(gen, text, 3, 8, columns), gen.randn(2, 5, columns), *vectors),
            {"ring_rows": text},
        )


PACKED_EXAMPLES = (("e4m3:8:24", 28), ("e4m3:64:64", 96), ("e2m1:32:64", 64), ("e2m1:16:32", 36))
"""Formats and widths of packed rows that examples have: with plain dims and without."""


def packed_state(gen: Examples, text: str, slots: int, rows: int, columns: int) -> Tensor:
    """A packed state of random rows."""
    packed = row_format(text)
    assert packed is not None
    return packed.pack(gen.randn(slots, rows, columns))


@op(updates="cache")
def entry_write(
    cache: Tensor,
    entries: Tensor,
    count: Tensor,
    pos: Tensor,
    slot: Tensor,
    *,
    ratio: int,
    cache_rows: str = "",
) -> Tensor:
    """Append a chunk's finished compressed entries to their cache.

    cache[S,N/ratio,c], entries[B,C,c], count/pos/slot i32[B] -> cache. Candidate j of batch b is
    entry pos[b] // ratio + j; candidates from count[b] on are not written. `cache_rows` is the format
    of packed rows (`kv_format.py`).
    """
    for b, (n, p, s) in enumerate(zip(count.tolist(), pos.tolist(), slot.tolist(), strict=True)):
        first = p // ratio
        store_rows(cache[s], slice(first, first + n), entries[b, :n], cache_rows)
    return cache


@entry_write.infer
def _(
    cache: ValueType,
    entries: ValueType,
    count: ValueType,
    pos: ValueType,
    slot: ValueType,
    *,
    ratio: int,
    cache_rows: str = "",
) -> Types:
    require(len(cache.shape) == 3 and len(entries.shape) == 3, f"cache {cache} or entries {entries}")
    fits = holds(cache, entries.dtype, entries.shape[2], cache_rows)
    require(fits, f"cache {cache} cannot hold entries {entries}")
    require_batch(entries.shape[0], count, pos, slot)
    return (cache,)


@entry_write.cost
def _(call: Call) -> Cost:
    batch, candidates, _ = call.operands["entries"].shape
    written = batch * candidates * row_bytes(call.operands["cache"])
    return call.cost(reads={"cache": 0}, writes=written, flops=0)


@entry_write.examples
def _(gen: Examples):
    count, pos, slot = _batch((1, 0), (7, 2), (1, 0))
    yield (gen.randn(2, 8, 4), gen.randn(2, 2, 4), count, pos, slot), {"ratio": 4}
    for text, columns in PACKED_EXAMPLES:
        operands = (packed_state(gen, text, 2, 8, columns), gen.randn(2, 2, columns), count, pos, slot)
        yield operands, {"ratio": 4, "cache_rows": text}
