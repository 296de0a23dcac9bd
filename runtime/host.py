"""Executes the variants of a compiled model with the native kernels of this processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewright.ir.errors import BadInput
from rewright.ir.variant import Variant
from rewright.runtime import _native
from rewright.runtime.load import Artifact
from rewright.runtime.memory import require_memory
from rewright.runtime.model import Row, choose_variant
from rewright.runtime.threads import thread_count


class HostModel:
    """All variants over one set of mapped weights, one state and one arena.

    Plans are bound when first used. The arena is as large as the largest plan needs; what a step
    leaves in it is garbage to the next one.

    Attributes:
        arena_bytes, state_bytes: memory held beside the weights, as the plans state it.
        weight_bytes: bytes of all mapped weights.
    """

    def __init__(self, artifact: Artifact, *, threads: int | None = None):
        self._artifact = artifact
        memory = artifact.manifest.memory
        self.arena_bytes, self.state_bytes = memory.arena_bytes, memory.state_bytes
        require_memory(self.arena_bytes + self.state_bytes, "state and activations")
        self._threads = thread_count(threads)
        self._weights = artifact.weights()
        self.weight_bytes = sum(t.nbytes for t in self._weights.values())
        self._addresses = {name: (t.data_ptr(), t.nbytes) for name, t in self._weights.items()}
        self._arena = torch.empty(self.arena_bytes, dtype=torch.uint8)
        self.state = torch.zeros(self.state_bytes, dtype=torch.uint8)
        self._programs: dict[Variant, _native.Program] = {}
        self._team: _native.Team | None = None
        self._scratch = 0

    @property
    def threads(self) -> int:
        """Threads that execute a step."""
        return self._threads

    def step(self, rows: Sequence[Row], *, all_positions: bool = False) -> Tensor:
        """As in `Model.step`; rows of several tokens run one after the other, single tokens together."""
        if len(rows) > 1 and (all_positions or len(rows[0].tokens) > 1):
            return torch.cat([self._run([row], all_positions) for row in rows])
        return self._run(rows, all_positions)

    def _run(self, rows: Sequence[Row], all_positions: bool) -> Tensor:
        count = len(rows[0].tokens)
        context = max(row.pos + count for row in rows)
        variants = self._artifact.manifest.variants
        variant = choose_variant(variants, len(rows), count, context, all_positions)
        program = self._program(variant)
        tokens = torch.zeros(variant.batch, variant.tokens, dtype=torch.int32)
        vectors = torch.zeros(3, variant.batch, dtype=torch.int32)  # pos, n_valid, slot
        for i, row in enumerate(rows):
            tokens[i, :count] = torch.tensor(row.tokens, dtype=torch.int32)
            vectors[:, i] = torch.tensor([row.pos, count, row.slot], dtype=torch.int32)
        program.run(self._team_for(program), tokens.data_ptr(), *(v.data_ptr() for v in vectors))
        address, size = program.result("logits")
        start = address - self._arena.data_ptr()
        logits = self._arena[start : start + size].view(torch.float32)
        if all_positions:
            return logits.view(variant.batch, variant.tokens, -1)[: len(rows), :count].clone()
        return logits.view(variant.batch, -1)[: len(rows)].clone()

    def _program(self, variant: Variant) -> _native.Program:
        program = self._programs.get(variant)
        if program is None:
            try:
                program = _native.Program(
                    self._artifact.plan_text(variant),
                    self._addresses,
                    (self._arena.data_ptr(), self.arena_bytes),
                    (self.state.data_ptr(), self.state_bytes),
                )
            except _native.PlanError as e:
                raise BadInput(
                    f"the plan of {variant.name} cannot be executed ({e})",
                    where=str(self._artifact.folder),
                    fix="compile the model again",
                ) from e
            self._programs[variant] = program
        return program

    def _team_for(self, program: _native.Program) -> _native.Team:
        if self._team is None or program.scratch_bytes > self._scratch:
            self._scratch = max(self._scratch, program.scratch_bytes)
            self._team = _native.Team(self._threads, self._scratch)
        return self._team
