"""A graph diff as text: what each rewrite made of which nodes, and whatever else differs.

`-` is gone, `+` is new, `~` is changed or tells what the lines indented below it are about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Node

from rewright.ir.diff import Aspect, Change, GraphDiff
from rewright.ir.diff_blocks import Block, blocks_of, saved_text
from rewright.ir.diff_bytes import Balance, Ledger
from rewright.ir.fold import Alike, fold_layers, ranges
from rewright.ir.graph import kind_of, name_of, type_of_value


def render(diff: GraphDiff, context: int | None = None, *, fold: bool = True) -> str:
    """Header, totals, leaves, blocks under their modules, outputs.

    Args:
        diff: the diff.
        context: tokens of the sequence after the step, for bytes; by default each variant's capacity.
        fold: whether what is alike in several layers is said once.
    """
    ledger = Ledger(diff, context)
    sections = [
        [_aspect_line(a) for a in diff.header],
        _summary(ledger),
        _folded_lines([line for change in diff.leaves for line in _leaf_lines(change)], fold),
        *_sections(blocks_of(diff, ledger), fold),
        _unchanged(ledger),
        _folded_lines([_aspect_line(a) for a in diff.outputs], fold),
    ]
    if diff.empty:
        sections.append(["no difference in structure"])
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _aspect_line(aspect: Aspect) -> str:
    return f"~ {aspect.name}: {_json(aspect.before)} -> {_json(aspect.after)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _summary(ledger: Ledger) -> list[str]:
    """Numbers of nodes and bytes, as far as they differ."""
    total = ledger.total()
    contexts = " and ".join(f"{c:,}" for c in dict.fromkeys((ledger.before.context, ledger.after.context)))
    numbers = [("op nodes", total.nodes_before, total.nodes_after)]
    before, after = total.before.by_kind, total.after.by_kind
    numbers += [
        (f"{kind} bytes of a step at context {contexts}", before[kind], after[kind]) for kind in before
    ]
    return [f"~ {label}: {a:,} -> {b:,} ({b - a:+,})" for label, a, b in numbers if a != b]


def _unchanged(ledger: Ledger) -> list[str]:
    """What the headings lack towards the totals."""
    saved = saved_text(ledger.unchanged().saved)
    return [f"~ unchanged nodes, for operands of other types or another context: {saved}"] if saved else []


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


def _folded_lines(lines: Sequence[str], folded: bool) -> list[str]:
    if not folded:
        return list(lines)
    return [alike.item + _also(alike) for alike in fold_layers(lines, where=str, text=str)]


def _also(alike: Alike[Any]) -> str:
    if not alike.others:
        return ""
    return f" (alike in {'layers' if len(alike.others) > 1 else 'layer'} {ranges(alike.others)})"


def _sections(blocks: Sequence[Block], folded: bool) -> Iterator[list[str]]:
    """Blocks under headings. Folded, blocks that the same layers have stand together."""
    alike = fold_layers(blocks, lambda b: b.module, repr) if folded else [Alike(block) for block in blocks]
    sections: dict[Any, list[Alike[Block]]] = {}
    for one in alike:
        sections.setdefault((one.item.module, one.others), []).append(one)
    for (module, others), members in sections.items():
        saved = saved_text(sum((m.item.balance for m in members), start=Balance()).saved)
        if any(m.item.lines[0].endswith(saved) for m in members):
            saved = ""  # one block says it all
        each = "each " if others and saved else ""
        yield [
            f"{module or '.'}{_also(members[0])}: {each}{saved}".rstrip(),
            *("  " + line for m in members for line in m.item.lines),
        ]
