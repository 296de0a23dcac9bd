"""Fused ops: an op whose reference is written as the composition of other ops.

    @composed(outputs=("codes", "scale"))
    def swiglu_quant(gate: Tensor, up: Tensor, *, limit: float, fmt: str, block: int) -> ...:
        return quantize(swiglu(gate, up, None, limit=limit), fmt=fmt, block=block)

Called with tensors the composition computes. Called with symbols it tells its parts, from which
come result types, cost and the way back into separate ops (`expand`). What a fused op means can
therefore not differ from what its parts mean.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rewright.ir.errors import CompilerBug
from rewright.ir.op import Attrs, Call, Cost, Op, Roles, Symbol, Types, composing, op, results_of
from rewright.ir.types import ValueType


class Source(NamedTuple):
    """Where a part's operand comes from: result `index` of part `part`, or operand `index` if part < 0."""

    part: int
    index: int


@dataclass(frozen=True, slots=True)
class Part:
    """One op call inside a composition.

    Attributes:
        op: the op.
        operands: where each comes from, None where absent; `operand_types` are their types.
        attrs: attributes given.
        types: types of its results.
    """

    op: Op
    operands: tuple[Source | None, ...]
    operand_types: tuple[ValueType | None, ...]
    attrs: Attrs
    types: Types


@dataclass(frozen=True, slots=True)
class Composition:
    """A fused op taken apart for given operand types and attributes.

    Attributes:
        parts: its op calls in order.
        results: where each of its results comes from.
    """

    parts: tuple[Part, ...]
    results: tuple[Source, ...]

    def type_of(self, source: Source) -> ValueType:
        """Type of a part's result."""
        return self.parts[source.part].types[source.index]


@dataclass
class _Recorder:
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class _Recorded(Symbol):
    recorder: _Recorder
    source: Source
    type: ValueType

    def call(self, op: Op, operands: tuple[Any, ...], attrs: Attrs) -> Any:
        attrs = {name: value for name, value in attrs.items() if name != "name"}
        types = op.infer_types(tuple(None if o is None else o.type for o in operands), attrs)
        sources = tuple(None if o is None else o.source for o in operands)
        given = tuple(None if o is None else o.type for o in operands)
        at = len(self.recorder.parts)
        self.recorder.parts.append(Part(op, sources, given, attrs, types))
        made = tuple(_Recorded(self.recorder, Source(at, i), t) for i, t in enumerate(types))
        return made[0] if len(made) == 1 and not callable(op.outputs) else made


def composed(
    *,
    outputs: Roles | Callable[[Attrs], Roles] = ("",),
    updates: str | Mapping[str, str] | None = None,
    since: str = "fused",
) -> Callable[[Callable[..., Any]], Op]:
    """Register the decorated composition as a fused op of the same name."""

    def register(function: Callable[..., Any]) -> Op:
        @functools.wraps(function)
        def reference(*operands: Any, **attrs: Any) -> Any:
            with composing():
                return function(*operands, **attrs)

        fused = op(outputs=outputs, updates=updates, since=since)(reference)
        fused.composition = function

        @fused.infer
        def _(*operands: ValueType | None, **attrs: Any) -> Types:
            taken = _take_apart(function, operands, attrs)
            return tuple(taken.type_of(source) for source in taken.results)

        @fused.cost
        def _(call: Call) -> Cost:
            operands = tuple(call.operands.get(name) for name in fused.operands)
            return _cost(fused, _take_apart(function, operands, dict(call.attrs)), call)

        return fused

    return register


def expand(fused: Op, operands: tuple[ValueType | None, ...], attrs: Attrs) -> Composition:
    """The parts of a fused op for these operand types; `CompilerBug` for an op that is none."""
    if fused.composition is None:
        raise CompilerBug(f"{fused.name} is no composition")
    return _take_apart(fused.composition, operands, fused.bind_attrs(attrs))


def _take_apart(
    function: Callable[..., Any], operands: tuple[ValueType | None, ...], attrs: Attrs
) -> Composition:
    recorder = _Recorder()
    symbols = [None if t is None else _Recorded(recorder, Source(-1, i), t) for i, t in enumerate(operands)]
    made = function(*symbols, **attrs)
    return Composition(tuple(recorder.parts), tuple(r.source for r in results_of(made)))


def _cost(fused: Op, taken: Composition, call: Call) -> Cost:
    """What the parts cost together when nothing between them goes through memory.

    An operand that several parts read is read once; only what the fused op yields is written. A
    part that moves nothing (a reshape) is seen through: who reads its result reads its operand.
    """
    reads = dict.fromkeys(call.operands, 0)
    written = flops = 0
    seen: dict[Source, Source] = {}
    costs: dict[int, Cost] = {}
    for at, part in enumerate(taken.parts):
        cost = part.op.estimate(part.operand_types, part.attrs, call.context)
        flops += cost.flops
        given = [source for source in part.operands if source is not None]
        if len(given) == 1 and not (cost.writes or any(cost.reads.values())):
            seen[Source(at, 0)] = seen.get(given[0], given[0])
            continue
        costs[at] = cost
        mine: Counter[str] = Counter()  # a part may read one value through several operands
        for name, source in zip(part.op.operands, part.operands, strict=True):
            source = None if source is None else seen.get(source, source)
            if source is not None and source.part < 0:
                operand = fused.operands[source.index]
                mine[operand] = max(mine[operand], cost.reads[name])
        for operand, amount in mine.items():
            reads[operand] = max(reads[operand], amount)
    yielded: dict[int, set[int]] = {}
    for source in taken.results:
        made = seen.get(source, source)
        yielded.setdefault(made.part, set()).add(made.index)
    for at, cost in costs.items():
        whole = sum(taken.parts[at].types[i].nbytes for i in yielded.get(at, ()))
        written += min(whole, cost.writes)
    return call.cost(reads=reads, writes=written, flops=flops)
