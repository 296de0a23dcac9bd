"""Which weights tensor parallelism splits over N cards, and for which N that can be done.

Assumed to split, each card taking 1/N of the bytes:

| weights | by |
|---|---|
| `attn.wq_b` (rows), `attn.attn_sink` | attention heads |
| `attn.wo_a` (rows), `attn.wo_b` (columns) | output groups |
| `attn.wo` (columns), where the compiler folded the two | attention heads |
| `attn.indexer.wq_b`, `attn.indexer.weights_proj` (rows) | index heads |
| w1, w3 (rows) and w2 (columns) of routed and shared experts | expert width |
| `head` (rows), `embed` (rows; a lookup still reads its whole row, from one card) | vocabulary |

Everything else is on every card: `wq_a`, `wkv`, all norms, the compressors, the router with its table,
hyper-connections, constants and the whole decode state, which every card reads.

Heads, groups, index heads and vocabulary split as in the released code (`inference/convert.py` of
DeepSeek-V4), which has to add up index scores over the cards for it. Experts do not: there a card has
whole experts and all of the shared one, so at batch 1 a step waits for the card with most of the chosen
experts. Splitting their width gives every card the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rewright.ir.errors import UsageError
from rewright.ir.graph import Graph, name_of, type_of_value
from rewright.ir.types import DType, ValueType

HEADS, GROUPS, INDEX_HEADS = "attention heads", "output groups", "index heads"
WIDTH, VOCABULARY = "expert width", "vocabulary"

_ROWS, _COLUMNS = -2, -1
_SPLITS = (
    (r"layers\.\d+\.attn\.wq_b", HEADS, _ROWS),
    (r"layers\.\d+\.attn\.attn_sink", HEADS, _COLUMNS),
    (r"layers\.\d+\.attn\.wo", HEADS, _COLUMNS),
    (r"layers\.\d+\.attn\.wo_a", GROUPS, _ROWS),
    (r"layers\.\d+\.attn\.wo_b", GROUPS, _COLUMNS),
    (r"layers\.\d+\.attn\.indexer\.(wq_b|weights_proj)", INDEX_HEADS, _ROWS),
    (r"layers\.\d+\.ffn\.(experts|shared_experts)\.(w1|w3)", WIDTH, _ROWS),
    (r"layers\.\d+\.ffn\.(experts|shared_experts)\.w2", WIDTH, _COLUMNS),
    (r"head|embed", VOCABULARY, _ROWS),
)
_COMPILED = tuple((re.compile(rf"(?:{p})(?:\.weight|\.scale)?"), unit, axis) for p, unit, axis in _SPLITS)
_LOOKUP = "embed.weight"


@dataclass(frozen=True, slots=True, order=True)
class Axis:
    """Something that has to be divided evenly.

    Attributes:
        unit: what is counted: attention heads, expert width, ...
        count: how many there are; a card has a whole number of them.
        size: elements of a weight along the axis it is split on.
        block: elements that share a scale along that axis (128 of FP8, 32 of the columns of FP4, else
            1); a card has whole blocks.
    """

    unit: str
    count: int
    size: int
    block: int

    def problem(self, cards: int) -> str | None:
        """Why it cannot be divided among so many cards; None if it can."""
        if self.count % cards or self.size % cards:
            return f"{self.unit}: {self.count:,} is no multiple of {cards}"
        part = self.size // cards
        if part % self.block:
            return f"{self.unit}: {self.size:,} / {cards} = {part:,} is no multiple of {self.block}"
        return None


@dataclass(frozen=True)
class TensorParallel:
    """A number of cards that a graph's weights can be split over.

    Attributes:
        cards: how many.
    """

    cards: int

    @classmethod
    def of(cls, graph: Graph, cards: int) -> TensorParallel:
        """Checked against the graph's weights; `UsageError` with the sizes that can be used."""
        axes = split_axes(graph)
        problems = dict.fromkeys(p for axis in axes if cards > 0 and (p := axis.problem(cards)))
        legal = legal_sizes(axes)
        if cards not in legal:
            reason = "; ".join(problems) or ("nothing to split" if cards > 0 else "not a number of cards")
            raise UsageError(reason, where=f"--tp {cards}", fix=f"sizes: {', '.join(map(str, legal))}")
        return cls(cards)

    def read(self, name: str, amount: int) -> int:
        """Bytes that one card reads of `amount` bytes read of a weight, rounded up."""
        return amount if name == _LOOKUP else self.resident(name, amount)

    def resident(self, name: str, amount: int) -> int:
        """Bytes that one card holds of a weight of `amount` bytes, rounded up."""
        return -(-amount // self.cards) if is_split(name) else amount


def is_split(name: str) -> bool:
    """Whether a weight is split over cards."""
    return _rule(name) is not None


def split_axes(graph: Graph) -> list[Axis]:
    """What has to divide evenly, from the shapes and formats of the graph's weights, without repetition."""
    weights = {name_of(n): type_of_value(n) for n in graph.of_kind("weight")}
    counts = _counts(weights)
    found = set()
    for name, type in weights.items():
        if (rule := _rule(name)) is None or name.endswith(".scale"):
            continue
        unit, axis = rule
        size = type.shape[axis]
        found.add(Axis(unit, counts.get(unit, size), size, _block(type, axis)))
    return sorted(found)


def legal_sizes(axes: list[Axis]) -> list[int]:
    """Numbers of cards that every axis can be divided among, ascending; 1 always is."""
    most = min((axis.count for axis in axes), default=1)
    return [n for n in range(1, most + 1) if not any(axis.problem(n) for axis in axes)]


def _rule(name: str) -> tuple[str, int] | None:
    """Unit and axis that a weight is split by."""
    return next(((unit, axis) for p, unit, axis in _COMPILED if p.fullmatch(name)), None)


def _counts(weights: Mapping[str, ValueType]) -> dict[str, int]:
    """Units of which a weight has several elements each; all layers have the same."""
    counts, shapes = {}, {}
    for name, type in weights.items():
        shapes.setdefault(re.sub(r"^layers\.\d+\.", "", name), type.shape)
    if sink := shapes.get("attn.attn_sink"):
        counts[HEADS] = sink[0]
    if projection := shapes.get("attn.indexer.weights_proj.weight"):
        counts[INDEX_HEADS] = projection[0]
    queries, outputs = shapes.get("attn.wq_b.weight"), shapes.get("attn.wo_a.weight")
    if queries and outputs:  # a group reads as many of the H*d attended values as wo_a has columns
        counts[GROUPS] = queries[0] // outputs[1]
    return counts


def _block(type: ValueType, axis: int) -> int:
    if type.dtype is DType.F8E4M3:
        return 128
    return 32 if type.dtype is DType.E2M1 and axis == _COLUMNS else 1
