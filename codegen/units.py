"""A graph as units: op calls to be computed, fused ones taken apart where no kernel computes them whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewright.ir import ops
from rewright.ir.compose import Composition, Source, expand
from rewright.ir.errors import CompilerBug
from rewright.ir.graph import LEAVES, Graph, kind_of, name_of, operands_of
from rewright.ir.names import join
from rewright.ir.op import Op, op_of
from rewright.ir.types import ValueType


@dataclass(frozen=True, slots=True)
class Unit:
    """One op call to be computed.

    Attributes:
        name: of a whole node the name of its first result, of a part `node/op`.
        op: the op.
        operands: values by operand, None where an optional one is absent.
        results: values by result.
        attrs: every attribute, defaults filled in.
        node: the graph node that it is or belongs to.
        path: fused ops that it was taken out of, the outermost first.
    """

    name: str
    op: Op
    operands: tuple[str | None, ...]
    results: tuple[str, ...]
    attrs: Mapping[str, Any]
    node: str
    path: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Values read, each once."""
        return tuple(dict.fromkeys(v for v in self.operands if v is not None))

    @property
    def updates(self) -> dict[str, str]:
        """State value that a result takes the place of, by the result."""
        found = {}
        for result, operand in self.op.updated(dict(self.attrs)).items():
            before = self.operands[operand]
            if before is None:
                raise CompilerBug(f"{self.name} updates a state that is absent")
            found[self.results[result]] = before
        return found

    @property
    def fused(self) -> bool:
        """Whether it can be taken apart."""
        return self.op.composition is not None


@dataclass
class Program:
    """The units of a graph in order, and the values between them.

    A `reshape` that moves nothing is no unit: its result is an alias of its operand.

    Attributes:
        units: every unit after those whose results it reads.
        leaves: kind of every leaf (input, state, weight, constant) by name.
        types: type of every value.
        states: of every value of a state, old or next, the state.
        aliases: value that has the same bytes, by alias; never an alias itself.
        results: value of every result of the step by the result's name.
    """

    units: list[Unit] = field(default_factory=list)
    leaves: dict[str, str] = field(default_factory=dict)
    types: dict[str, ValueType] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Program:
        """One unit for every op node."""
        program = cls()
        for node in graph.nodes:
            names, types = node.meta.get("names", ()), node.meta.get("types", ())
            if kind_of(node) in LEAVES:
                program.leaves[names[0]] = kind_of(node)
                program.types[names[0]] = types[0]
                if kind_of(node) == "state":
                    program.states[names[0]] = names[0]
            elif kind_of(node) == "op":
                program.types.update(zip(names, types, strict=True))
                op = op_of(node.target)
                operands = tuple(None if v is None else name_of(v) for v in operands_of(node))
                unit = Unit(names[0], op, operands, names, op.bind_attrs(dict(node.kwargs)), names[0])
                program.units += program._admit([unit])
        program.results = {name: name_of(value) for name, value in graph.results.items()}
        return program

    def root(self, value: str) -> str:
        """The value that holds the bytes of `value`."""
        return self.aliases.get(value, value)

    def kind(self, value: str) -> str:
        """Kind of a leaf; `state` for next values of states too, `activation` for all others."""
        return "state" if value in self.states else self.leaves.get(value, "activation")

    def take_apart(self, units: Iterable[Unit]) -> None:
        """Put the parts of fused units in their places; the values between them are called after them."""
        names = {unit.name for unit in units}
        old, self.units = self.units, []
        for unit in old:
            self.units += self._admit(self._parts(unit)) if unit.name in names else [unit]

    def _admit(self, units: Sequence[Unit]) -> list[Unit]:
        """The units without those that are no more than an alias; their states are noted."""
        kept = []
        for unit in units:
            self.states.update((result, self.states[before]) for result, before in unit.updates.items())
            if self._is_alias(unit):
                operand = unit.operands[0]
                assert operand is not None
                self.aliases[unit.results[0]] = self.root(operand)
            else:
                kept.append(unit)
        return kept

    def _is_alias(self, unit: Unit) -> bool:
        """Whether a unit gives its operand's bytes. Leaves are found by name, and a state changes."""
        if unit.op is not ops.reshape:
            return False
        values = (*unit.reads, *unit.results)
        return self.kind(self.root(unit.reads[0])) == "activation" and all(
            self.types[v].pitch is None for v in values
        )

    def _parts(self, unit: Unit) -> list[Unit]:
        types = tuple(None if v is None else self.types[v] for v in unit.operands)
        taken = expand(unit.op, types, dict(unit.attrs))
        named = _yielded(unit, taken)
        names = _part_names(unit, taken)
        parts = []
        for at, part in enumerate(taken.parts):
            roles = part.op.roles(part.attrs)
            for index, role in enumerate(roles):
                source = Source(at, index)
                if source not in named:
                    named[source] = join(names[at], role)
                    self.types[named[source]] = part.types[index]
            operands = tuple(
                None if s is None else unit.operands[s.index] if s.part < 0 else named[s]
                for s in part.operands
            )
            results = tuple(named[Source(at, i)] for i in range(len(roles)))
            path = (*unit.path, unit.op.name)
            bound = part.op.bind_attrs(part.attrs)
            parts.append(Unit(names[at], part.op, operands, results, bound, unit.node, path))
        return [*parts, *self._copies(unit, taken, named)]

    def _copies(self, unit: Unit, taken: Composition, named: Mapping[Source, str]) -> list[Unit]:
        """Units for results that are an operand, or a part's result that has another result's name."""
        copies = []
        for source, result in zip(taken.results, unit.results, strict=True):
            if named.get(source) == result:
                continue
            value = unit.operands[source.index] if source.part < 0 else named[source]
            shape = self.types[result].shape
            attrs = ops.reshape.bind_attrs({"tail": [shape[-1]], "keep": len(shape) - 1})
            path = (*unit.path, unit.op.name)
            copies.append(
                Unit(f"{unit.name}/{result}", ops.reshape, (value,), (result,), attrs, unit.node, path)
            )
        return copies


def _yielded(unit: Unit, taken: Composition) -> dict[Source, str]:
    """Results of parts that are results of the unit, each under its first name."""
    found: dict[Source, str] = {}
    for source, result in zip(taken.results, unit.results, strict=True):
        if source.part >= 0:
            found.setdefault(source, result)
    return found


def _part_names(unit: Unit, taken: Composition) -> list[str]:
    """`unit/op`, with a number where the op occurs more than once."""
    total = Counter(part.op.name for part in taken.parts)
    seen: defaultdict[str, int] = defaultdict(int)
    names = []
    for part in taken.parts:
        op = part.op.name
        names.append(f"{unit.name}/{op}{seen[op] if total[op] > 1 else ''}")
        seen[op] += 1
    return names
