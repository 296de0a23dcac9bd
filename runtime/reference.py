"""Executes the variants of a compiled model with the reference interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        first = min(artifact.manifest.variants)
        self.state = empty_state(self._interpreter(first).graph)

    def step(self, rows: Sequence[Row], *, all_positions: bool = False) -> Tensor:
        """Run one step and update the state.

        Args:
            rows: sequences with distinct slots; several only for decode (one token each).
            all_positions: logits of every token instead of the last.

        Returns:
            f32[len(rows), V], or f32[1, tokens, V] with all_positions.
        """
        tokens = max(len(r.tokens) for r in rows)
        variant = self._choose(len(rows), tokens, max(r.pos + len(r.tokens) for r in rows), all_positions)
        # Rows that pad the batch have n_valid 0: they touch neither state nor routing.
        padded = [*rows, *[Row((), 0, 0)] * (variant.batch - len(rows))]
        grid = torch.zeros(variant.batch, tokens, dtype=torch.int32)
        for i, row in enumerate(padded):
            grid[i, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
        inputs = {
            "tokens": grid,
            "pos": _vector(r.pos for r in padded),
            "n_valid": _vector(len(r.tokens) for r in padded),
            "slot": _vector(r.slot for r in padded),
        }
        return self._interpreter(variant).run(inputs, self.state)["logits"][: len(rows)]

    def _choose(self, batch: int, tokens: int, context: int, all_positions: bool) -> Variant:
        """The cheapest variant that holds the step."""
        fitting = [
            v
            for v in self._artifact.manifest.variants
            if v.batch >= batch and v.tokens >= tokens and v.all_positions == all_positions
        ]
        capacity = smallest_capacity(fitting, context)
        return min(v for v in fitting if v.capacity == capacity)

    def _interpreter(self, variant: Variant) -> Interpreter:
        if variant not in self._interpreters:
            self._interpreters[variant] = Interpreter(self._artifact.graph(variant), self._weights)
        return self._interpreters[variant]


def _vector(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
