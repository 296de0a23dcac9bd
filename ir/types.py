"""Logical types of graph values and how torch holds them.

torch has no arithmetic on 4-bit floats or on exponent-only scales, so the graph keeps types of
its own. The mapping to torch is one to one: a uint8 tensor in a graph is always packed e2m1 (two
codes a byte, the low nibble first), a float8_e8m0fnu tensor is always a block scale, an int8 tensor is
always rows of packed keys (`kv_format.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum

import torch

from rewright.ir.errors import CompilerBug

ROW_ALIGN = 128
"""Bytes to which rows of activations and bases of tensors are aligned."""


class DType(Enum):
    """Element type: the name used in graph text, the bits of one element, the torch dtype."""

    F64 = ("f64", 64, torch.float64)
    F32 = ("f32", 32, torch.float32)
    BF16 = ("bf16", 16, torch.bfloat16)
    F16 = ("f16", 16, torch.float16)
    F8E4M3 = ("f8e4m3", 8, torch.float8_e4m3fn)
    E8M0 = ("e8m0", 8, torch.float8_e8m0fnu)
    E2M1 = ("e2m1", 4, torch.uint8)
    I64 = ("i64", 64, torch.int64)
    I32 = ("i32", 32, torch.int32)
    BYTE = ("byte", 8, torch.int8)

    def __init__(self, text: str, bits: int, torch_dtype: torch.dtype):
        self.text = text
        self.bits = bits
        self.torch_dtype = torch_dtype

    @property
    def per_element(self) -> int:
        """Logical elements held by one torch element (2 for packed e2m1, else 1)."""
        return 2 if self is DType.E2M1 else 1

    @property
    def is_float(self) -> bool:
        """True for the types that arithmetic runs in (not for quantised codes)."""
        return self in (DType.F64, DType.F32, DType.BF16, DType.F16)


_BY_TEXT = {d.text: d for d in DType}
_BY_TORCH = {d.torch_dtype: d for d in DType}


def dtype_from_text(text: str) -> DType:
    """The element type called `text` in graph text; `KeyError` if there is none."""
    return _BY_TEXT[text]


def dtype_from_torch(dtype: torch.dtype) -> DType:
    """The element type that torch holds as `dtype`."""
    try:
        return _BY_TORCH[dtype]
    except KeyError:
        raise CompilerBug(f"no graph type is held as {dtype}") from None


@dataclass(frozen=True, slots=True)
class ValueType:
    """Type of one value: element type, logical shape (elements, not bytes) and layout.

    Attributes:
        dtype, shape: what the values are.
        pitch: bytes from one row (the last axis) to the next; None where rows lie back to back. Only
            activations have one, and only from stage `layout` on.
    """

    dtype: DType
    shape: tuple[int, ...]
    pitch: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the value stored densely."""
        return (self.numel * self.dtype.bits + 7) // 8

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Shape of the torch tensor that holds the value."""
        pack = self.dtype.per_element
        if pack == 1:
            return self.shape
        if not self.shape or self.shape[-1] % pack:
            raise CompilerBug(f"{self}: the last axis of a packed type must be a multiple of {pack}")
        return (*self.shape[:-1], self.shape[-1] // pack)

    @property
    def dense(self) -> ValueType:
        """The same type with its rows back to back."""
        return self if self.pitch is None else ValueType(self.dtype, self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row without padding."""
        return (self.shape[-1] * self.dtype.bits + 7) // 8

    def with_pitch(self, pitch: int | None) -> ValueType:
        return ValueType(self.dtype, self.shape, pitch)

    def with_shape(self, *shape: int) -> ValueType:
        return ValueType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> ValueType:
        return ValueType(dtype, self.shape)

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """An uninitialised torch tensor that can hold the value."""
        return torch.empty(self.storage_shape, dtype=self.dtype.torch_dtype, device=device)

    def __str__(self) -> str:
        pitch = "" if self.pitch is None else f"|{self.pitch}"
        return f"{self.dtype.text}[{','.join(map(str, self.shape))}{pitch}]"


def type_of(tensor: torch.Tensor) -> ValueType:
    """The logical type of a torch tensor."""
    dtype = dtype_from_torch(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype.per_element != 1:
        shape = (*shape[:-1], shape[-1] * dtype.per_element)
    return ValueType(dtype, shape)


def parse_type(text: str) -> ValueType:
    """Read back what `str(ValueType)` printed; `ValueError` if `text` is not a type."""
    match = re.fullmatch(r"(\w+)\[((?:[0-9]+(?:,[0-9]+)*)?)(?:\|([0-9]+))?\]", text)
    if match is None or match[1] not in _BY_TEXT:
        raise ValueError(f"not a type: {text!r}")
    shape = tuple(int(d) for d in match[2].split(",") if d)
    return ValueType(_BY_TEXT[match[1]], shape, int(match[3]) if match[3] else None)
