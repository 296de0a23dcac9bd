"""Places in memory: values that share the arena of a step, and states.

A value lives from the phase that writes it to the last one that reads it. Values that live in one
phase never overlap, so operands and results of a launch never do either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rewright.ir.errors import CompilerBug
from rewright.ir.plan import ALIGN


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A block of memory and how long it is needed.

    Attributes:
        name: what it holds.
        nbytes: its size.
        first, last: phases during which it must stay as it is, both included.
    """

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Where blocks lie.

    Attributes:
        offsets: by name, multiples of `ALIGN`.
        nbytes: size of the whole.
    """

    offsets: dict[str, int]
    nbytes: int


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


def in_a_row(blocks: Iterable[tuple[str, int]]) -> Arena:
    """Blocks (name, bytes) that all live forever, one after the other."""
    offsets, end = {}, 0
    for name, nbytes in blocks:
        offsets[name] = end
        end += aligned(nbytes)
    return Arena(offsets, end)


def share(blocks: Sequence[Lifetime]) -> Arena:
    """Place blocks so that those that live at one time are apart.

    The largest come first, and each goes into the smallest gap that holds it, the lowest of equal ones.
    """
    if any(block.last < block.first for block in blocks):
        raise CompilerBug("a value dies before it is born")
    offsets: dict[str, int] = {}
    alive: dict[int, list[tuple[int, int]]] = {}
    end = 0
    for block in sorted(blocks, key=lambda b: (-b.nbytes, b.first, b.last, b.name)):
        phases = range(block.first, block.last + 1)
        taken = sorted({span for phase in phases for span in alive.get(phase, ())})
        size = aligned(max(block.nbytes, 1))
        start = _best_gap(taken, size)
        offsets[block.name] = start
        end = max(end, start + size)
        for phase in phases:
            alive.setdefault(phase, []).append((start, start + size))
    return Arena(offsets, end)


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap between sorted spans that holds `size` bytes; behind them if none does."""
    best: tuple[int, int] | None = None
    free = 0
    for start, stop in taken:
        if start - free >= size and (best is None or start - free < best[0]):
            best = (start - free, free)
        free = max(free, stop)
    return free if best is None else best[1]
