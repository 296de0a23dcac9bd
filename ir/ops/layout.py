"""Changes of shape that change no value."""

from __future__ import annotations

import math

from torch import Tensor

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.types import ValueType


@op(dense=frozenset({"x"}))
def reshape(x: Tensor, *, tail: list[int], keep: int = 2) -> Tensor:
    """The same elements in row-major order, the axes after the first `keep` replaced by `tail`.

    One size in `tail` may be -1, which stands for what is left.
    """
    return x.reshape(*x.shape[:keep], *tail).clone()  # a value never shares memory with another


@reshape.infer
def _(x: ValueType, *, tail: list[int], keep: int = 2) -> Types:
    require(x.dtype.per_element == 1, f"{x} is packed")
    require(len(x.shape) >= keep, f"{x} has not {keep} axes to keep")
    count = math.prod(x.shape[keep:])
    known = math.prod(size for size in tail if size != -1)
    if -1 in tail and known > 0 and count % known == 0:
        tail = [count // known if size == -1 else size for size in tail]
    require(math.prod(tail) == count, f"{x} beyond axis {keep} has not the elements of {tail}")
    return (x.with_shape(*x.shape[:keep], *tail),)


@reshape.cost
def _(call: Call) -> Cost:
    return call.cost(reads={"x": 0}, writes=0, flops=0)


@reshape.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 8),), {"tail": [2, 4]}
    yield (gen.randn(2, 1, 8),), {"tail": [8], "keep": 1}
    yield (gen.randn(2, 3, 2, 8),), {"tail": [-1, 4]}
