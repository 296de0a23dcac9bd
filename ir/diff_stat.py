"""What a graph diff adds up to: op counts, bytes of one step, and what each rule did to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from rewright.ir.amax import amax_reductions
from rewright.ir.diff import Change, GraphDiff
from rewright.ir.diff_bytes import Balance, Ledger
from rewright.ir.diff_json import balance_json
from rewright.ir.graph import Graph, type_of_value
from rewright.ir.leftovers import Leftovers
from rewright.ir.moved import Moved
from rewright.ir.op import op_of

UNCHANGED = "(unchanged nodes)"


@dataclass(frozen=True)
class StatRow:
    """A number that two graphs have each."""

    label: str
    before: int
    after: int


@dataclass(frozen=True)
class RuleRow:
    """What one rule did, or one sort of other change.

    Attributes:
        label: the rule, "RULE undone" or "RULE differs"; in parentheses what no rule did.
        places: how many rewrites or changed nodes.
        balance: nodes and bytes before and after.
    """

    label: str
    places: int
    balance: Balance


def stat_rows(diff: GraphDiff, context: int | None = None) -> list[StatRow]:
    """Op counts by op name, their sum, and the bytes and operations of one step.

    Args:
        diff: the diff.
        context: tokens of the sequence after the step; by default each variant's capacity.
    """
    ops = diff.ops(diff.before), diff.ops(diff.after)
    counts = [Counter(op_of(n.target).name for n in nodes) for nodes in ops]
    rows = [StatRow(name, counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])]
    total = Ledger(diff, context).total()
    before, after = _totals(total.before), _totals(total.after)
    rows.append(StatRow("nodes", total.nodes_before, total.nodes_after))
    rows.append(StatRow("amax reductions", *map(amax_reductions, ops)))
    resident = [
        _resident(diff, graph, nodes) for graph, nodes in zip((diff.before, diff.after), ops, strict=True)
    ]
    rows.append(StatRow("weight bytes resident", *resident))
    return rows + [StatRow(label, before[label], after[label]) for label in before]


def rule_rows(diff: GraphDiff, context: int | None = None) -> list[RuleRow]:
    """What each rule did, most bytes saved first, then all else that changed.

    The balances add up to the difference of the two graphs. Arguments as of `stat_rows`.
    """
    ledger, leftovers = Ledger(diff, context), Leftovers(diff)
    groups: dict[str, list[Any]] = {}
    for rewrite in diff.rewrites:
        label = rewrite.rule if rewrite.how == "applied" else f"{rewrite.rule} {rewrite.how}"
        groups.setdefault(label, []).append(rewrite)
    rows = [RuleRow(label, len(parts), ledger.of(*parts)) for label, parts in groups.items()]
    rows.sort(key=lambda row: (-row.balance.saved.by_kind["activation"], row.label))
    others: dict[str, list[Change]] = {}
    for change in sorted(diff.rest, key=lambda c: _SORTS.index(_sort(c, leftovers))):
        others.setdefault(_sort(change, leftovers), []).append(change)
    rows += [RuleRow(label, len(parts), ledger.of(*parts)) for label, parts in others.items()]
    unchanged = ledger.unchanged()
    if unchanged.saved != Moved():
        rows.append(RuleRow(UNCHANGED, unchanged.nodes_before, unchanged))
    return rows


def render_stat(diff: GraphDiff, context: int | None = None) -> str:
    """`stat_rows` as a table with the difference in the last column, and `rule_rows` as a second one."""
    cells = [("", "before", "after", "delta")]
    for row in stat_rows(diff, context):
        delta = row.after - row.before
        cells.append((row.label, f"{row.before:,}", f"{row.after:,}", f"{delta:+,}" if delta else "="))
    tables = [_table(cells)]
    if rules := rule_rows(diff, context):
        tables.append(_table(_rule_cells(rules)))
    return "\n".join(tables)


def stat_json(diff: GraphDiff, context: int | None = None) -> dict[str, Any]:
    """The statistics as JSON.

    LABEL   {before, after} for every label of `stat_rows`: ops by name, nodes, bytes, flops
    rules   {LABEL: {places, nodes, bytes}} for every label of `rule_rows`; nodes and bytes are
            {before, after} as in `diff_json`
    """
    rows = {row.label: {"before": row.before, "after": row.after} for row in stat_rows(diff, context)}
    rules = {r.label: {"places": r.places, **balance_json(r.balance)} for r in rule_rows(diff, context)}
    return {**rows, "rules": rules}


_SORTS = ("(another value is read)", "(read by nobody)", "(other changes)")


def _sort(change: Change, leftovers: Leftovers) -> str:
    return {"replaced": _SORTS[0], "unread": _SORTS[1], None: _SORTS[2]}[leftovers.why(change)]


def _totals(moved: Moved) -> dict[str, int]:
    """The rows below the op counts; bytes read and written add up to all traffic."""
    return {
        "weight bytes read": moved.weight_read,
        "constant bytes read": moved.constant_read,
        "state bytes read": moved.state_read,
        "state bytes written": moved.state_written,
        "activation bytes read": moved.activation_read,
        "activation bytes written": moved.activation_written,
        "flops": moved.flops,
    }


def _resident(diff: GraphDiff, graph: Graph, ops: Sequence[Node]) -> int:
    """Bytes of all weights, in a part of those that its ops read."""
    weights = graph.of_kind("weight")
    if diff.module:
        read = {v for n in ops for v in n.all_input_nodes}
        weights = [w for w in weights if w in read]
    return sum(type_of_value(w).nbytes for w in weights)


def _rule_cells(rows: Sequence[RuleRow]) -> list[tuple[str, ...]]:
    """Rows and their sum; of the bytes saved only the kinds that change anywhere."""
    saved = [row.balance.saved.by_kind for row in rows]
    kinds = [kind for kind in Moved().by_kind if any(amounts[kind] for amounts in saved)]
    header = ("rule", "places", "nodes", "", "", *(f"{kind} bytes saved" for kind in kinds))
    cells: list[tuple[str, ...]] = [header]
    total = Balance()
    for row, amounts in zip(rows, saved, strict=True):
        total += row.balance
        cells.append(
            (row.label, f"{row.places:,}", *_nodes(row.balance), *(f"{amounts[k]:,}" for k in kinds))
        )
    sums = total.saved.by_kind
    return [*cells, ("all", "", *_nodes(total), *(f"{sums[k]:,}" for k in kinds))]


def _nodes(balance: Balance) -> tuple[str, str, str]:
    return f"{balance.nodes_before:,}", "->", f"{balance.nodes_after:,}"


def _table(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for label, *numbers in cells:
        columns = [label.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join(columns))
    return "\n".join(lines) + "\n"
