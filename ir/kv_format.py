"""Packed rows of keys: how codes, scales and plain values of a state lie in bytes.

A packed state is byte[S,N,row_bytes]: the leading dims of its rows are codes with block scales, the
others bf16. Within a slot the same part of all N rows lies together, one plane behind the other:

    values of the plain dims   bf16[N, plain]
    codes                      [N, coded] of e4m3, [N, coded/2] of e2m1 (the even element low)
    scales                     e8m0[N, coded/block]

so that every plane is aligned where N is a multiple of `SLOT_ROWS`. Rows that have been rounded to the
format before come back bit for bit: Q(DQ(Q(x))) is Q(x) (`passes/eliminate_quant.py`). csrc/host/
state_rows.h is the same in C++.

An op says how the rows of its state operand X lie with its attribute `X_rows`, the text of a
`RowFormat`; "" stands for rows of the values themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rewright.ir.errors import CompilerBug
from rewright.ir.formats import dequantize_blocks, quantize_blocks
from rewright.ir.types import DType, ValueType

SLOT_ROWS = 8
"""Rows of a packed state come in multiples of these, so that each slot begins at a multiple of 8 bytes."""

_CODE_BITS = {"e4m3": 8, "e2m1": 4}
_PLAIN_BYTES = 2
_TEXT = re.compile(r"(\w+):([1-9][0-9]*):([1-9][0-9]*)")

Rows = Tensor | slice
"""Which rows of a slot: an index i64[n], or a slice."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Format of packed rows.

    Attributes:
        fmt: "e4m3" or "e2m1".
        block: elements that share a scale.
        coded: leading dims that are codes; the others are bf16.
    """

    fmt: str
    block: int
    coded: int

    def __post_init__(self) -> None:
        if self.fmt not in _CODE_BITS or self.coded % self.block or self.code_bits % 8:
            raise CompilerBug(f"{self} is no format of rows")

    def __str__(self) -> str:
        return f"{self.fmt}:{self.block}:{self.coded}"

    @property
    def code_bits(self) -> int:
        """Bits of a row's codes."""
        return self.coded * _CODE_BITS[self.fmt]

    def widths(self, columns: int) -> tuple[int, int, int]:
        """Bytes of one row of `columns` values in each plane."""
        return _PLAIN_BYTES * (columns - self.coded), self.code_bits // 8, self.coded // self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of `columns` values."""
        return sum(self.widths(columns))

    def columns(self, row_bytes: int) -> int:
        """Values of a row of so many bytes; `CompilerBug` if there is no such row."""
        columns = self.coded + (row_bytes - self.row_bytes(self.coded)) // _PLAIN_BYTES
        if columns < self.coded or self.row_bytes(columns) != row_bytes:
            raise CompilerBug(f"no row of {row_bytes} bytes is {self}")
        return columns

    def planes(self, slot: Tensor) -> list[Tensor]:
        """Views of a slot byte[N,row_bytes]: its planes, byte[N,width] each."""
        count, row_bytes = slot.shape
        sizes = [count * width for width in self.widths(self.columns(row_bytes))]
        parts = slot.view(-1).split(sizes)
        return [part.view(count, size // count) for part, size in zip(parts, sizes, strict=True)]

    def load(self, slot: Tensor, rows: Rows) -> Tensor:
        """Rows of a slot -> bf16[n,columns]."""
        plain, codes, scale = (plane[rows] for plane in self.planes(slot))
        as_codes = codes.view(torch.float8_e4m3fn if self.fmt == "e4m3" else torch.uint8)
        values = dequantize_blocks(as_codes, scale.view(torch.float8_e8m0fnu), self.block)
        loaded = torch.empty(len(plain), self.columns(slot.shape[1]), dtype=torch.bfloat16)
        loaded[:, : self.coded] = values
        loaded[:, self.coded :].view(torch.int8)[:] = plain  # which may not be aligned to two bytes
        return loaded

    def store(self, slot: Tensor, rows: Rows, values: Tensor) -> None:
        """Pack bf16[n,columns] into rows of a slot."""
        codes, scale = quantize_blocks(values[..., : self.coded], self.fmt, self.block)
        plain = values[..., self.coded :].contiguous()
        for plane, part in zip(self.planes(slot), (plain, codes, scale), strict=True):
            plane[rows] = part.view(torch.int8)

    def pack(self, rows: Tensor) -> Tensor:
        """bf16[S,N,columns] -> byte[S,N,row_bytes]."""
        slots, count, columns = rows.shape
        packed = torch.empty(slots, count, self.row_bytes(columns), dtype=torch.int8)
        for slot, values in zip(packed, rows, strict=True):
            self.store(slot, slice(None), values)
        return packed


def row_format(text: str) -> RowFormat | None:
    """The format that an attribute names, None for rows that are not packed."""
    if not text:
        return None
    match = _TEXT.fullmatch(text)
    if match is None:
        raise CompilerBug(f"{text!r} is no format of rows")
    return RowFormat(match[1], int(match[2]), int(match[3]))


def rows_of(attrs: Mapping[str, Any], operand: str) -> RowFormat | None:
    """The format of a state operand of an op with these attributes."""
    return row_format(attrs.get(f"{operand}_rows", ""))


def load_rows(slot: Tensor, rows: Rows, text: str) -> Tensor:
    """Rows of a slot of a state, packed or not -> [n,c]."""
    packed = row_format(text)
    return slot[rows] if packed is None else packed.load(slot, rows)


def store_rows(slot: Tensor, rows: Rows, values: Tensor, text: str) -> None:
    """Write rows [n,c] into a slot of a state, packed or not."""
    packed = row_format(text)
    if packed is None:
        slot[rows] = values
    else:
        packed.store(slot, rows, values)


def holds(state: ValueType, dtype: DType, columns: int, text: str) -> bool:
    """Whether the rows of a state are `columns` values of a dtype, packed as `text` says."""
    packed = row_format(text)
    if packed is None:
        return state.dtype is dtype and state.shape[-1] == columns
    fits = dtype is DType.BF16 and state.dtype is DType.BYTE and columns >= packed.coded
    return fits and state.shape[-1] == packed.row_bytes(columns)


def row_bytes(state: ValueType) -> int:
    """Bytes of one row of a state."""
    return state.shape[-1] * state.dtype.bits // 8


def state_rows(count: int, packed: RowFormat | None) -> int:
    """Rows of a state that has to hold `count` of them."""
    return count if packed is None else math.ceil(count / SLOT_ROWS) * SLOT_ROWS
