"""Weights that the compiler computes from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rewright.ir.types import ValueType


@dataclass(frozen=True)
class DerivedWeight:
    """A weight and how it is made.

    Attributes:
        name: its name in graphs.
        type: its type.
        sources: names of the weights that it is made of.
        compute: their tensors, in this order -> its tensor; raises `Refused` if a check of the result
            fails.
    """

    name: str
    type: ValueType
    sources: tuple[str, ...]
    compute: Callable[..., Tensor]
