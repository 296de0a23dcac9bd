"""The life of one value: the node that first gave it, what each pass made of that, its kernel, its bytes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from rewright.codegen.apart import why_apart
from rewright.codegen.targets import TARGETS
from rewright.ir.diff import diff_graphs
from rewright.ir.diff_blocks import Block, blocks_of
from rewright.ir.diff_bytes import Ledger
from rewright.ir.errors import UsageError
from rewright.ir.export.json_graph import op_record
from rewright.ir.graph import LEAVES, Graph, kind_of, name_of, operands_of
from rewright.ir.graph_index import readers_of
from rewright.ir.launch_bytes import launch_bytes
from rewright.ir.moved import Meter, Moved
from rewright.ir.op import op_of
from rewright.ir.printer import print_node
from rewright.report.planned import node_of
from rewright.report.records import moved_json
from rewright.report.study import Study
from rewright.report.views import layer_classes


@dataclass(frozen=True)
class Event:
    """What one pass did to the node that gives the value.

    Attributes:
        label: the pass, or of a compiled model the stage.
        title: what happened, in one line.
        removed, added: lines of the nodes before and after.
    """

    label: str
    title: str
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A launch that computes the node, or a part of it.

    Attributes:
        place: its place among all launches.
        symbol, phase: of the launch.
        units: what else it computes; parts of nodes as `node/part`.
        bytes: that it moves.
    """

    place: int
    symbol: str
    phase: str
    units: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Life:
    """Everything known about a value.

    Attributes:
        value: its name.
        module: where it was first made; names in lines and titles are relative to it.
        heir: the value that stands for it at the end, itself if it is still there; None if nothing does.
        born: label of the first graph that has it.
        first: the line of the node that gave it there.
        events: what happened since.
        last: the line of the node that gives the heir in the last graph, None if there is none.
        moved: bytes of that node.
        readers: what reads the heir in the last graph: op and value of each; results and states by name.
        calls: launches that compute that node.
        target: what the plan is for, "" where there is none.
        no_plan: why there is none.
        whys: why it was not fused further.
        alike: layers that have the same, without its own.
    """

    value: str
    module: str
    heir: str | None
    born: str
    first: str
    events: tuple[Event, ...]
    last: str | None
    moved: Moved
    readers: tuple[str, ...]
    calls: tuple[Call, ...]
    target: str
    no_plan: str
    whys: tuple[str, ...]
    alike: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """The form of `rewright explain --format json`."""
        return {
            "format": "rewright.life",
            "value": self.value,
            "module": self.module,
            "heir": self.heir,
            "born": self.born,
            "first": self.first,
            "events": [
                {"by": e.label, "title": e.title, "removed": list(e.removed), "added": list(e.added)}
                for e in self.events
            ],
            "last": self.last,
            "bytes": moved_json(self.moved),
            "flops": self.moved.flops,
            "readers": list(self.readers),
            "launches": [
                {"place": c.place, "symbol": c.symbol, "phase": c.phase, "units": list(c.units)}
                | {"bytes": c.bytes}
                for c in self.calls
            ],
            "target": self.target,
            "no_plan": self.no_plan,
            "why_not_further": list(self.whys),
            "alike": list(self.alike),
        }


def life_of(study: Study, value: str, context: int | None = None) -> Life:
    """Follow a value through the graphs of a study.

    Args:
        study: the model.
        value: name of a value that any of its graphs has.
        context: tokens of the sequence after the step, for bytes; by default the capacity.

    Raises:
        UsageError: no graph has such a value.
    """
    born = next((k for k, s in enumerate(study.snapshots) if _maker(s.graph, value) is not None), None)
    if born is None:
        raise _unknown(study, value)
    first = _maker(study.snapshots[born].graph, value)
    assert first is not None
    module = first.meta["module"]
    names = set(first.meta["names"])
    events: list[Event] = []
    heir: str | None = value
    for k in range(max(born, 1), len(study.snapshots)):
        before, after = study.snapshots[k - 1].graph, study.snapshots[k].graph
        old, new = (None if heir is None else _maker(g, heir) for g in (before, after))
        if old is not None and new is not None and op_record(old) == op_record(new):
            continue
        block = _block_with(before, after, old, new, context)
        if block is None:
            continue
        names |= {name for n in (*block.removed, *block.added) for name in n.meta["names"]}
        events.append(_event(study.snapshots[k].label, block, module))
        if new is None:
            heir = _heir(block)
    last = None if heir is None else _maker(study.graph, heir)
    if last is not None:
        names |= set(last.meta["names"])
    return Life(
        value=value,
        module=module,
        heir=heir,
        born=study.snapshots[born].label,
        first=print_node(first, module),
        events=tuple(events),
        last=None if last is None else print_node(last, module),
        moved=Moved() if last is None else Meter(study.graph, context).of(last),
        readers=() if last is None else tuple(_readers(study.graph, last)),
        calls=() if last is None else tuple(_calls(study, last, context)),
        target=study.plan.target if study.plan else "",
        no_plan=study.no_plan,
        whys=tuple(dict.fromkeys(_whys(study, names, last))),
        alike=_alike(study.graph, last),
    )


def _maker(graph: Graph, value: str) -> Node | None:
    """The op node that gives a value, None where there is none of that name."""
    if value not in graph:
        return None
    node = graph.value(value)
    maker = node.args[0] if kind_of(node) == "item" else node
    return maker if isinstance(maker, Node) and kind_of(maker) == "op" else None


def _unknown(study: Study, value: str) -> UsageError:
    graph = study.graph
    if value in graph:
        leaf = graph.value(value)
        readers = [n for n in graph.ops if any(v is leaf for v in operands_of(n))]
        read = ", ".join(n.meta["names"][0] for n in readers[:3])
        return UsageError(
            f"{value} is a {kind_of(leaf)}: nothing computes it", where="NODE", fix=f"it is read by {read}"
        )
    known = {name for s in study.snapshots for n in s.graph.ops for name in n.meta["names"]}
    known |= {name_of(n) for n in graph.of_kind(*LEAVES)}
    near = [n for n in sorted(known) if n.endswith("." + value)] or difflib.get_close_matches(value, known)
    fix = f"did you mean {', '.join(near[:4])}" if near else "rewright graph dump lists the names"
    return UsageError(f"no graph of it has a value {value!r}", where="NODE", fix=fix)


def _block_with(
    before: Graph, after: Graph, old: Node | None, new: Node | None, context: int | None
) -> Block | None:
    """What happened to the old node, or made the new one."""
    diff = diff_graphs(before, after)
    for block in blocks_of(diff, Ledger(diff, context)):
        if (old is not None and old in block.removed) or (new is not None and new in block.added):
            return block
    return None


def _event(label: str, block: Block, module: str) -> Event:
    removed, added = (tuple(print_node(n, module) for n in side) for side in (block.removed, block.added))
    title = block.lines[0].removeprefix("~ ")
    if title[:2] in ("- ", "+ "):
        title = "gone" if title[0] == "-" else "new"
    elif block.module != module:
        title += f" (in {block.module or 'no module'})"
    return Event(label, title, removed, added)


def _heir(block: Block) -> str | None:
    """The value that goes on where a node is gone: the last result of what swallowed it."""
    return block.added[-1].meta["names"][0] if block.added else None


def _readers(graph: Graph, node: Node) -> Iterator[str]:
    for value, reader in readers_of(node):
        yield f"{op_of(reader.target).name} {reader.meta['names'][0]} reads {name_of(value)}"
    made = {id(v) for v in (node, *node.users)}
    yield from (f"result {name} of the step" for name, v in graph.results.items() if id(v) in made)
    yield from (f"next value of state {name}" for name, v in graph.next_state.items() if id(v) in made)


def _calls(study: Study, node: Node, context: int | None) -> Iterator[Call]:
    if study.plan is None:
        return
    moved = launch_bytes(study.plan, context)
    for at, launch in enumerate(study.plan.launches):
        if any(node_of(unit) == node.meta["names"][0] for unit in launch.nodes):
            yield Call(at, launch.symbol, launch.phase, launch.nodes, moved[at].total)


def _whys(study: Study, names: set[str], last: Node | None) -> Iterator[str]:
    for miss in study.near_misses:
        if miss["anchor"] in names or miss["node"] in names:
            yield f"{miss['pass']}/{miss['rule']} at {miss['anchor']}: {miss['reason']}"
    if study.plan is None or last is None:
        return
    for value, reasons in why_apart(study.plan, TARGETS[study.plan.target]).items():
        if value in last.meta["names"] or node_of(value) == last.meta["names"][0]:
            yield from reasons
    for unit, refusals in study.plan.refusals.items():
        if node_of(unit) == last.meta["names"][0]:
            yield from (f"{symbol} did not take {unit}: {reason}" for symbol, reason in refusals)


def _alike(graph: Graph, node: Node | None) -> tuple[int, ...]:
    if node is None or not node.meta["module"].startswith("layers."):
        return ()
    own = int(node.meta["module"].split(".")[1])
    members = next((m for m in layer_classes(graph) if own in m), [own])
    return tuple(m for m in members if m != own)
