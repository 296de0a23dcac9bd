"""What a kernel is to the compiler: the pattern of units that it computes, and what it asks for.

A kernel of one op covers one slot. A kernel that computes several units in one launch, a phase, covers
a list of slots: `codegen/select.py` grows a phase along them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rewright.codegen.units import Unit
from rewright.ir.errors import CompilerBug
from rewright.ir.op import Op, registry
from rewright.ir.plan import kernel_abi
from rewright.ir.types import ValueType
from rewright.ir.variant import Variant


@dataclass(frozen=True, slots=True)
class Ok:
    """The kernel can compute the call."""


@dataclass(frozen=True, slots=True)
class No:
    """The kernel cannot.

    Attributes:
        reason: why, one sentence without a trailing full stop.
    """

    reason: str


Verdict = Ok | No


@dataclass(frozen=True, slots=True)
class Call:
    """Units that one kernel is to compute.

    The accessors by operand are for a call of one unit; `each` gives those of a larger one.

    Attributes:
        units: the units in the order of the kernel's slots.
        types: type of every value of the program.
        kinds: kind of every leaf of the program: input, state, weight or constant.
        variant: what the graph was made for.
    """

    units: tuple[Unit, ...]
    types: Mapping[str, ValueType]
    kinds: Mapping[str, str]
    variant: Variant

    @property
    def unit(self) -> Unit:
        """The only unit."""
        (unit,) = self.units
        return unit

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.unit.attrs

    @property
    def rows(self) -> int:
        """Tokens of a step, masked ones included."""
        return self.variant.batch * self.variant.tokens

    @property
    def operands(self) -> dict[str, ValueType]:
        """Types of the operands that are present."""
        unit = self.unit
        return {
            n: self.types[v] for n, v in zip(unit.op.operands, unit.operands, strict=True) if v is not None
        }

    @property
    def results(self) -> tuple[ValueType, ...]:
        return tuple(self.types[v] for v in self.unit.results)

    def operand(self, name: str) -> ValueType | None:
        """Type of an operand, None where it is absent."""
        return self.operands.get(name)

    def value(self, name: str) -> str | None:
        """The value that is an operand."""
        return self.unit.operands[self.unit.op.operands.index(name)]

    def is_weight(self, value: str) -> bool:
        """Whether a value lies in the artifact."""
        return self.kinds.get(value) in ("weight", "constant")

    def each(self, *ops: str) -> Iterator[Call]:
        """Calls of the single units, of the given ops only if there are any."""
        for unit in self.units:
            if not ops or unit.op.name in ops:
                yield Call((unit,), self.types, self.kinds, self.variant)


class Members(Protocol):
    """The units of a phase that is growing.

    Attributes:
        units: so far, in order.
    """

    @property
    def units(self) -> Sequence[Unit]: ...

    def maker(self, value: str | None) -> Unit | None:
        """The unit of the phase that makes a value."""
        ...


Fits = Callable[[Unit, Members], bool]
"""Whether a unit may fill a slot, given the units of the phase so far."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a kernel's pattern.

    Attributes:
        ops: names of the ops that may stand there.
        optional: whether it may stay empty.
        many: whether it takes all units that fit, not one.
        anywhere: whether the unit need not be connected to the phase (read one of its values, or an
            activation or state that it reads).
        fits: what else must hold for a unit.
    """

    ops: tuple[str, ...]
    optional: bool = False
    many: bool = False
    anywhere: bool = False
    fits: Fits | None = None

    def __str__(self) -> str:
        mark = "*" if self.many else ""
        return "|".join(self.ops) + mark + ("?" if self.optional else "")


@dataclass(frozen=True)
class KernelDef:
    """One way to compute a pattern of units. What it costs is what its ops cost.

    Attributes:
        symbols: its launches in order; all but one for kernels that need the whole machine to have
            finished one part before the next.
        covers: its pattern. Leading optional slots and the first required one can begin it.
        supports: whether it can compute a call that has its pattern.
        layouts: layout of every weight of a call that is not row by row, by the weight's name.
        workspace: bytes of memory that a call needs while it runs, shared by its launches.
        carries: form in which a result leaves the kernel where it is not row by row (`ir/carried.py`), by
            the value's name.
    """

    symbols: tuple[str, ...]
    covers: tuple[Slot, ...]
    supports: Callable[[Call], Verdict]
    layouts: Callable[[Call], Mapping[str, str]] = lambda _: {}
    workspace: Callable[[Call], int] = lambda _: 0
    carries: Callable[[Call], Mapping[str, str]] = lambda _: {}

    @property
    def symbol(self) -> str:
        """What it is called in messages: its first symbol."""
        return self.symbols[0]

    @property
    def single(self) -> bool:
        """Whether it computes one unit at a time."""
        return len(self.covers) == 1 and not self.covers[0].many

    @property
    def begins(self) -> int:
        """How many of its slots can begin it."""
        required = (at for at, slot in enumerate(self.covers) if not slot.optional)
        return next(required, len(self.covers) - 1) + 1

    @property
    def signature(self) -> str:
        """Of a kernel for one op that op's, otherwise its pattern."""
        if self.single and len(self.covers[0].ops) == 1:
            return signature(registry()[self.covers[0].ops[0]])
        return " + ".join(map(str, self.covers))


def signature(op: Op) -> str:
    """Operands, attributes and roles of an op in one line: `linear(x, x_scale?, weight, scale?; out: str)
    -> ()`. C++ kernels state the same text; torch's spelling of a schema changes with its version."""
    operands = ", ".join(f"{name}?" if name in op.optional else name for name in op.operands)
    attrs = ", ".join(f"{name}: {_type_name(op.attr_types[name])}" for name in op.attrs)
    roles = "*" if callable(op.outputs) else ", ".join(op.outputs)
    return f"{op.name}({operands}{'; ' + attrs if attrs else ''}) -> ({roles})"


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return f"{typing.get_args(hint)[0].__name__}s"
    if alternatives := [a for a in typing.get_args(hint) if a is not types.NoneType]:
        return _type_name(alternatives[0])
    return hint.__name__


def abi_hash(defs: Iterable[KernelDef]) -> str:
    """What a plan and a runtime must agree on: SHA-256 over the symbols and signatures of kernels.

    Several kernels may share a symbol if they share its signature; `CompilerBug` otherwise.
    """
    signatures: dict[str, str] = {}
    for definition in defs:
        for symbol in definition.symbols:
            if signatures.setdefault(symbol, definition.signature) != definition.signature:
                raise CompilerBug(f"kernel {symbol} is defined twice")
    return kernel_abi(signatures)
