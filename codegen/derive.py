"""Reads weights of which some are computed from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor

from rewright.ir.derived import DerivedWeight
from rewright.ir.errors import CompilerBug
from rewright.ir.types import type_of


class WeightSource(Protocol):
    """Weights in parts or whole."""

    def parts(self, name: str) -> Iterator[Tensor]: ...

    def load(self, name: str) -> Tensor: ...


class WithDerived:
    """A weight reader that also gives derived weights; one of them is in memory at a time."""

    def __init__(self, weights: WeightSource, derived: Mapping[str, DerivedWeight]):
        self._weights, self._derived = weights, derived

    def parts(self, name: str) -> Iterator[Tensor]:
        """Tensors that, one after the other in memory, make up the weight `name`."""
        if name in self._derived:
            yield self.load(name)
        else:
            yield from self._weights.parts(name)

    def load(self, name: str) -> Tensor:
        """A whole weight; `Refused` if a derived one fails its check."""
        derived = self._derived.get(name)
        if derived is None:
            return self._weights.load(name)
        tensor = derived.compute(*(self._weights.load(source) for source in derived.sources))
        if type_of(tensor) != derived.type:
            raise CompilerBug(f"derived weight {name} is {type_of(tensor)}, not {derived.type}")
        return tensor
