"""Definition of a graph op: one decorated reference function and its hooks.

    @op(outputs=("", "scale"))
    def quantize(x: Tensor, *, fmt: str, block: int) -> tuple[Tensor, Tensor]:
        ...plain torch, the meaning of the op...

    @quantize.infer
    def _(x: ValueType, *, fmt: str, block: int) -> tuple[ValueType, ...]: ...

The schema is read from the signature: tensors are positional, attributes keyword-only. The op is
registered with torch.library, so torch.fx traces it whole and fx tools work on it. An op is pure:
`updates` names the state operands that the reference writes in place; registration and interpreter
copy such an operand first wherever its old value is still needed.

A fused op is written as the composition of other ops and gets its hooks from them: `compose.py`.
"""

from __future__ import annotations

import inspect
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from rewright.ir.errors import CompilerBug
from rewright.ir.types import ValueType, type_of

Types = tuple[ValueType, ...]
Roles = tuple[str, ...]
Operands = tuple[Tensor | None, ...]
Attrs = dict[str, Any]

_LIBRARY = torch.library.Library("rewright", "DEF")
_REGISTRY: dict[str, Op] = {}
_BY_TARGET: dict[Any, Op] = {}


# Set while a fused op's reference runs: its parts then run as references too, states in place.
_composing: ContextVar[bool] = ContextVar("composing", default=False)


@contextmanager
def composing() -> Iterator[None]:
    """Calls of ops within the block run their references directly."""
    token = _composing.set(True)
    try:
        yield
    finally:
        _composing.reset(token)


class Symbol(ABC):
    """A stand-in for a tensor: an op called on one asks it what the call means."""

    @abstractmethod
    def call(self, op: Op, operands: tuple[Any, ...], attrs: Attrs) -> Any:
        """What `op(*operands, **attrs)` gives, this symbol being among the operands."""


class TypeMismatch(Exception):
    """Operands that an op cannot take; the text says which and why."""


def require(condition: bool, reason: str) -> None:
    """Refuse the operand types of an `infer` hook with `reason`."""
    if not condition:
        raise TypeMismatch(reason)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one execution of an op moves and computes.

    Attributes:
        reads: bytes read of each tensor operand, by operand name.
        writes: bytes written over all outputs.
        resident: bytes that must exist for each operand, read or not (an expert table is resident
            whole, of which a token reads a few rows).
        flops: floating-point operations, a multiply-add counting two.
    """

    reads: Mapping[str, int]
    writes: int
    resident: Mapping[str, int]
    flops: int


@dataclass(frozen=True, slots=True)
class Call:
    """Types and attributes of one op execution, as a cost hook sees them.

    Attributes:
        operands: types by operand name; an absent optional operand is left out.
        outputs: types of the results.
        attrs: every attribute, defaults filled in.
        context: tokens of the sequence after this step; state reads depend on it.
    """

    operands: Mapping[str, ValueType]
    outputs: Types
    attrs: Mapping[str, Any]
    context: int

    def cost(
        self, *, reads: Mapping[str, int] | None = None, writes: int | None = None, flops: int | None = None
    ) -> Cost:
        """The usual cost (operands read whole, outputs written whole, one flop an output element)
        with the given parts replaced."""
        whole = {name: t.nbytes for name, t in self.operands.items()}
        return Cost(
            reads={**whole, **(reads or {})},
            writes=sum(t.nbytes for t in self.outputs) if writes is None else writes,
            resident=whole,
            flops=sum(t.numel for t in self.outputs) if flops is None else flops,
        )


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two correct evaluations of an op may differ.

    Attributes:
        ulp: units in the last place of the output's own dtype, relative to the largest magnitude
            of the compared row (sums in another order).
    """

    ulp: float = 1.0


Example = tuple[Operands, Attrs]


@dataclass
class Op:
    """A graph op. Calling it runs (or, on traced values, records) it through torch's dispatcher.

    Attributes:
        name: the word in graph text.
        reference: the decorated function. It writes the operand named by `updates` in place.
        operands: tensor operands in order; `optional` holds those that may be absent.
        attrs: attribute names in signature order with their defaults (`inspect.Parameter.empty`
            where required); `attr_types` are their annotations.
        outputs: role of each result, a function of the attributes where these decide which results
            there are (such an op gives a list); a result's name is the node's with the role appended.
        updates: state operand by the role of the result that is its next value.
        since: first stage at which the op may appear.
        target: the torch overload that fx nodes call.
        dense: operands whose rows must lie back to back; all others may have padded rows.
        composition: of a fused op the function over ops that defines it (`compose.py`), else None.
    """

    name: str
    reference: Callable[..., Any]
    operands: tuple[str, ...]
    optional: frozenset[str]
    attrs: dict[str, Any]
    attr_types: Mapping[str, Any]
    outputs: Roles | Callable[[Attrs], Roles]
    updates: Mapping[str, str]
    since: str
    schema: str
    target: Any = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    composition: Callable[..., Any] | None = None
    dense: frozenset[str] = frozenset()
    _infer: Callable[..., Types] | None = None
    _inferred: dict[tuple[tuple[ValueType | None, ...], str], Types] = field(default_factory=dict, repr=False)
    _estimated: dict[tuple[tuple[ValueType | None, ...], str, int], Cost] = field(
        default_factory=dict, repr=False
    )
    _cost: Callable[[Call], Cost] | None = None
    _examples: Callable[[Examples], Iterator[Example]] | None = None

    def infer(self, hook: Callable[..., Types]) -> Callable[..., Types]:
        """Set the type hook: operand types (None where absent) and attributes -> result types.

        It raises `TypeMismatch` (through `require`) for operands the op cannot take.
        """
        self._infer = hook
        return hook

    def cost(self, hook: Callable[[Call], Cost]) -> Callable[[Call], Cost]:
        """Set the cost hook; without one every operand is read and every result written whole."""
        self._cost = hook
        return hook

    def examples(self, hook: Callable[[Examples], Iterator[Example]]) -> Callable[..., Iterator[Example]]:
        """Set the generator of example operands that the generated tests run on."""
        self._examples = hook
        return hook

    def roles(self, attrs: Attrs) -> Roles:
        """Role of each result of a call with these attributes."""
        return self.outputs(self.bind_attrs(attrs)) if callable(self.outputs) else self.outputs

    def updated(self, attrs: Attrs) -> dict[int, int]:
        """Of a call with these attributes: position of the state operand by that of its next value."""
        if not self.updates:
            return {}
        roles = self.roles(attrs)
        return {roles.index(role): self.operands.index(state) for role, state in self.updates.items()}

    def infer_types(self, operands: tuple[ValueType | None, ...], attrs: Attrs) -> Types:
        """Types of the results, rows back to back; `TypeMismatch` if the operands do not fit."""
        operands = tuple(None if t is None else t.dense for t in operands)
        # A model asks the same of every layer and after every pass. repr tells 1 from 1.0 and True.
        key = operands, repr(attrs)
        found = self._inferred.get(key)
        if found is None:
            found = self._inferred[key] = self._infer_types(operands, attrs)
        return found

    def _infer_types(self, operands: tuple[ValueType | None, ...], attrs: Attrs) -> Types:
        if self._infer is None:
            raise CompilerBug(f"op {self.name} has no infer hook")
        count = len(self.operands)
        require(len(operands) == count, f"{len(operands)} operands where it takes {count}")
        for name, operand in zip(self.operands, operands, strict=True):
            require(operand is not None or name in self.optional, f"operand {name} is missing")
        try:
            results = self._infer(*operands, **self.bind_attrs(attrs))
        except CompilerBug as e:
            raise TypeMismatch(str(e)) from e
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            # A hook takes shapes apart as it likes: one that it cannot take apart does not fit.
            raise TypeMismatch(f"{type(e).__name__}: {e}") from e
        fits = all(size >= 0 for result in results for size in result.shape)
        require(fits, f"a result would be {', '.join(map(str, results))}")
        return results

    def estimate(self, operands: tuple[ValueType | None, ...], attrs: Attrs, context: int) -> Cost:
        """Cost of one execution with `context` tokens of the sequence visible afterwards."""
        key = operands, repr(attrs), context
        found = self._estimated.get(key)
        if found is None:
            found = self._estimated[key] = self._estimate(operands, attrs, context)
        return found

    def _estimate(self, operands: tuple[ValueType | None, ...], attrs: Attrs, context: int) -> Cost:
        operands = tuple(None if t is None else t.dense for t in operands)
        present = {n: t for n, t in zip(self.operands, operands, strict=True) if t is not None}
        call = Call(present, self.infer_types(operands, attrs), self.bind_attrs(attrs), context)
        return self._cost(call) if self._cost else call.cost()

    def example_calls(self, seed: int = 0) -> list[Example]:
        """Example operands and attributes, the same for the same seed."""
        if self._examples is None:
            raise CompilerBug(f"op {self.name} has no example generator")
        return list(self._examples(Examples(seed)))

    def bind_attrs(self, attrs: Attrs) -> Attrs:
        """`attrs` with defaults filled in, in signature order; `CompilerBug` for a wrong set."""
        unknown = attrs.keys() - self.attrs.keys()
        missing = [n for n, d in self.attrs.items() if d is inspect.Parameter.empty and n not in attrs]
        if unknown or missing:
            raise CompilerBug(f"op {self.name}: unknown attributes {sorted(unknown)}, missing {missing}")
        for n, value in attrs.items():
            if not _is_of(value, self.attr_types[n]):
                raise CompilerBug(f"op {self.name}: attribute {n} cannot be {value!r}")
        bound = {n: attrs.get(n, default) for n, default in self.attrs.items()}
        return {n: float(v) if self.attr_types[n] is float else v for n, v in bound.items()}

    def given_attrs(self, attrs: Attrs) -> Attrs:
        """`attrs` in canonical form: sorted by name, defaults left out."""
        bound = self.bind_attrs(attrs)
        return {n: bound[n] for n in sorted(bound) if bound[n] != self.attrs[n]}

    def functional(self, *operands: Tensor | None, **attrs: Any) -> Any:
        """Run the reference without touching any operand."""
        return self.run(frozenset(self.updates.values()), *operands, **attrs)

    def run(self, shared: frozenset[str], *operands: Tensor | None, **attrs: Any) -> Any:
        """Run the reference on copies of the state operands that are `shared` with a later reader."""
        given = [
            o.clone() if o is not None and name in shared else o
            for name, o in zip(self.operands, operands, strict=True)
        ]
        return self.reference(*given, **attrs)

    def __call__(self, *operands: Any, name: str | None = None, **attrs: Any) -> Any:
        """Run the op, or record it when an operand is being traced or is a symbol.

        Args:
            name: role of the result within its module, the stable name of the node; "" gives it
                the module's own path, and without it the op's name is the role.
        """
        for operand in operands:
            if isinstance(operand, Symbol):
                return operand.call(self, operands, attrs)
        if _composing.get():
            return self.reference(*operands, **attrs)
        result = self.target(*operands, **attrs)
        if not isinstance(result, Proxy):
            return result
        result.node.meta["role"] = self.name if name is None else name
        if not callable(self.outputs) and len(self.outputs) == 1:
            return result
        return tuple(result[i] for i in range(len(self.roles(attrs))))  # pyright: ignore[reportIndexIssue]


def _is_of(value: Any, hint: Any) -> bool:
    """Whether an attribute's value is of its annotation. An int may stand for a float, no bool for either."""
    if typing.get_origin(hint) is list:
        item = typing.get_args(hint)[0]
        return isinstance(value, list | tuple) and all(_is_of(v, item) for v in value)
    if alternatives := typing.get_args(hint):
        return any(_is_of(value, alternative) for alternative in alternatives)
    return type(value) is hint or (hint is float and type(value) is int)


class Examples:
    """Seeded source of example tensors for the generated tests."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * std).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype)

    def e4m3(self, *shape: int) -> Tensor:
        """FP8 codes of every ordinary magnitude, no NaN."""
        return self.randn(*shape, dtype=torch.float32, std=64.0).clamp(-448, 448).to(torch.float8_e4m3fn)

    def e2m1(self, *shape: int) -> Tensor:
        """Packed FP4 codes of a logical shape."""
        return self.integers(0, 256, *shape[:-1], shape[-1] // 2, dtype=torch.uint8)

    def e8m0(self, *shape: int) -> Tensor:
        """Block scales from 2^-9 to 2^0."""
        return self.integers(118, 128, *shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def op(
    *,
    outputs: Roles | Callable[[Attrs], Roles] = ("",),
    updates: str | Mapping[str, str] | None = None,
    since: str = "traced",
    dense: frozenset[str] = frozenset(),
) -> Callable[[Callable[..., Any]], Op]:
    """Register the decorated reference function as a graph op of the same name.

    A single state operand that the single result updates may be given as `updates="ring"`.
    """
    updated = {"": updates} if isinstance(updates, str) else dict(updates or {})

    def register(reference: Callable[..., Any]) -> Op:
        name = reference.__name__
        if name in _REGISTRY:
            raise CompilerBug(f"op {name} is defined twice")
        hints = typing.get_type_hints(reference)
        parameters = inspect.signature(reference).parameters.values()
        tensors = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        result = Op(
            name=name,
            reference=reference,
            operands=tuple(tensors),
            optional=frozenset(n for n in tensors if types.NoneType in typing.get_args(hints[n])),
            attrs={p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY},
            attr_types={p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY},
            outputs=outputs,
            updates=updated,
            since=since,
            dense=dense,
            schema=torch.library.infer_schema(inspect.unwrap(reference), mutates_args=(), op_name=name),
        )
        _LIBRARY.define(result.schema)
        _LIBRARY.impl(name, result.functional, "CPU")
        _LIBRARY.impl(name, _meta_kernel(result), "Meta")
        result.target = getattr(torch.ops.rewright, name).default
        result.__doc__ = reference.__doc__
        _REGISTRY[name] = _BY_TARGET[result.target] = result
        return result

    return register


def _meta_kernel(op: Op) -> Callable[..., Any]:
    def meta(*operands: Tensor | None, **attrs: Any) -> Any:
        inferred = op.infer_types(tuple(None if t is None else type_of(t) for t in operands), attrs)
        results = tuple(t.empty("meta") for t in inferred)
        if callable(op.outputs):
            return list(results)
        return results[0] if len(results) == 1 else results

    return meta


def results_of(produced: Any) -> tuple[Any, ...]:
    """What an op gave as a tuple, of a single result too."""
    return tuple(produced) if isinstance(produced, (tuple, list)) else (produced,)


def registry() -> Mapping[str, Op]:
    """Every op by name."""
    import rewright.ir.ops  # noqa: F401  (registers them)

    return types.MappingProxyType(_REGISTRY)


def op_of(target: Any) -> Op:
    """The op that an fx node's target calls."""
    return _BY_TARGET[target]
