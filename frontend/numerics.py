"""Numerics modes: which roundings of the released model a graph keeps."""

from __future__ import annotations

from enum import Enum

from rewright.ir.errors import UsageError
from rewright.ir.types import DType


class Numerics(Enum):
    """FAITHFUL keeps every rounding the model was trained with; BF16 drops the quantisation of
    activations before linears (a pass removes it: the traced graph is that of FAITHFUL); FP32 has no
    rounding at all: weights are dequantised exactly to fp32, activations and state are fp32."""

    FAITHFUL = "faithful"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def activation(self) -> DType:
        """Dtype of activations and of attention state."""
        return DType.F32 if self is Numerics.FP32 else DType.BF16

    @property
    def rounds(self) -> bool:
        """Whether the traced graph quantises activations, keys and index vectors."""
        return self is not Numerics.FP32


def parse_numerics(text: str) -> Numerics:
    """The mode called `text`; `UsageError` lists the modes."""
    try:
        return Numerics(text)
    except ValueError:
        modes = ", ".join(n.value for n in Numerics)
        raise UsageError(
            f"unknown numerics {text!r}", where="--numerics", fix=f"choose one of {modes}"
        ) from None
