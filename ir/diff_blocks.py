"""The op nodes of a graph diff as blocks of lines: a rewrite, a value replaced by another, a change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from rewright.ir.change_text import change_lines
from rewright.ir.diff import Change, GraphDiff
from rewright.ir.diff_bytes import Balance, Ledger
from rewright.ir.leftovers import Leftovers
from rewright.ir.moved import Moved
from rewright.ir.names import relative
from rewright.ir.printer import print_node
from rewright.ir.rewrites import Rewrite


@dataclass(frozen=True)
class Block:
    """One thing that happened to the ops of a module.

    Attributes:
        module: the heading it stands under.
        lines: what it says.
        balance: its nodes and bytes.
        removed, added: the nodes of the two graphs that it is about. Not compared: what is alike in two
            layers has other nodes in each.
    """

    module: str
    lines: tuple[str, ...]
    balance: Balance
    removed: tuple[Node, ...] = field(default=(), repr=False, compare=False)
    added: tuple[Node, ...] = field(default=(), repr=False, compare=False)


def blocks_of(diff: GraphDiff, ledger: Ledger) -> list[Block]:
    """What happened, modules in the order of the second graph, in each rewrites first."""
    leftovers = Leftovers(diff)
    place = {node: i for i, change in enumerate(diff.nodes) for node in change.nodes}
    found: list[tuple[int, int, Block]] = []

    for rewrite in diff.rewrites:
        balance = ledger.of(rewrite)
        lines = tuple(_rewrite_lines(rewrite, balance))
        block = Block(rewrite.module, lines, balance, rewrite.removed, rewrite.added)
        found.append((0, place[rewrite.main], block))
    for rank, changes in _together(diff.rest, leftovers):
        balance, module = ledger.of(*changes), changes[-1].module
        lines = (
            _replaced_lines(changes, leftovers.instead, balance),
            _unread_lines(changes, balance),
            change_lines(changes[-1], module),
        )[rank - 1]
        removed = tuple(c.before for c in changes if c.before is not None)
        added = tuple(c.after for c in changes if c.after is not None)
        block = Block(module, tuple(lines), balance, removed, added)
        found.append((rank, place[changes[-1].node], block))
    first: dict[str, int] = {}
    for _, at, block in found:
        first[block.module] = min(at, first.get(block.module, at))
    found.sort(key=lambda f: (first[f[2].module], f[2].module, f[0], f[1]))
    return [block for _, _, block in found]


def _together(rest: Sequence[Change], leftovers: Leftovers) -> list[tuple[int, list[Change]]]:
    """Changes that one block tells, with its rank: 1 replaced (the head last), 2 unread, 3 one other."""
    groups: dict[tuple[int, Any], list[Change]] = {}
    for i, change in enumerate(rest):
        why = leftovers.why(change)
        key = (1, leftovers.head(change)) if why == "replaced" else (2, change.module) if why else (3, i)
        groups.setdefault(key, []).append(change)
    for (rank, _), changes in groups.items():
        if rank < 3:
            changes.sort(key=lambda c: c.node)
    return [(rank, changes) for (rank, _), changes in groups.items()]


def _rewrite_lines(rewrite: Rewrite, balance: Balance) -> Iterator[str]:
    how = "" if rewrite.how == "applied" else f" {rewrite.how}"
    nodes = f"{_count(len(rewrite.removed))} -> {len(rewrite.added)}"
    yield f"~ rule {rewrite.rule}{how}: {nodes}{_and_saved(balance)}"
    yield from (f"  - {print_node(n, rewrite.module)}" for n in rewrite.removed)
    yield from (f"  + {print_node(n, rewrite.module)}" for n in rewrite.added)


def _replaced_lines(changes: Sequence[Change], instead: Mapping[str, str], balance: Balance) -> Iterator[str]:
    module = changes[-1].module
    names = [n for change in changes for n in change.node.meta["names"] if n in instead]
    old = ", ".join(f"%{relative(n, module)}" for n in names)
    new = list(dict.fromkeys(f"%{relative(instead[n], module)}" for n in names))
    saved = saved_text(balance.saved)
    verb = "is" if len(new) == 1 else "are"
    yield f"~ {', '.join(new)} {verb} read instead of {old}" + (f": {saved}" if saved else "")
    yield from (f"  - {print_node(change.node, module)}" for change in changes)


def _unread_lines(changes: Sequence[Change], balance: Balance) -> Iterator[str]:
    yield f"~ read by nobody: {_count(len(changes))}{_and_saved(balance)}"
    yield from (f"  - {print_node(c.node, c.module)}" for c in changes)


def _count(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


def _and_saved(balance: Balance) -> str:
    text = saved_text(balance.saved)
    return f", {text}" if text else ""


def saved_text(saved: Moved) -> str:
    """Bytes in words; what is not said to be of anything else are activations."""
    parts = []
    for verb, sign in (("saves", 1), ("costs", -1)):
        amounts = {kind: n * sign for kind, n in saved.by_kind.items() if n * sign > 0}
        words = [
            f"{n:,}{'' if i else ' bytes'}{'' if kind == 'activation' else f' of {_PLURAL[kind]}'}"
            for i, (kind, n) in enumerate(amounts.items())
        ]
        if words:
            *others, last = words
            parts.append(f"{verb} {', '.join(others) + ' and ' if others else ''}{last}")
    return ", ".join(parts)


_PLURAL = {"weight": "weights", "constant": "constants", "state": "state"}
