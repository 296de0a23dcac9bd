"""Folds what is alike in many layers: it is said once, of the first, with the numbers of the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_LAYER = re.compile(r"\blayers\.(\d+)\b")


@dataclass(frozen=True)
class Alike(Generic[T]):
    """Items that are alike up to the number of their layer.

    Attributes:
        item: the first.
        others: layers of the others.
        rest: the others.
    """

    item: T
    others: tuple[int, ...] = ()
    rest: tuple[T, ...] = ()


def layer_of(text: str) -> int | None:
    """The first layer that a name or a line speaks of, None if there is none."""
    found = _LAYER.search(text)
    return int(found[1]) if found else None


def fold_layers(items: Iterable[T], where: Callable[[T], str], text: Callable[[T], str]) -> list[Alike[T]]:
    """Put items together that are alike in several layers, in the order of the first of each.

    Args:
        items: the items.
        where: text that names an item's own layer.
        text: all that must be alike, layers counted from the item's own.
    """
    groups: dict[object, list[T]] = {}
    for i, item in enumerate(items):
        layer = layer_of(where(item))
        key = i if layer is None else (_from_layer(where(item), layer), _from_layer(text(item), layer))
        groups.setdefault(key, []).append(item)
    return [
        Alike(first, tuple(sorted(layer_of(where(other)) or 0 for other in others)), tuple(others))
        for first, *others in groups.values()
    ]


def _from_layer(text: str, layer: int) -> str:
    """Text whose layer numbers count from `layer`."""
    return _LAYER.sub(lambda m: f"layers.{int(m[1]) - layer:+}", text)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, short: `1-4, 6, 8 .. 42`."""
    parts: list[str] = []
    at = 0
    while at < len(numbers):
        run = _run(numbers[at:])
        step = numbers[at + 1] - numbers[at] if run > 1 else 0
        if step == 1 and run > 2:
            parts.append(f"{numbers[at]}-{numbers[at + run - 1]}")
        elif run > 3:
            parts.append(f"{numbers[at]}, {numbers[at + 1]} .. {numbers[at + run - 1]}")
        else:
            run = 1
            parts.append(str(numbers[at]))
        at += run
    return ", ".join(parts)


def _run(numbers: Sequence[int]) -> int:
    """How many numbers from the first on have one distance."""
    length = min(2, len(numbers))
    while length < len(numbers) and numbers[length] - numbers[length - 1] == numbers[1] - numbers[0]:
        length += 1
    return length
