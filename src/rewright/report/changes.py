"""What happened from one graph to the next, as JSON: the blocks of a graph diff with their nodes."""

from __future__ import annotations

from typing import Any

from rewright.ir.diff import GraphDiff
from rewright.ir.diff_blocks import Block, blocks_of
from rewright.ir.diff_bytes import Ledger
from rewright.ir.fold import fold_layers
from rewright.report.records import Records, moved_json


def changes_json(diff: GraphDiff, records: Records, context: int | None = None) -> dict[str, Any]:
    """The parts of a step, and what they are together.

        nodes       {before, after}: op nodes
        bytes       {before, after}: of one step, by kind and in all
        unchanged   bytes saved by nodes that are alike in both, for operands of other types
        parts       [{title, module, removed, added, saved, alike}]: records of the nodes of both graphs;
                    saved as bytes. Of parts that are alike in several layers the first has the places
                    of the others in `alike`, and those have null

    Args:
        diff: the diff.
        records: has the nodes of both graphs.
        context: tokens of the sequence after the step; by default each graph's capacity.
    """
    ledger = Ledger(diff, context)
    blocks = blocks_of(diff, ledger)
    place = {id(block): at for at, block in enumerate(blocks)}
    parts = [_part(block, records) for block in blocks]
    for one in fold_layers(blocks, lambda b: b.module, repr):
        parts[place[id(one.item)]]["alike"] = [place[id(other)] for other in one.rest]
    total = ledger.total()
    return {
        "nodes": {"before": total.nodes_before, "after": total.nodes_after},
        "bytes": {"before": moved_json(total.before), "after": moved_json(total.after)},
        "unchanged": moved_json(ledger.unchanged().saved),
        "parts": parts,
    }


def _part(block: Block, records: Records) -> dict[str, Any]:
    return {
        "title": block.lines[0].removeprefix("~ ").removeprefix("- ").removeprefix("+ "),
        "module": block.module,
        "removed": records.of(*block.removed),
        "added": records.of(*block.added),
        "saved": moved_json(block.balance.saved),
        "alike": None,
    }
