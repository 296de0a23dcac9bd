"""Numerics modes: which roundings of the released model a graph keeps."""

from __future__ import annotations

from enum import Enum

from rewright.ir.errors import UsageError
from rewright.ir.types import DType


class Numerics(Enum):
    """FAITHFUL keeps every rounding the model was trained with; FP32 has none at all: weights are
    dequantised exactly to fp32, activations and state are fp32."""

    FAITHFUL = "faithful"
    FP32 = "fp32"

    @property
    def activation(self) -> DType:
        """Dtype of activations and of attention state."""
        return DType.BF16 if self is Numerics.FAITHFUL else DType.F32

    @property
    def rounds(self) -> bool:
        """Whether activations, keys and index vectors are quantised."""
        return self is Numerics.FAITHFUL


def parse_numerics(text: str) -> Numerics:
    """The mode called `text`; `UsageError` lists the modes."""
    try:
        return Numerics(text)
    except ValueError:
        modes = ", ".join(n.value for n in Numerics)
        raise UsageError(
            f"unknown numerics {text!r}", where="--numerics", fix=f"choose one of {modes}"
        ) from None
