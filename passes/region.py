"""Runs a rewritten region before and after, cut out of the graph at its boundary values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rewright.ir.compose import expand
from rewright.ir.errors import Refused
from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of, result_index, type_of_value
from rewright.ir.interpret import Interpreter
from rewright.ir.kv_format import rows_of
from rewright.ir.op import op_of
from rewright.ir.types import DType, ValueType
from rewright.passes.match import Match
from rewright.passes.rule import Transform

_FP32_SUMS = 16 * torch.finfo(torch.float32).eps


class RegionCheck:
    """Compares both sides of every rewrite on generated values, once for each different region."""

    def __init__(self) -> None:
        self.checked = 0
        self._seen: set[str] = set()

    def watch(self, rule: Transform, match: Match) -> Callable[[list[Node]], None] | None:
        """Take the region as it is; the result is to be called with the nodes that replace it."""
        if not rule.keeps_numerics:
            return None
        before = cut(match.graph, match.replaced)

        def compare(made: list[Node]) -> None:
            if not made:  # values that exist stand for the region: a pattern of values, not of ops
                return
            after = cut(match.graph, made)
            key = _signature(before, after)
            if key not in self._seen:
                self._seen.add(key)
                require_equal(before, after, rule.name)
                self.checked += 1

        return compare


def cut(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """The graph of some op nodes alone; values from outside are its inputs, values read outside its
    results, both under their own names."""
    inside = sorted(nodes)
    members = set(inside)
    part = Graph(graph.name, stage=graph.stage, attrs=graph.attrs)
    outer: dict[Node, None] = {}
    for node in inside:
        outer |= {v: None for v in operands_of(node) if v is not None and producer_of(v) not in members}
    copied = {v: part.leaf("input", name_of(v), type_of_value(v).dense) for v in outer}
    made: dict[Node, Node] = {}

    def mapped(value: Node) -> Node:
        if value in copied:
            return copied[value]
        return part.result(made[producer_of(value)], result_index(value))

    results: dict[str, Node] = {}
    for node in inside:
        meta = node.meta
        operands = [None if v is None else mapped(v) for v in operands_of(node)]
        made[node] = part.call(
            op_of(node.target), operands, node.kwargs, names=meta["names"], module=meta["module"]
        )
        several = len(meta["names"]) > 1
        for user in node.users:
            readers = user.users if several else [user]
            if any(reader not in members for reader in readers):
                value = user if several else node
                results[name_of(value)] = mapped(value)
    part.finish(dict(sorted(results.items())), {})
    return part


def require_equal(before: Graph, after: Graph, rule: str) -> None:
    """Run both on the same generated inputs, several sets of them; `Refused` if a result differs."""
    known, read = ({name_of(n) for n in g.of_kind("input")} for g in (before, after))
    if read - known:
        raise Refused(f"rule {rule} reads {', '.join(sorted(read - known))}, which it did not before")
    if changed := _calls(before) ^ _calls(after):
        raise Refused(f"rule {rule} changes what is computed: {', '.join(sorted(changed))}")
    if lost := before.results.keys() - after.results.keys():
        raise Refused(f"rule {rule} no longer gives {', '.join(sorted(lost))}")
    ulp = max(op_of(n.target).tolerance.ulp for g in (before, after) for n in g.ops)
    inputs: dict[str, Tensor] = {}
    for draw in range(_DRAWS):
        inputs = _generate(before, draw, inputs)
        wanted, got = _run(before, inputs), _run(after, inputs)
        for name, want in wanted.items():
            if reason := _difference(got[name], want, ulp):
                raise Refused(f"rule {rule} changes {name}: {reason}", where=before.name)


def _calls(graph: Graph) -> set[str]:
    """Every call of an op that is no composition, its attributes and how often; shapes aside.

    A rewrite that keeps the numerics only moves and joins calls: their number and their attributes
    stay, of which a comparison of results would not show every one.
    """
    found: Counter[str] = Counter()
    for node in graph.ops:
        op = op_of(node.target)
        operands = tuple(None if v is None else type_of_value(v) for v in operands_of(node))
        parts = [(op, dict(node.kwargs))]
        if op.composition is not None:
            parts = [(p.op, p.attrs) for p in expand(op, operands, dict(node.kwargs)).parts]
        for part, attrs in parts:
            if part.name != "reshape":
                shown = {n: v for n, v in part.given_attrs(attrs).items() if n != "flat"}
                found[f"{part.name} {json.dumps(shown, default=list)}"] += 1
    return {f"{count} x {call}" for call, count in found.items()}


def _run(graph: Graph, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    written = {
        operands_of(n)[at] for n in graph.ops for at in op_of(n.target).updated(dict(n.kwargs)).values()
    }
    given = {n: inputs[name_of(n)] for n in graph.of_kind("input")}
    mine = {name_of(n): t.clone() if n in written else t for n, t in given.items()}
    return Interpreter(graph, {}).run(mine, {})


def _difference(got: Tensor, want: Tensor, ulp: float) -> str | None:
    """How two results differ beyond the tolerance of the ops that made them; codes have none."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
    if want.itemsize == 1 or not want.is_floating_point():
        same = torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        return None if same else "codes or integers differ"
    a, b = got.double(), want.double()
    if not ((a == b) | (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan())).all():
        return "other elements are infinite or no numbers"
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    limit = (torch.finfo(want.dtype).eps * ulp + _FP32_SUMS) * b.abs().amax(-1, keepdim=True)
    excess = (a - b).abs() - limit
    return None if (excess <= 0).all() else f"by up to {float((a - b).abs().max()):.3g}"


def _signature(before: Graph, after: Graph) -> str:
    """Both regions without what tells one layer from another; a name that they share is one value."""
    place: dict[str, str] = {}
    lines = []
    for node in (*before.nodes, *after.nodes):
        for name in node.meta.get("names", ()):
            place.setdefault(name, f"v{len(place)}")
        if kind_of(node) in ("input", "op"):
            called = kind_of(node) == "op"
            op = op_of(node.target).name if called else "input"
            read = [None if v is None else place[name_of(v)] for v in operands_of(node)] if called else []
            made = [place[name] for name in node.meta["names"]]
            types = [str(t) for t in node.meta["types"]]
            lines.append(json.dumps([op, made, read, types, dict(node.kwargs)], default=list))
    return "\n".join(lines)


_DRAWS = 3
"""Sets of inputs that a region runs on: a limit shows in large rows only, an eps in small ones."""

_EXPONENTS = (-10, 0, 4)
_LARGE = 1 << 20
"""Bytes from which on a tensor is drawn once for all sets."""

# Which ids an operand may hold: below the size of an axis of another operand of the same op.
_IDS = {
    ("attention", "indices"): ("compressed", 1),
    ("embed", "tokens"): ("weight", 0),
    ("expert_linear", "experts"): ("weight", 0),
    ("moe", "table"): ("logits", 2),
    ("moe", "tokens"): ("table", 0),
    ("route_hash", "table"): ("logits", 2),
    ("route_hash", "tokens"): ("table", 0),
    ("sparse_attention", "indices"): ("compressed", 1),
}


def _generate(graph: Graph, draw: int, earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A value for every input, by name: plausible for its type and for what reads it."""
    generator = torch.Generator().manual_seed(draw)
    found: dict[str, Tensor] = {}
    for at, node in enumerate(graph.of_kind("input")):
        name, type = name_of(node), type_of_value(node)
        if name in earlier and type.nbytes >= _LARGE:
            found[name] = earlier[name]
        elif type.dtype in (DType.I32, DType.I64):
            found[name] = _integers(node, type, generator, graph.attrs, draw)
        elif type.dtype.is_float:
            found[name] = _floats(type, generator, draw, at).to(type.dtype.torch_dtype)
        elif type.dtype is DType.BYTE:
            found[name] = _packed_rows(node, type, generator)
        else:
            found[name] = _codes(type, generator)
    return found


def _codes(type: ValueType, generator: torch.Generator) -> Tensor:
    """Codes of every kind, and scales around 2^-3."""
    shape = type.storage_shape
    if type.dtype is DType.F8E4M3:
        return (torch.randn(shape, generator=generator) * 16).to(type.dtype.torch_dtype)
    low, high = (120, 128) if type.dtype is DType.E8M0 else (0, 256)
    drawn = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
    return drawn.view(type.dtype.torch_dtype)


def _packed_rows(node: Node, type: ValueType, generator: torch.Generator) -> Tensor:
    """A state of ordinary rows, packed as its readers say."""
    for reader in (u for u in node.users if kind_of(u) == "op"):
        for name, value in zip(op_of(reader.target).operands, operands_of(reader), strict=True):
            if value is node and (packed := rows_of(reader.kwargs, name)) is not None:
                slots, count, row_bytes = type.shape
                rows = torch.randn(slots, count, packed.columns(row_bytes), generator=generator)
                return packed.pack(rows.bfloat16())
    return torch.randint(-128, 128, type.shape, generator=generator, dtype=torch.int8)


def _floats(type: ValueType, generator: torch.Generator, draw: int, at: int) -> Tensor:
    """Ordinary values in the first draw, then tokens of several magnitudes, different for every input.

    From the second draw on a matrix keeps products the size of what goes in.
    """
    drawn = torch.randn(type.shape, generator=generator)
    rank = len(type.shape)
    if draw == 0:
        return drawn
    if rank == 2:
        return drawn * type.shape[-1] ** -0.5
    if rank < 2:
        return drawn
    tokens = torch.arange(type.shape[0] * type.shape[1]) + at + draw
    exponents = torch.tensor(_EXPONENTS)[tokens % len(_EXPONENTS)]
    return drawn * (2.0**exponents).view(*type.shape[:2], *(1,) * (rank - 2))


def _integers(
    node: Node, type: ValueType, generator: torch.Generator, attrs: Mapping[str, Any], draw: int
) -> Tensor:
    """Step vectors as a step could have them; anything else is an id that its reader can take, or none."""
    dtype, tokens = type.dtype.torch_dtype, attrs.get("tokens", 1)
    match name_of(node):
        case "slot":
            return torch.arange(type.numel, dtype=dtype).flip(0)
        case "n_valid":  # the last row is masked in the last draw
            return torch.full(type.shape, tokens - (tokens > 1 and draw == _DRAWS - 1), dtype=dtype)
        case "pos":  # the last step that fits, so that every entry of the context is there
            last = max(0, min(attrs.get("capacity", 64), 1024) - tokens)
            return torch.full(type.shape, last, dtype=dtype)
    high = 4
    for reader in (u for u in node.users if kind_of(u) == "op"):
        op = op_of(reader.target)
        operands = dict(zip(op.operands, operands_of(reader), strict=True))
        for name in (n for n, v in operands.items() if v is node and (op.name, n) in _IDS):
            other, axis = _IDS[op.name, name]
            if (value := operands[other]) is not None:
                high = type_of_value(value).shape[axis]
    if draw % 2:  # the last ones, each once
        return (high - 1 - torch.arange(type.numel, dtype=dtype) % high).view(type.shape)
    low = 0 if type.dtype is DType.I64 or name_of(node) == "tokens" else -1
    return torch.randint(low, high, type.shape, generator=generator, dtype=dtype)
