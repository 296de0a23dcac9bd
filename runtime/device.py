"""Executes the variants of a compiled model with the kernels of target sm80, on a card or its emulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rewright.ir.errors import BadInput, MachineError
from rewright.ir.plan import parse_plan
from rewright.ir.variant import Variant
from rewright.runtime import _native
from rewright.runtime.card import Card
from rewright.runtime.card_weights import load_weights
from rewright.runtime.decode_loop import AHEAD, DecodeLoop, Start
from rewright.runtime.device_sampling import DeviceSampling
from rewright.runtime.device_step import DeviceStep, Launch
from rewright.runtime.load import Artifact
from rewright.runtime.model import Row, choose_variant
from rewright.runtime.open_step import OpenStep


class DeviceModel:
    """All variants over one set of weights, one state, one arena and one set of inputs, on the card.

    Plans are bound, and on a card recorded, when first used. What a step leaves in the arena is garbage to
    the next one; the state is left to steps and to whoever saves it.

    Attributes:
        card: where everything lies.
        arena_bytes, state_bytes: memory held beside the weights, as the plans state it.
        weight_bytes: bytes of all weights.
        state: u8[state_bytes] on the card.
        precision: of the variants that steps run in; it may change between steps and between decode loops.
    """

    def __init__(
        self,
        artifact: Artifact,
        card: Card,
        *,
        graphs: bool = True,
        overlap: bool = False,
        loading: Callable[[int], None] | None = None,
    ):
        """
        Args:
            artifact: a model that was compiled for target sm80.
            card: where it runs.
            graphs: whether steps are recorded as CUDA graphs; else each launch is a call of its own.
            overlap: whether launches may begin before those before them have ended.
            loading: told the bytes of each weight when it is on the card.

        Raises:
            MachineError: the card has too little memory; nothing was loaded then.
        """
        self._artifact, self.card, self._graphs, self._overlap = artifact, card, graphs, overlap
        self.precision = "low"
        manifest = artifact.manifest
        self.arena_bytes, self.state_bytes = manifest.memory.arena_bytes, manifest.memory.state_bytes
        needed = artifact.weight_bytes + self.arena_bytes + self.state_bytes
        card.require_memory(needed, "weights, state and activations")
        self._weights = load_weights(artifact, card.where, loading)
        self.weight_bytes = sum(t.nbytes for t in self._weights.values())
        self._arena = torch.zeros(self.arena_bytes, dtype=torch.uint8, device=card.where)
        self.state = torch.zeros(self.state_bytes, dtype=torch.uint8, device=card.where)
        most = max(v.batch * (v.tokens + 3) for v in manifest.variants)
        self._inputs = torch.zeros(most, dtype=torch.int32, device=card.where)
        self._programs: dict[Variant, _native.DeviceProgram] = {}
        self._steps: dict[tuple[Variant, bool], DeviceStep] = {}
        self._sampling: DeviceSampling | None = None

    def step(self, rows: Sequence[Row], *, all_positions: bool = False) -> Tensor:
        """As in `Model.step`; rows of several tokens run one after the other, single tokens together.

        The logits are on the card, and nothing is waited for.
        """
        if len(rows) > 1 and (all_positions or len(rows[0].tokens) > 1):
            return torch.cat([self._run([row], all_positions) for row in rows])
        return self._run(rows, all_positions)

    def open_step(self, rows: Sequence[Row]) -> OpenStep:
        """A decode step of single tokens, to be run launch by launch on torch's current stream."""
        variant = self._decode_variant(len(rows), max(row.pos + 1 for row in rows))
        program, stream = self._program(variant), self.card.stream
        self._write_inputs(variant.batch, 1, rows)
        plan = parse_plan(self._artifact.plan_text(variant))
        return OpenStep(plan, len(rows), lambda begin, end: program.run(stream, begin, end), self._arena)

    def decode_loop(
        self,
        starts: Sequence[Start],
        stop: frozenset[int],
        advance: Callable[[int], None],
        *,
        ahead: int = AHEAD,
    ) -> DecodeLoop:
        """Decode and sample sequences without the host in between, all in one precision; see `DecodeLoop`.

        Args:
            starts: sequences with distinct slots.
            stop: tokens that end a sequence, at most `_native.MOST_STOPS`.
            advance: told the slot whenever its sequence has one token more in the state.
            ahead: steps that are launched before the tokens of the first are read.
        """
        first = self._decode_variant(len(starts), max(s.pos + 1 for s in starts))
        last = self._decode_variant(len(starts), max(s.pos + s.most for s in starts))
        for variant in self._artifact.manifest.variants:  # none is recorded once the loop has begun
            same_rows = variant == replace(first, capacity=variant.capacity)
            if same_rows and first.capacity <= variant.capacity <= last.capacity:
                self._step(variant, sampled=True)
        sampling = self._sampling_memory()
        self._write_inputs(first.batch, 1, [Row((s.token,), s.pos, s.slot) for s in starts])
        sampling.begin([s.sampling for s in starts], [s.draw for s in starts], [s.most for s in starts], stop)

        def launch(at: int) -> None:
            reached = max(s.pos + min(at + 1, s.most) for s in starts)
            self._step(self._decode_variant(len(starts), reached), sampled=True).run()

        return DecodeLoop(launch, sampling.read, starts, stop, advance, ahead)

    def _run(self, rows: Sequence[Row], all_positions: bool) -> Tensor:
        count = len(rows[0].tokens)
        context = max(row.pos + count for row in rows)
        variants = self._artifact.manifest.variants
        variant = choose_variant(variants, len(rows), count, context, all_positions, self.precision)
        step = self._step(variant, sampled=False)
        self._write_inputs(variant.batch, variant.tokens, rows)
        step.run()
        logits = self._logits(variant)
        if all_positions:
            return logits.view(variant.batch, variant.tokens, -1)[: len(rows), :count].clone()
        return logits.view(variant.batch, -1)[: len(rows)].clone()

    def _write_inputs(self, batch: int, tokens: int, rows: Sequence[Row]) -> None:
        """Rows beyond those given have no valid token."""
        ids = torch.zeros(batch, tokens, dtype=torch.int32)
        vectors = torch.zeros(3, batch, dtype=torch.int32)  # pos, n_valid, slot
        for i, row in enumerate(rows):
            ids[i, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
            vectors[:, i] = torch.tensor([row.pos, len(row.tokens), row.slot], dtype=torch.int32)
        packed = torch.cat([ids.flatten(), vectors.flatten()])
        self._inputs[: packed.numel()].copy_(packed)

    def _decode_variant(self, batch: int, context: int) -> Variant:
        return choose_variant(self._artifact.manifest.variants, batch, 1, context, False, self.precision)

    def _logits(self, variant: Variant) -> Tensor:
        """f32 of the arena, as many as the variant has."""
        address, size = self._programs[variant].result("logits")
        start = address - self._arena.data_ptr()
        return self._arena[start : start + size].view(torch.float32)

    def _step(self, variant: Variant, *, sampled: bool) -> DeviceStep:
        """What a variant launches, with the choice of the next tokens behind it or without."""
        step = self._steps.get((variant, sampled))
        if step is None:
            self._inputs.zero_()  # no row is valid while it is recorded
            program = self._program(variant)
            launches: list[Launch] = [program.run_overlapped if self._overlap else program.run]
            if sampled:
                with self._refusals(variant):
                    sampler = self._sampling_memory().sampler(
                        program.result("logits"), variant.batch, self._inputs
                    )
                launches.append(sampler.run)
            step = self._steps[variant, sampled] = DeviceStep(launches, self.card, graphs=self._graphs)
        return step

    def _program(self, variant: Variant) -> _native.DeviceProgram:
        program = self._programs.get(variant)
        if program is None:
            with self._refusals(variant):
                program = _native.DeviceProgram(
                    self._artifact.plan_text(variant),
                    {name: (t.data_ptr(), t.numel()) for name, t in self._weights.items()},
                    (self._arena.data_ptr(), self.arena_bytes),
                    (self.state.data_ptr(), self.state_bytes),
                    self._inputs.data_ptr(),
                    self.card.device,
                )
            self._programs[variant] = program
        return program

    def _sampling_memory(self) -> DeviceSampling:
        if self._sampling is None:
            manifest = self._artifact.manifest
            batch = max(v.batch for v in manifest.variants)
            self._sampling = DeviceSampling(self.card, batch, manifest.model["vocab_size"])
        return self._sampling

    @contextmanager
    def _refusals(self, variant: Variant):
        """Says in words what the native runtime refuses."""
        where = str(self._artifact.folder)
        try:
            yield
        except _native.PlanError as e:
            raise BadInput(
                f"the plan of {variant.name} cannot be executed ({e})",
                where=where,
                fix="compile the model again",
            ) from e
        except _native.DeviceError as e:
            raise MachineError(
                f"the plan of {variant.name} cannot be executed ({e})", where=where, fix="ask rewright doctor"
            ) from e
