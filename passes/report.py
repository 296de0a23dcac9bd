"""What the passes did to one graph: matches, near misses, nodes, bytes, time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rewright.passes.match import Miss


@dataclass(frozen=True, slots=True)
class Size:
    """How large a graph is.

    Attributes:
        nodes: op nodes.
        activation_reads: bytes of activations read in one step.
        activation_writes: bytes of activations written in one step.
        weight_reads: bytes of weights and constants read in one step.
    """

    nodes: int
    activation_reads: int
    activation_writes: int
    weight_reads: int

    def to_json(self) -> dict[str, int]:
        return {
            "nodes": self.nodes,
            "activation_bytes_read": self.activation_reads,
            "activation_bytes_written": self.activation_writes,
            "weight_bytes_read": self.weight_reads,
        }


@dataclass(frozen=True)
class RuleReport:
    """One rule of a pass.

    Attributes:
        name: the rule.
        matches: places rewritten.
        expected: places that had to be rewritten; None where nothing is expected.
        misses: places that nearly matched.
    """

    name: str
    matches: int
    expected: int | None
    misses: tuple[Miss, ...] = ()

    @property
    def near(self) -> tuple[Miss, ...]:
        """Misses at places that look like the rule's: more than their first node had matched."""
        return tuple(m for m in self.misses if m.depth > 1)


@dataclass(frozen=True)
class PassReport:
    """One pass over one graph.

    Attributes:
        name, stage: of the pass.
        enabled: whether it ran.
        rules: its rules in order.
        before, after: size of the graph; equal where the pass did not run.
        seconds: time of the rewriting, without verification. Not part of `to_json`, which is the
            same for every compilation of the same input.
        verify_seconds: time of the verification behind it.
    """

    name: str
    stage: str
    enabled: bool
    rules: tuple[RuleReport, ...]
    before: Size
    after: Size
    seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def matches(self) -> int:
        return sum(rule.matches for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "stage": self.stage,
            "enabled": self.enabled,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "rules": [
                {
                    "name": rule.name,
                    "matches": rule.matches,
                    "expected": rule.expected,
                    "near_misses": [
                        {"anchor": m.anchor, "node": m.node, "reason": m.reason} for m in rule.near
                    ],
                }
                for rule in self.rules
            ],
        }


@dataclass(frozen=True)
class Report:
    """All passes over one graph, and the attributes that say which graph it is."""

    graph: str
    attrs: Mapping[str, Any]
    passes: tuple[PassReport, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "rewright.passes",
            "graph": self.graph,
            "attrs": dict(self.attrs),
            "passes": [p.to_json() for p in self.passes],
        }


def render(report: Report, *, misses: bool = True, times: bool = True) -> str:
    """The report as a table, near misses grouped by reason below it.

    Args:
        report: the report.
        misses: whether to list near misses.
        times: whether to show a column of milliseconds.
    """
    head = ["pass", "matches", "near", "nodes", "act. read", "act. written", "weights read"]
    rows = [head + (["ms"] if times else [])]
    if report.passes:
        rows.append(["", "", "", *_size(report.passes[0].before), *([""] if times else [])])
    for p in report.passes:
        near = sum(len(rule.near) for rule in p.rules)
        counts = [str(p.matches), str(near or "-")] if p.enabled else ["off", ""]
        rows.append([p.name, *counts, *_size(p.after), *([f"{1e3 * p.seconds:.0f}"] if times else [])])
    text = f"{report.graph}\n" + _table(rows)
    if misses and (lines := list(_near_misses(report))):
        text += "\nnear misses\n" + "\n".join(lines) + "\n"
    return text


def render_line(report: Report) -> str:
    """One line: nodes before and after all passes."""
    if not report.passes:
        return f"{report.graph}: no pass ran"
    before, after = report.passes[0].before, report.passes[-1].after
    moved = after.activation_reads + after.activation_writes
    return f"{report.graph}: {before.nodes:,} -> {after.nodes:,} nodes, {moved:,} bytes of activations"


def _size(size: Size) -> list[str]:
    values = (size.nodes, size.activation_reads, size.activation_writes, size.weight_reads)
    return [f"{value:,}" for value in values]


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _near_misses(report: Report) -> list[str]:
    lines = []
    for p in report.passes:
        for rule in p.rules:
            grouped: Counter[tuple[str, str]] = Counter()
            for miss in rule.near:
                grouped[_anywhere(miss.anchor), _anywhere(miss.reason)] += 1
            for (anchor, reason), count in grouped.items():
                times = f" ({count} times)" if count > 1 else ""
                lines.append(f"  {p.name}/{rule.name} at {anchor}: {reason}{times}")
    return lines


def _anywhere(text: str) -> str:
    """The text with layer numbers left open, so that equal layers group."""
    return re.sub(r"\blayers\.\d+\b", "layers.*", text)
