"""How a value's rows lie in memory, and the way there and back."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.errors import CompilerBug
from rewright.ir.types import ROW_ALIGN, ValueType, type_of


def padded(type: ValueType) -> ValueType:
    """The type with rows at multiples of `ROW_ALIGN` bytes; itself where they are there already."""
    pitch = -(-type.row_bytes // ROW_ALIGN) * ROW_ALIGN
    return type.dense if pitch == type.row_bytes else type.with_pitch(pitch)


def stored_bytes(type: ValueType) -> int:
    """Bytes that a value of this type occupies."""
    if type.pitch is None:
        return type.nbytes
    return type.numel // type.shape[-1] * type.pitch


def pack(tensor: Tensor, type: ValueType) -> Tensor:
    """A tensor -> its bytes in the layout of `type`, uint8[stored_bytes]; padding is zero."""
    if type_of(tensor) != type.dense:
        raise CompilerBug(f"a tensor {type_of(tensor)} cannot be laid out as {type}")
    rows = tensor.contiguous().view(torch.uint8)
    if type.pitch is None:
        return rows.flatten()
    rows = rows.reshape(-1, type.row_bytes)
    return torch.nn.functional.pad(rows, (0, type.pitch - type.row_bytes)).flatten()


def unpack(data: Tensor, type: ValueType) -> Tensor:
    """The inverse of `pack`."""
    if data.dtype != torch.uint8 or data.numel() != stored_bytes(type):
        raise CompilerBug(f"{data.numel()} bytes of {data.dtype} are no {type}")
    rows = data if type.pitch is None else data.view(-1, type.pitch)[:, : type.row_bytes]
    # A copy: a view of another element size needs rows back to back.
    return rows.clone().flatten().view(type.dtype.torch_dtype).view(type.storage_shape)
