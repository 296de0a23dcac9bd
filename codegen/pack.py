"""Puts weights into the layouts that kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from rewright.codegen.shards import WeightReader
from rewright.ir.errors import CompilerBug
from rewright.ir.plan import Plan
from rewright.ir.weight_layout import LAYOUTS


class Wish(NamedTuple):
    """A reader's wish: `reader` wants `weight` in `layout`."""

    weight: str
    layout: str
    reader: str


def agree(wishes: Iterable[Wish]) -> dict[str, str]:
    """The layout of every weight. A weight is stored once: `CompilerBug` where readers disagree."""
    first: dict[str, Wish] = {}
    for wish in wishes:
        other = first.setdefault(wish.weight, wish)
        if other.layout != wish.layout:
            said = (f"{w.reader} reads it {w.layout or 'row by row'}" for w in (other, wish))
            raise CompilerBug(f"weight {wish.weight}: {' and '.join(said)}")
    return {weight: wish.layout for weight, wish in first.items()}


def layouts_of(plans: Iterable[Plan]) -> dict[str, str]:
    """Layout of every weight that the plans of a model read; `CompilerBug` where two disagree."""
    return agree(
        Wish(name, place.layout, f"plan {plan.variant.name}")
        for plan in plans
        for name, place in plan.values.items()
        if place.space == "weight"
    )


class PackedWeights:
    """A weight reader that gives every weight in its layout, one part in memory at a time.

    Args:
        weights: gives them row by row.
        layouts: layout by weight; others stay row by row.
    """

    def __init__(self, weights: WeightReader, layouts: Mapping[str, str]):
        self._weights, self._layouts = weights, layouts

    def parts(self, name: str) -> Iterator[Tensor]:
        """The parts of a weight. Each is packed by itself: a layout orders elements within a matrix, and
        a part (an expert) is one or several whole matrices."""
        layout = LAYOUTS[self._layouts.get(name, "")]
        for part in self._weights.parts(name):
            yield layout.pack(part)
