"""The life of a value as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rewright.ir.fold import ranges
from rewright.report.life import Call, Life

WIDTH = 110


def render_life(life: Life) -> str:
    """One section a question: where it came from, what was made of it, kernel, bytes, why not more."""
    return "\n".join(_lines(life)) + "\n"


def _lines(life: Life) -> Iterator[str]:
    yield life.value + (f", below relative to {life.module}" if life.module else "")
    if life.heir != life.value:
        yield f"  now inside {life.heir}" if life.heir else "  not there any more"
    if life.alike:
        yield f"  alike in layers {ranges(life.alike)}"
    yield ""
    yield f"{life.born}:"
    yield f"  {life.first}"
    for event in life.events:
        yield ""
        yield f"{event.label}: {event.title}"
        yield from (f"  - {line}" for line in event.removed)
        yield from (f"  + {line}" for line in event.added)
    yield ""
    yield from _bytes(life)
    yield from _kernels(life)
    yield ""
    yield "read by:"
    yield from _listed(life.readers, "nobody")
    yield ""
    yield "why not fused further:"
    yield from _listed(life.whys, "no rule nearly matched here, and no kernel refused")


def _bytes(life: Life) -> Iterator[str]:
    if life.last is None:
        return
    amounts = {kind: n for kind, n in life.moved.by_kind.items() if n}
    total = sum(amounts.values())
    parts = ", ".join(f"{kind} {n:,}" for kind, n in amounts.items())
    yield f"bytes of a step: {total:,} ({parts}), {life.moved.flops:,} operations"


def _kernels(life: Life) -> Iterator[str]:
    if not life.target:
        yield f"kernel: none, {life.no_plan}"
        return
    if not life.calls:
        yield f"kernel of {life.target}: none, it is another value's bytes under a new shape"
        return
    by_phase: dict[str, list[Call]] = {}
    for call in life.calls:
        by_phase.setdefault(call.phase, []).append(call)
    for phase, calls in by_phase.items():
        symbols = " + ".join(call.symbol for call in calls)
        places = ", ".join(str(call.place) for call in calls)
        moved = sum(call.bytes for call in calls)
        yield f"kernel of {life.target}: {symbols} (launch {places}; {moved:,} bytes)"
        yield f"  phase {phase}"
        units = [u for u in calls[0].units if u != phase]
        yield from (f"  with {unit}" for unit in units)


def _listed(lines: Iterable[str], otherwise: str) -> Iterator[str]:
    found = list(lines)
    for line in found or [otherwise]:
        yield from textwrap.wrap(
            line,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
