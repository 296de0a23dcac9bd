"""Runs a graph with the reference of every op: the oracle, and the CPU runtime of this version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of, type_of_value
from rewright.ir.op import op_of, results_of
from rewright.ir.types import ValueType, type_of


@dataclass(frozen=True, slots=True)
class _Step:
    """One op call over numbered registers."""

    run: Callable[..., Any]
    operands: tuple[int, ...]  # -1: absent
    attrs: dict[str, Any]
    results: tuple[int, ...]
    names: tuple[str, ...]
    dead: tuple[int, ...]  # registers nobody reads afterwards


class Interpreter:
    """A graph made ready to run.

    State is updated in place wherever the old value has no later reader, so a step costs nothing
    for capacity it does not touch; otherwise the update works on a copy.

    Args:
        graph: the graph.
        weights: tensor of every weight and constant of the graph, by name.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, Tensor]):
        self.graph = graph
        self._register: dict[Node, int] = {}
        self._leaves: list[tuple[str, str, int, ValueType]] = []
        self._fixed: list[Tensor | None] = []
        for node in graph.nodes:
            if kind_of(node) in ("op", "output") and (
                kind_of(node) == "output" or len(node.meta["names"]) > 1
            ):
                continue
            self._register[node] = len(self._fixed)
            self._fixed.append(
                self._weight(node, weights) if kind_of(node) in ("weight", "constant") else None
            )
            if kind_of(node) in ("input", "state"):
                entry = (kind_of(node), name_of(node), self._register[node], type_of_value(node))
                self._leaves.append(entry)
        self._steps = self._plan()
        self._results = {name: self._register[v] for name, v in graph.results.items()}
        self._states = {name: self._register[v] for name, v in graph.next_state.items()}

    @staticmethod
    def _weight(node: Node, weights: Mapping[str, Tensor]) -> Tensor:
        tensor, stated = weights[name_of(node)], type_of_value(node)
        if type_of(tensor) != stated:
            raise CompilerBug(f"weight {name_of(node)} is {type_of(tensor)}, the graph says {stated}")
        return tensor

    def _plan(self) -> list[_Step]:
        last_use: dict[int, int] = {}
        for at, node in enumerate(self.graph.nodes):
            for operand in _values_read(node):
                last_use[self._register[operand]] = at
        # The oldest value of a state may be dropped from its register but belongs to the caller.
        kept = {self._register[v] for v in self.graph.next_state.values()}
        steps = []
        for at, node in enumerate(self.graph.nodes):
            if kind_of(node) != "op":
                continue
            op = op_of(node.target)
            operands = tuple(-1 if v is None else self._register[v] for v in operands_of(node))
            dead = tuple(r for r in set(operands) if r >= 0 and last_use[r] == at and self._fixed[r] is None)
            # A state with a later reader of its old value is updated in a copy.
            shared = frozenset(
                op.operands[at] for at in op.updated(dict(node.kwargs)).values() if operands[at] not in dead
            )
            run = partial(op.run, shared) if shared else op.reference
            results = self._result_registers(node)
            unused = tuple(r for r in results if r >= 0 and r not in last_use and r not in kept)
            steps.append(_Step(run, operands, dict(node.kwargs), results, node.meta["names"], dead + unused))
        return steps

    def _result_registers(self, node: Node) -> tuple[int, ...]:
        if len(node.meta["names"]) == 1:
            return (self._register[node],)
        items = {user.args[1]: self._register[user] for user in node.users if kind_of(user) == "item"}
        return tuple(items.get(i, -1) for i in range(len(node.meta["names"])))

    def run(
        self,
        inputs: Mapping[str, Tensor],
        state: dict[str, Tensor],
        *,
        overrides: Mapping[str, Tensor] | None = None,
        observe: Callable[[str, Tensor], None] | None = None,
    ) -> dict[str, Tensor]:
        """Execute one step.

        Args:
            inputs: tensor of every input. `tokens` may hold fewer columns than the graph's T, at
                least the largest n_valid: references work row by row, so a short chunk costs its
                valid rows only and its results have as many rows.
            state: tensor of every state; replaced by its next value, which is the same tensor
                where it could be updated in place.
            overrides: values to put in place of computed ones, by value name.
            observe: called with the name and tensor of every op result.

        Returns:
            The graph's results by name.
        """
        registers = list(self._fixed)
        for kind, name, register, expected in self._leaves:
            tensor = inputs[name] if kind == "input" else state[name]
            if type_of(tensor) != expected and not (name == "tokens" and _shorter(tensor, expected)):
                raise CompilerBug(f"{kind} {name} is {type_of(tensor)}, the graph says {expected}")
            registers[register] = tensor
        for step in self._steps:
            arguments = [None if r < 0 else registers[r] for r in step.operands]
            produced = step.run(*arguments, **step.attrs)
            for register, name, value in zip(step.results, step.names, results_of(produced), strict=True):
                if overrides and name in overrides:
                    value = overrides[name]
                if observe is not None:
                    observe(name, value)
                if register >= 0:
                    registers[register] = value
            for register in step.dead:
                registers[register] = None
        for name, register in self._states.items():
            state[name] = _present(registers[register])
        return {name: _present(registers[register]) for name, register in self._results.items()}


def empty_state(graph: Graph) -> dict[str, Tensor]:
    """State tensors of a graph, zero-filled. (Content before position 0 is never read.)"""
    return {name_of(n): _zeros(type_of_value(n)) for n in graph.of_kind("state")}


def _zeros(type: ValueType) -> Tensor:
    return torch.zeros(type.storage_shape, dtype=type.dtype.torch_dtype)


def _shorter(tokens: Tensor, expected: ValueType) -> bool:
    got = type_of(tokens)
    return (
        got.dtype is expected.dtype and got.shape[0] == expected.shape[0] and got.shape[1] < expected.shape[1]
    )


def _present(value: Tensor | None) -> Tensor:
    if value is None:
        raise CompilerBug("a result was dropped before the end of the step")
    return value


def _values_read(node: Node) -> list[Node]:
    if kind_of(node) == "item":
        return []
    return [v for v in node.all_input_nodes if producer_of(v) is not node]
