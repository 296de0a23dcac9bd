"""Where the memory of a plan goes: weights by component, state by kind, the arena at its peak."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rewright.ir.layout import stored_bytes
from rewright.ir.plan import Launch, Plan

WEIGHTS = (
    ("routed experts", r"\.experts\."),
    ("shared experts", r"\.shared_experts\."),
    ("gates", r"\.gate\."),
    ("indexers", r"\.indexer\."),
    ("compressors", r"\.compressor\."),
    ("attention", r"\.attn\."),
    ("hyper-connections", r"(^|\.)hc_"),
    ("embedding", r"^embed\."),
    ("head", r"^head\."),
    ("RoPE tables", r"^rope\."),
)
"""Components with a pattern for the names of their weights; the first that fits counts."""

STATES = (
    ("window rings", r"\.window$"),
    ("compressor rings", r"_ring$"),
    ("index keys", r"\.indexer\..*cache$"),
    ("compressed entries", r"\.cache$"),
)
"""Kinds of state, likewise."""

OTHER = "other"
LARGEST = 5
"""Values of the peak that a table lists."""


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Bytes of one plan.

    Attributes:
        weights: by component.
        state: by kind.
        arena: of the whole arena.
        peak: of the values and working memory that are alive in the fullest launch; what the arena
            has more is lost between them.
        peak_phase: the phase of that launch.
        largest: the largest of those values.
    """

    weights: Mapping[str, int]
    state: Mapping[str, int]
    arena: int
    peak: int
    peak_phase: str
    largest: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + sum(self.state.values()) + self.arena


def memory_table(plan: Plan) -> MemoryTable:
    """The table of a plan."""
    weights, states = Counter[str](), Counter[str]()
    offsets: set[int] = set()
    for name, place in plan.values.items():
        if place.space == "weight":
            weights[_component(name, WEIGHTS)] += place.type.nbytes
        elif place.space == "state" and place.offset not in offsets:
            offsets.add(place.offset)  # old and next values of a state lie in one place
            states[_component(name, STATES)] += stored_bytes(place.type)
    alive = _alive(plan)
    peak = max(range(len(alive)), key=lambda at: sum(alive[at].values()), default=None)
    fullest = {} if peak is None else alive[peak]
    ranked = sorted(fullest.items(), key=lambda item: (-item[1], item[0]))
    return MemoryTable(
        weights=_in_order(weights, WEIGHTS),
        state=_in_order(states, STATES),
        arena=plan.arena_bytes,
        peak=sum(fullest.values()),
        peak_phase="" if peak is None else plan.launches[peak].phase,
        largest=tuple(ranked[:LARGEST]),
    )


def _component(name: str, components: Iterable[tuple[str, str]]) -> str:
    return next((component for component, pattern in components if re.search(pattern, name)), OTHER)


def _in_order(found: Mapping[str, int], components: Sequence[tuple[str, str]]) -> dict[str, int]:
    names = [*(component for component, _ in components), OTHER]
    return {name: found[name] for name in names if name in found}


def _alive(plan: Plan) -> list[dict[str, int]]:
    """Bytes of the values that each launch must keep, by name, its working memory included."""
    alive: list[dict[str, int]] = [
        {f"workspace of {launch.phase}": launch.workspace[1]} if launch.workspace[1] else {}
        for launch in plan.launches
    ]
    for value, (first, last) in _spans(plan).items():
        for at in range(first, last + 1):
            alive[at][value] = stored_bytes(plan.values[value].type)
    return alive


def _spans(plan: Plan) -> dict[str, tuple[int, int]]:
    """First and last launch in which each value of the arena is needed. An alias has no writer: it stands
    for the value that was last written where it lies."""
    spans: dict[str, tuple[int, int]] = {}
    holder: dict[int, str] = {}

    def need(value: str, at: int) -> None:
        place = plan.values[value]
        if place.space == "arena":
            first, last = spans[holder[place.offset]]
            spans[holder[place.offset]] = (first, max(last, at))

    for at, launch in enumerate(plan.launches):
        for value in _read(launch):
            need(value, at)
        for value in launch.writes:
            if plan.values[value].space == "arena":
                holder[plan.values[value].offset] = value
                spans[value] = (at, at)
    for value in plan.results.values():
        need(value, len(plan.launches) - 1)
    return spans


def _read(launch: Launch) -> list[str]:
    return [value for value in launch.reads if value is not None]


def render(tables: Mapping[str, MemoryTable]) -> str:
    """Tables side by side, one column for each, sizes in MB of 1e6 bytes.

    Args:
        tables: by the heading of their column.
    """
    rows: list[tuple[str, list[str]]] = []
    for title, part in (("weights", "weights"), ("state", "state")):
        names = dict.fromkeys(name for table in tables.values() for name in getattr(table, part))
        rows += [(f"{title}: {n}", [_mb(getattr(t, part).get(n, 0)) for t in tables.values()]) for n in names]
    rows.append(("arena", [_mb(t.arena) for t in tables.values()]))
    rows.append(("arena, alive at the peak", [_mb(t.peak) for t in tables.values()]))
    rows.append(("total", [_mb(t.total) for t in tables.values()]))
    lines = _aligned([("MB", list(tables)), *rows])
    for heading, table in tables.items():
        lines += ["", f"peak of {heading}: {table.peak_phase}"]
        lines += [f"  {_mb(size):>10}  {name}" for name, size in table.largest]
    return "\n".join(lines) + "\n"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f}"


def _aligned(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    label = max(len(name) for name, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    return [
        "  ".join([name.ljust(label), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]).rstrip()
        for name, cells in rows
    ]
