"""Executes the variants of a compiled model with the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rewright.ir.graph import Graph, type_of_value
from rewright.ir.interpret import Interpreter, empty_state
from rewright.ir.variant import Variant
from rewright.runtime.load import Artifact
from rewright.runtime.memory import require_memory
from rewright.runtime.model import Row, choose_variant


class ReferenceModel:
    """All variants over one set of weights and one state.

    Variants are parsed when first used. The state is shared by them all: its types depend on the
    compiled limits only.

    Attributes:
        state: every state tensor by name.
        precision: of the variants that steps run in; it may change between steps.
        observe: called with the name and tensor of every op result of every step, while it is set.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        weights: dict[str, Tensor] | None = None,
        graph_of: Callable[[Variant], Graph] | None = None,
    ):
        """
        Args:
            artifact: the compiled model.
            weights: tensors by name in place of the artifact's.
            graph_of: gives the graph of a variant in place of the artifact's.
        """
        self._artifact = artifact
        self.precision = "low"
        self._graph_of = graph_of or artifact.graph
        self._weights = artifact.weights_by_row() if weights is None else weights
        self.observe: Callable[[str, Tensor], None] | None = None
        self._interpreters: dict[Variant, Interpreter] = {}
        graph = self._interpreter(min(v for v in artifact.manifest.variants if not v.is_high)).graph
        require_memory(sum(type_of_value(n).nbytes for n in graph.of_kind("state")), "the state")
        self.state = empty_state(graph)

    def step(self, rows: Sequence[Row], *, all_positions: bool = False) -> Tensor:
        """As in `Model.step`.

        Rows run one after the other through the variants of batch 1: an interpreter gains nothing
        from a batch, while the CPU's matrix library sums several rows in another order than one, so
        this is what makes a request's result independent of what else runs.
        """
        return torch.cat([self._run(row, all_positions) for row in rows])

    def _run(self, row: Row, all_positions: bool) -> Tensor:
        inputs = {
            "tokens": torch.tensor([row.tokens], dtype=torch.int32),
            "pos": _vector(row.pos),
            "n_valid": _vector(len(row.tokens)),
            "slot": _vector(row.slot),
        }
        batch_one = [v for v in self._artifact.manifest.variants if v.batch == 1]
        context = row.pos + len(row.tokens)
        variant = choose_variant(batch_one, 1, len(row.tokens), context, all_positions, self.precision)
        return self._interpreter(variant).run(inputs, self.state, observe=self.observe)["logits"]

    def _interpreter(self, variant: Variant) -> Interpreter:
        if variant not in self._interpreters:
            self._interpreters[variant] = Interpreter(self._graph_of(variant), self._weights)
        return self._interpreters[variant]


def _vector(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)
