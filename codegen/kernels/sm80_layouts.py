"""Layouts of the weights that sm80 kernels multiply with."""

from __future__ import annotations

from collections.abc import Mapping

from rewright.codegen.kernel import Call
from rewright.ir.types import DType, ValueType
from rewright.ir.weight_layout import packable

_PRODUCTS = ("linear", "grouped_linear", "expert_linear")
_OF_DTYPE = {DType.F8E4M3: "mma8", DType.E2M1: "mma4", DType.BF16: "mma16"}


def matrix_layout(type: ValueType) -> str:
    """Layout of a matrix of a product: fragments where whole tiles of them fit, else row by row."""
    layout = _OF_DTYPE.get(type.dtype, "")
    return layout if type.shape[-1] % 128 == 0 and packable(layout, type) else ""


def products(call: Call) -> Mapping[str, str]:
    """Layouts of the weights of a call's products, and of the scales of packed e2m1."""
    found: dict[str, str] = {}
    for single in call.each(*_PRODUCTS):
        weight, scale = single.value("weight"), single.value("scale")
        if weight is None or not call.is_weight(weight):
            continue
        found[weight] = layout = matrix_layout(call.types[weight])
        if layout == "mma4" and scale is not None:
            found[scale] = "mma4_scale"
    return found
