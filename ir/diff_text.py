"""A graph diff as text: the differences themselves, or what they add up to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from rewright.ir.diff import Aspect, Change, GraphDiff
from rewright.ir.graph import Graph, kind_of, name_of, type_of_value
from rewright.ir.names import relative
from rewright.ir.op import op_of
from rewright.ir.printer import print_node
from rewright.ir.traffic import traffic


def render(diff: GraphDiff) -> str:
    """Header, leaves, op nodes under their modules, outputs; `-` removed, `+` added, `~` changed.

    A changed op is named with the aspects that differ, and both its lines follow.
    """
    sections = [
        [_aspect_line(a) for a in diff.header],
        [line for change in diff.leaves for line in _leaf_lines(change)],
    ]
    for module, changes in diff.modules().items():
        lines = [line for change in changes for line in _node_lines(change, module)]
        sections.append([f"{module or '.'}:", *("  " + line for line in lines)])
    sections.append([_aspect_line(a) for a in diff.outputs])
    if diff.empty:
        sections.append(["no difference in structure"])
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _aspect_line(aspect: Aspect) -> str:
    return f"~ {aspect.name}: {_json(aspect.before)} -> {_json(aspect.after)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _leaf_lines(change: Change) -> Iterator[str]:
    if change.before is None or change.after is None:
        sign = "-" if change.after is None else "+"
        yield f"{sign} {_leaf(change.node)} : {type_of_value(change.node)}"
        return
    # The kind stands in front of the name already; its own change is said like any other.
    differences = ", ".join(
        f"{a.before} -> {a.after}" if a.name == "type" else f"{a.name} {a.before or '.'} -> {a.after or '.'}"
        for a in sorted(change.aspects, key=lambda a: a.name != "type")
    )
    yield f"~ {_leaf(change.node)} : {differences}"


def _leaf(node: Node) -> str:
    sigil = "@" if kind_of(node) in ("weight", "constant") else "%"
    return f"{kind_of(node)} {sigil}{name_of(node)}"


def _node_lines(change: Change, heading: str) -> Iterator[str]:
    indent = ""
    if change.how == "changed":
        yield f"~ %{relative(change.name, heading)}: {', '.join(a.name for a in change.aspects)}"
        indent = "  "
    # Under one heading, so that a moved node's two lines differ in what differs, not in every name.
    if change.before is not None:
        yield f"{indent}- {print_node(change.before, heading)}"
    if change.after is not None:
        yield f"{indent}+ {print_node(change.after, heading)}"


@dataclass(frozen=True)
class StatRow:
    """A number that two graphs have each."""

    label: str
    before: int
    after: int


def stat_rows(diff: GraphDiff, context: int | None = None) -> list[StatRow]:
    """Op counts by op name, their sum, and the bytes of one step.

    Args:
        diff: the diff.
        context: tokens of the sequence after the step; by default each variant's capacity.
    """
    before, after = _totals(diff.before, context), _totals(diff.after, context)
    counts = _op_counts(diff.before), _op_counts(diff.after)
    rows = [StatRow(name, counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])]
    return rows + [StatRow(label, before[label], after[label]) for label in before]


def render_stat(diff: GraphDiff, context: int | None = None) -> str:
    """`stat_rows` as a table with the difference in the last column."""
    cells = [("", "before", "after", "delta")]
    for row in stat_rows(diff, context):
        delta = row.after - row.before
        cells.append((row.label, f"{row.before:,}", f"{row.after:,}", f"{delta:+,}" if delta else "="))
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = []
    for label, *numbers in cells:
        columns = [label.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join(columns))
    return "\n".join(lines) + "\n"


def _op_counts(graph: Graph) -> Counter[str]:
    return Counter(op_of(node.target).name for node in graph.ops)


def _totals(graph: Graph, context: int | None) -> dict[str, int]:
    """The rows below the op counts. Bytes read and written are split so that they add up to all traffic."""
    moved = traffic(graph, context)
    return {
        "nodes": len(graph.ops),
        "weight bytes resident": sum(moved.resident.values()),
        "weight bytes read": moved.reads["weight"],
        "constant bytes read": moved.reads["constant"],
        "state bytes read": moved.reads["state"],
        "activation bytes read": moved.reads["input"] + moved.reads["op"],
        "bytes written": moved.written,
        "flops": moved.flops,
    }
