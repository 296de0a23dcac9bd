"""Executes the variants of a compiled model with the native kernels of this processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewright.ir.errors import BadInput
from rewright.ir.plan import parse_plan
from rewright.ir.plan_part import launches_alone
from rewright.ir.variant import Variant
from rewright.runtime import _native
from rewright.runtime.load import Artifact
from rewright.runtime.memory import require_memory
from rewright.runtime.model import Row, choose_variant
from rewright.runtime.open_step import OpenStep
from rewright.runtime.threads import thread_count


class HostModel:
    """All variants over one set of mapped weights, one state and one arena.

    Plans are bound when first used. The arena is as large as the largest plan needs; what a step
    leaves in it is garbage to the next one.

    Attributes:
        arena_bytes, state_bytes: memory held beside the weights, as the plans state it.
        weight_bytes: bytes of all mapped weights.
        precision: of the variants that steps run in; it may change between steps.
    """

    def __init__(self, artifact: Artifact, *, threads: int | None = None):
        self._artifact = artifact
        self.precision = "low"
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

    def open_step(self, rows: Sequence[Row]) -> OpenStep:
        """A decode step of single tokens, to be run launch by launch: each is a program of its own."""
        variant = self._variant(len(rows), 1, max(row.pos + 1 for row in rows), False)
        plan = parse_plan(self._artifact.plan_text(variant))
        alone = [launches_alone(plan, [at]).to_text() for at in range(len(plan.launches))]
        programs = [self._bind(text, variant) for text in alone]
        team = [self._team_for(program) for program in programs][-1]  # the scratch of the largest
        tokens, vectors = self._inputs(variant, rows)

        def run(begin: int, end: int) -> None:
            for program in programs[begin:end]:
                program.run(team, tokens.data_ptr(), *(v.data_ptr() for v in vectors))

        return OpenStep(plan, len(rows), run, self._arena)

    def _run(self, rows: Sequence[Row], all_positions: bool) -> Tensor:
        count = len(rows[0].tokens)
        context = max(row.pos + count for row in rows)
        variant = self._variant(len(rows), count, context, all_positions)
        program = self._program(variant)
        tokens, vectors = self._inputs(variant, rows)
        program.run(self._team_for(program), tokens.data_ptr(), *(v.data_ptr() for v in vectors))
        address, size = program.result("logits")
        start = address - self._arena.data_ptr()
        logits = self._arena[start : start + size].view(torch.float32)
        if all_positions:
            return logits.view(variant.batch, variant.tokens, -1)[: len(rows), :count].clone()
        return logits.view(variant.batch, -1)[: len(rows)].clone()

    def _variant(self, batch: int, tokens: int, context: int, all_positions: bool) -> Variant:
        variants = self._artifact.manifest.variants
        return choose_variant(variants, batch, tokens, context, all_positions, self.precision)

    def _inputs(self, variant: Variant, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """i32[B,T] ids and i32[3,B] pos, n_valid and slot; rows beyond those given have no valid token."""
        tokens = torch.zeros(variant.batch, variant.tokens, dtype=torch.int32)
        vectors = torch.zeros(3, variant.batch, dtype=torch.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
            vectors[:, i] = torch.tensor([row.pos, len(row.tokens), row.slot], dtype=torch.int32)
        return tokens, vectors

    def _program(self, variant: Variant) -> _native.Program:
        program = self._programs.get(variant)
        if program is None:
            program = self._programs[variant] = self._bind(self._artifact.plan_text(variant), variant)
        return program

    def _bind(self, plan: str, variant: Variant) -> _native.Program:
        try:
            return _native.Program(
                plan,
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

    def _team_for(self, program: _native.Program) -> _native.Team:
        if self._team is None or program.scratch_bytes > self._scratch:
            self._scratch = max(self._scratch, program.scratch_bytes)
            self._team = _native.Team(self._threads, self._scratch)
        return self._team
