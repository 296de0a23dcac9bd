"""Executes the variants of a compiled model with the reference interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.ir.errors import MachineError
from rewright.ir.graph import type_of_value
from rewright.ir.interpret import Interpreter, empty_state
from rewright.ir.variant import Variant, smallest_capacity
from rewright.runtime.load import Artifact


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: its next tokens, where they stand, and its state slot."""

    tokens: Sequence[int]
    pos: int
    slot: int


class ReferenceModel:
    """All variants over one set of weights and one state.

    Variants are parsed when first used. The state is shared by them all: its types depend on the
    compiled limits only.
    """

    def __init__(self, artifact: Artifact):
        self._artifact = artifact
        self._weights = artifact.weights()
        self._interpreters: dict[Variant, Interpreter] = {}
        graph = self._interpreter(min(artifact.manifest.variants)).graph
        _require_memory(sum(type_of_value(n).nbytes for n in graph.of_kind("state")))
        self.state = empty_state(graph)

    def step(self, rows: Sequence[Row], *, all_positions: bool = False) -> Tensor:
        """Run one step and update the state.

        Rows run one after the other through the variants of batch 1: an interpreter gains nothing
        from a batch, while the CPU's matrix library sums several rows in another order than one, so
        this is what makes a request's result independent of what else runs.

        Args:
            rows: sequences with distinct slots and equally many tokens.
            all_positions: logits of every token instead of the last.

        Returns:
            f32[len(rows), V], or f32[len(rows), tokens, V] with all_positions.
        """
        return torch.cat([self._run(row, all_positions) for row in rows])

    def _run(self, row: Row, all_positions: bool) -> Tensor:
        inputs = {
            "tokens": torch.tensor([row.tokens], dtype=torch.int32),
            "pos": _vector(row.pos),
            "n_valid": _vector(len(row.tokens)),
            "slot": _vector(row.slot),
        }
        variant = self._choose(len(row.tokens), row.pos + len(row.tokens), all_positions)
        return self._interpreter(variant).run(inputs, self.state)["logits"]

    def _choose(self, tokens: int, context: int, all_positions: bool) -> Variant:
        """The cheapest variant that holds the step."""
        fitting = [
            v
            for v in self._artifact.manifest.variants
            if v.batch == 1 and v.tokens >= tokens and v.all_positions == all_positions
        ]
        capacity = smallest_capacity(fitting, context)
        return min(v for v in fitting if v.capacity == capacity)

    def _interpreter(self, variant: Variant) -> Interpreter:
        if variant not in self._interpreters:
            self._interpreters[variant] = Interpreter(self._artifact.graph(variant), self._weights)
        return self._interpreters[variant]


def _require_memory(needed: int) -> None:
    """Refuse a state that this machine cannot hold."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise MachineError(
            f"the state needs {needed:,} bytes, this machine has {memory:,}",
            where="memory",
            fix="compile with a smaller --max-context or --max-batch",
        )


def _vector(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)
