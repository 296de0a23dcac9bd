"""A graph diff as JSON. Lists are sorted by name, so that they do not depend on the order of nodes.

    format          "rewright.graph-diff"
    ir              version of the graph language
    before, after   {name, stage, attrs} of the two graphs
    module          the part that is compared, "" for all of it
    context         {before, after}: tokens of the sequence after the step, for which bytes are given
    empty           whether the structure is the same
    header          [{name, before, after}]
    leaves, nodes   {removed, added, changed}: records of the first two, of the last
                    [{name, kind, module, aspects: [{name, before, after}]}]
    outputs         [{name, before, after}]; a name is "return RESULT" or "next STATE"
    rewrites        [{rule, how, module, removed, added, bytes}]: which op nodes stand for which, by the
                    names of their first results; how is applied, undone or differs. What no rewrite
                    names is in `nodes` only
    instead         {value: value}: what the readers of a value that is gone read now
    modules         {module: {nodes, bytes}} of the rewrites and other changes under it
    totals          {nodes, bytes} of all op nodes

The record of a leaf is {name, type, kind, module}, that of an op as in `export.json_graph` without
its cost. An aspect's before or after is null where that side has nothing. `nodes` of modules and
totals is {before, after}, a count; `bytes` is {before, after}, each
{activation_read, activation_written, weight_read, constant_read, state_read, state_written}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewright.ir.diff import Aspect, Change, GraphDiff, leaf_record
from rewright.ir.diff_bytes import Balance, Ledger
from rewright.ir.export.json_graph import op_record
from rewright.ir.graph import IR_VERSION, Graph
from rewright.ir.leftovers import Leftovers
from rewright.ir.rewrites import Rewrite


def to_json(diff: GraphDiff, context: int | None = None) -> dict[str, Any]:
    """The diff as the JSON document described above.

    Args:
        diff: the diff.
        context: tokens of the sequence after the step; by default each variant's capacity.
    """
    ledger = Ledger(diff, context)
    rewrites = [_rewrite(r, ledger.of(r)) for r in diff.rewrites]
    return {
        "format": "rewright.graph-diff",
        "ir": IR_VERSION,
        "before": _header(diff.before),
        "after": _header(diff.after),
        "module": diff.module,
        "context": {"before": ledger.before.context, "after": ledger.after.context},
        "empty": diff.empty,
        "header": _aspects(diff.header),
        "leaves": _changes(diff.leaves),
        "nodes": _changes(diff.nodes),
        "outputs": _aspects(diff.outputs),
        "rewrites": sorted(rewrites, key=lambda r: (r["module"], r["added"])),
        "instead": Leftovers(diff).instead,
        "modules": {module: balance_json(balance) for module, balance in ledger.modules().items()},
        "totals": balance_json(ledger.total()),
    }


def balance_json(balance: Balance) -> dict[str, Any]:
    """{nodes: {before, after}, bytes: {before, after}}, bytes by kind."""
    return {
        "nodes": {"before": balance.nodes_before, "after": balance.nodes_after},
        "bytes": {"before": balance.before.bytes, "after": balance.after.bytes},
    }


def _header(graph: Graph) -> dict[str, Any]:
    return {"name": graph.name, "stage": graph.stage, "attrs": dict(graph.attrs)}


def _rewrite(rewrite: Rewrite, balance: Balance) -> dict[str, Any]:
    return {
        "rule": rewrite.rule,
        "how": rewrite.how,
        "module": rewrite.module,
        "removed": sorted(n.meta["names"][0] for n in rewrite.removed),
        "added": sorted(n.meta["names"][0] for n in rewrite.added),
        "bytes": balance_json(balance)["bytes"],
    }


def _changes(changes: Sequence[Change]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {"removed": [], "added": [], "changed": []}
    for change in sorted(changes, key=lambda c: c.name):
        if change.how == "changed":
            entry: dict[str, Any] = {"name": change.name, "kind": change.kind, "module": change.module}
            entry["aspects"] = _aspects(change.aspects)
        else:
            entry = op_record(change.node) if change.kind == "op" else leaf_record(change.node)
        groups[change.how].append(entry)
    return groups


def _aspects(aspects: Sequence[Aspect]) -> list[dict[str, Any]]:
    return [{"name": a.name, "before": a.before, "after": a.after} for a in aspects]
