"""Drawings: readers stand below what they read, boxes never overlap, equal graphs give equal drawings."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
import pytest

from rewright.report.layout import GAP_X, HEIGHT, WIDTH, place


def random_edges(count: int, seed: int) -> list[tuple[int, int]]:
    graph = nx.gnp_random_graph(count, 2.5 / count, seed=seed, directed=True)
    return sorted((min(e), max(e)) for e in graph.edges if e[0] != e[1])


@pytest.mark.parametrize("seed", range(8))
def test_readers_stand_below_and_boxes_apart(seed: int) -> None:
    edges = list(dict.fromkeys(random_edges(30, seed)))
    drawn = place(30, edges)
    boxes = drawn["boxes"]
    for start, end in edges:
        assert boxes[start][1] + HEIGHT < boxes[end][1]
    for (ax, ay), (bx, by) in combinations(boxes, 2):
        assert ay != by or abs(ax - bx) >= WIDTH + GAP_X - 1
    assert min(x for x, _ in boxes) >= 0
    assert max(x for x, _ in boxes) + WIDTH <= drawn["w"]
    assert max(y for _, y in boxes) + HEIGHT == drawn["h"]


def test_a_line_passes_between_the_boxes() -> None:
    drawn = place(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    (line,) = [through for start, end, through in drawn["lines"] if (start, end) == (0, 3)]
    assert [y for _, y in line] == [drawn["boxes"][1][1], drawn["boxes"][2][1]]
    for x, y in line:
        assert all(by != y or not bx <= x <= bx + WIDTH for bx, by in drawn["boxes"])


def test_a_source_stands_above_its_first_reader() -> None:
    drawn = place(4, [(0, 1), (1, 2), (3, 2)], sources=[3])
    assert drawn["boxes"][3][1] == drawn["boxes"][1][1]


def test_a_ladder_has_no_crossings() -> None:
    """Two chains given in turns are drawn side by side."""
    edges = [(i, i + 2) for i in range(8)]
    boxes = place(10, edges)["boxes"]
    assert len({boxes[i][0] < boxes[i + 1][0] for i in range(0, 10, 2)}) == 1


def test_nothing_to_draw() -> None:
    assert place(0, [])["boxes"] == []
    assert place(1, [])["boxes"] == [[0, 0]]


def test_equal_graphs_give_equal_drawings() -> None:
    edges = list(dict.fromkeys(random_edges(30, 3)))
    assert place(30, edges) == place(30, edges)
