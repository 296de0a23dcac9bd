"""Sum of two values: the residual connection of models without Hyper-Connections."""

from __future__ import annotations

from torch import Tensor

from rewright.ir.op import Examples, Types, op, require
from rewright.ir.types import ValueType


@op()
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y element by element, both of one type; fp32 inside, rounded once."""
    return (x.float() + y.float()).to(x.dtype)


@add.infer
def _(x: ValueType, y: ValueType) -> Types:
    require(x.dtype.is_float and x == y, f"{x} and {y} are not floats of one type")
    return (x,)


@add.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 16), gen.randn(2, 3, 16)), {}
