"""Where the boxes of a small graph stand: rows from top to bottom, readers below what they read.

Rows are the topological generations that networkx finds. Within a row boxes are sorted by the middle of
their neighbours, again and again, which undoes most crossings. A line that passes a row has a place in
it, so that it goes between the boxes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx

WIDTH, HEIGHT = 232, 84
GAP_X, GAP_Y = 22, 46
LINE_WIDTH = 14
SWEEPS = 12

Edge = tuple[int, int]
Point = int | tuple[Edge, int]
"""A box, or the place of a line in a row that it passes."""


def place(count: int, edges: Sequence[Edge], sources: Sequence[int] = ()) -> dict[str, Any]:
    """Coordinates of boxes and lines.

    Args:
        count: boxes, numbered from 0 in an order of execution.
        edges: (from, to), each once.
        sources: boxes for values from outside: they stand right above their first reader.

    Returns:
        {w, h, boxes: [[x, y]], lines: [[from, to, [[x, y], ...]]]}: left upper corners, and the places
        that a line passes on its way.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edges)
    rank = {n: i for i, row in enumerate(nx.topological_generations(graph)) for n in row}
    for source in sources:
        rank[source] = max(0, min((rank[reader] for reader in graph.successors(source)), default=1) - 1)
    rows: list[list[Point]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for box in range(count):
        rows[rank[box]].append(box)
    paths = {edge: list(_path(edge, rank)) for edge in edges}
    for path in paths.values():
        for at, point in enumerate(path[1:-1], 1):
            rows[rank[int(path[0])] + at].append(point)  # type: ignore[arg-type]
    above, below = _neighbours(paths.values())
    _untangle(rows, above, below)
    x = _columns(rows, above, below)
    left = min((x[p] - _half(p) for row in rows for p in row), default=0)
    right = max((x[p] + _half(p) for row in rows for p in row), default=0)

    def corner(box: int) -> list[int]:
        return [round(x[box] - WIDTH / 2 - left), rank[box] * (HEIGHT + GAP_Y)]

    def passes(edge: Edge) -> list[list[int]]:
        first = rank[edge[0]]
        middle = [(x[p], first + i) for i, p in enumerate(paths[edge]) if not isinstance(p, int)]
        return [[round(at - left), row * (HEIGHT + GAP_Y)] for at, row in middle]

    return {
        "w": round(right - left),
        "h": max(0, len(rows) * (HEIGHT + GAP_Y) - GAP_Y),
        "boxes": [corner(box) for box in range(count)],
        "lines": [[*edge, passes(edge)] for edge in edges],
    }


def _path(edge: Edge, rank: Mapping[int, int]) -> Iterator[Point]:
    yield edge[0]
    yield from ((edge, row) for row in range(rank[edge[0]] + 1, rank[edge[1]]))
    yield edge[1]


Neighbours = dict[Point, list[Point]]


def _neighbours(paths: Any) -> tuple[Neighbours, Neighbours]:
    above: Neighbours = {}
    below: Neighbours = {}
    for path in paths:
        for upper, lower in itertools.pairwise(path):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def _untangle(rows: list[list[Point]], above: Neighbours, below: Neighbours) -> None:
    """Sort every row by the middle of its neighbours, downwards and upwards; the best order stays."""
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(SWEEPS):
        neighbours, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        previous: Sequence[Point] = ()
        for row in order:
            at = {p: i for i, p in enumerate(previous)}
            here = {p: i for i, p in enumerate(row)}
            row.sort(key=_middle(neighbours, at, here))
            previous = row
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _middle(
    neighbours: Neighbours, at: Mapping[Point, int], here: Mapping[Point, int]
) -> Callable[[Point], float]:
    scale = max(1, len(at)) / max(1, len(here))

    def key(point: Point) -> float:
        places = [at[n] for n in neighbours.get(point, ()) if n in at]
        return statistics.fmean(places) if places else here[point] * scale

    return key


def _crossings(rows: Sequence[Sequence[Point]], below: Neighbours) -> int:
    total = 0
    for upper, lower in itertools.pairwise(rows):
        at = {p: i for i, p in enumerate(lower)}
        ends = [e for p in upper for e in sorted(at[n] for n in below.get(p, ()) if n in at)]
        total += sum(1 for i, a in enumerate(ends) for b in ends[i + 1 :] if a > b)
    return total


def _half(point: Point) -> float:
    return (WIDTH if isinstance(point, int) else LINE_WIDTH) / 2


def _columns(rows: Sequence[Sequence[Point]], above: Neighbours, below: Neighbours) -> dict[Point, float]:
    """The middle of every point: near those of its neighbours, boxes of a row apart."""
    x: dict[Point, float] = {}
    for row in rows:
        edge = 0.0
        for point in row:
            x[point] = edge + _half(point)
            edge += 2 * _half(point) + GAP_X
        for point in row:
            x[point] -= edge / 2
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = {}
            for point in row:
                near = [x[n] for n in (*above.get(point, ()), *below.get(point, ()))]
                wanted[point] = statistics.fmean(near) if near else x[point]
            _apart(row, wanted, x)
    return x


def _apart(row: Sequence[Point], wanted: Mapping[Point, float], x: dict[Point, float]) -> None:
    """Give the points of a row the places wanted, on average, with room between them.

    Neighbours that want the same room become a block that stands where its members want it on average.
    """
    blocks: list[tuple[float, list[Point], float]] = []  # left end, members, width
    for point in row:
        members, width = [point], 2 * _half(point)
        start = wanted[point] - _half(point)
        while blocks and blocks[-1][0] + blocks[-1][2] + GAP_X > start:
            _, earlier, before = blocks.pop()
            members = [*earlier, *members]
            width = before + GAP_X + width
            start = statistics.fmean(_starts(members, wanted))
        blocks.append((start, members, width))
    for start, members, _ in blocks:
        at = start
        for point in members:
            x[point] = at + _half(point)
            at += 2 * _half(point) + GAP_X


def _starts(members: Sequence[Point], wanted: Mapping[Point, float]) -> Iterator[float]:
    """Where a block begins if each of its members stands where it wants."""
    offset = 0.0
    for point in members:
        yield wanted[point] - _half(point) - offset
        offset += 2 * _half(point) + GAP_X
