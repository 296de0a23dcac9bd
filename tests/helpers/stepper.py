"""Runs a model from memory: weights loaded whole, variants traced on demand, state in plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewright.frontend.kv_formats import parse_kv
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph
from rewright.ir.interpret import Interpreter
from rewright.ir.variant import Variant
from rewright.passes.facts import FoldWo
from rewright.passes.manager import PassOptions, run_passes
from rewright.rewriting import facts_of

PAD_TOKEN = 7
"""Fills the columns of `tokens` behind a row's last valid one; any id will do."""


@dataclass(frozen=True)
class Saved:
    """A copy of all state."""

    state: dict[str, Tensor]
    positions: list[int]


class Stepper:
    """Steps the sequences in the slots of one model.

    Args:
        source: the opened checkpoint.
        padded: chunks are padded to the variant's T; else they hold their valid columns only.
        capacity: tokens that every step reads at most; by default the smallest bucket that fits.
        weights: every weight by name, to share them between steppers of one source.
        passes: which passes the graphs go through; none by default.
        fold_wo: as in `Facts`.

    Attributes:
        state: every state tensor by name.
        positions: length of the sequence in each slot.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        padded: bool = False,
        capacity: int | None = None,
        weights: Mapping[str, Tensor] | None = None,
        passes: PassOptions | None = None,
        fold_wo: FoldWo = "auto",
    ):
        self.source, self.padded, self.capacity = source, padded, capacity
        self.passes, self.fold_wo = passes, fold_wo
        self.weights = load_weights(source) if weights is None else dict(weights)
        types = source.model.builder.states
        self.state = {n: torch.zeros(t.storage_shape, dtype=t.dtype.torch_dtype) for n, t in types.items()}
        self.positions = [0] * source.limits.max_batch
        self._interpreters: dict[Variant, Interpreter] = {}
        self._traced: dict[Variant, Graph] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        numerics: str = "fp32",
        *,
        max_context: int = 512,
        max_batch: int = 1,
        chunk: int = 512,
        kv: str = "bf16",
        **options: Any,
    ) -> Stepper:
        """Open a checkpoint and load it."""
        limits = {"max_context": max_context, "max_batch": max_batch, "chunk": chunk}
        return cls(ModelSource.open(path, Numerics(numerics), **limits, kv=parse_kv(kv)), **options)

    def fresh(self, **options: Any) -> Stepper:
        """Another stepper of the same model with empty state; it shares graphs unless `passes` differ."""
        kept = {"capacity": self.capacity, "passes": self.passes, "fold_wo": self.fold_wo}
        new = Stepper(self.source, weights=self.weights, **{**kept, **options})
        new._traced = self._traced
        if new.passes == self.passes and new.fold_wo == self.fold_wo:
            new._interpreters = self._interpreters
        return new

    def interpreter(self, variant: Variant) -> Interpreter:
        if variant not in self._interpreters:
            self._interpreters[variant] = Interpreter(self._rewritten(variant), self.weights)
        return self._interpreters[variant]

    def _rewritten(self, variant: Variant) -> Graph:
        if variant not in self._traced:
            self._traced[variant] = self.source.graph(variant)
        if self.passes is None:
            return self._traced[variant]
        result = run_passes(self._traced[variant], facts_of(self.source, self.fold_wo), self.passes)
        for name, derived in result.derived.items():
            if name not in self.weights:
                self.weights[name] = derived.compute(*(self.weights[s] for s in derived.sources))
        return result.graph

    def graph(self, variant: Variant) -> Graph:
        return self.interpreter(variant).graph

    def variant(self, tokens: int, batch: int, context: int, all_positions: bool = False) -> Variant:
        """The variant that a step of `tokens` columns which reaches `context` tokens runs on."""
        buckets = self.source.limits.capacities(self.source.config.index_topk)
        capacity = self.capacity or min(c for c in buckets if c >= context)
        return Variant(tokens, batch, capacity, all_positions)

    def step(
        self,
        rows: Mapping[int, Sequence[int]],
        *,
        tokens: int | None = None,
        all_positions: bool = False,
        overrides: Mapping[str, Tensor] | None = None,
        observe: Callable[[str, Tensor], None] | None = None,
    ) -> Tensor:
        """Feed the next tokens of several slots; a slot without tokens is an idle row (n_valid 0).

        Args:
            rows: token ids by slot, one batch row each, in this order.
            tokens: T of the variant; by default 1 where no row has more, else the chunk size.

        Returns:
            Logits f32[B,V], or f32[B,T',V] with `all_positions`, T' the columns given.
        """
        slots, ids = list(rows), list(rows.values())
        longest = max(map(len, ids))
        if tokens is None:
            tokens = 1 if longest <= 1 and not all_positions else self.source.limits.chunk
        context = max([self.positions[s] + len(i) for s, i in rows.items() if i], default=1)
        columns = tokens if self.padded else max(longest, 1)
        padded = [list(i) + [PAD_TOKEN] * (columns - len(i)) for i in ids]
        vectors = {"pos": [self.positions[s] for s in slots], "n_valid": list(map(len, ids)), "slot": slots}
        inputs = {n: torch.tensor(v, dtype=torch.int32) for n, v in {"tokens": padded, **vectors}.items()}
        runner = self.interpreter(self.variant(tokens, len(slots), context, all_positions))
        logits = runner.run(inputs, self.state, overrides=overrides, observe=observe)["logits"]
        for slot, given in rows.items():
            self.positions[slot] += len(given)
        return logits

    def prefill(
        self, ids: Sequence[int], split: Iterable[int] | None = None, slot: int = 0, **options: Any
    ) -> Tensor:
        """Feed a prompt in chunks of the given lengths -> logits f32[V] after its last token."""
        logits = torch.empty(0)
        for part in _parts(ids, split, self.source.limits.chunk):
            logits = self.step({slot: part}, tokens=self.source.limits.chunk, **options)[0]
        return logits

    def decode(self, token: int, slot: int = 0, **options: Any) -> Tensor:
        """Feed one token through the decode variant -> logits f32[V]."""
        return self.step({slot: [token]}, tokens=1, **options)[0]

    def tokenwise(self, ids: Sequence[int], slot: int = 0) -> Tensor:
        """Decode the given tokens one by one -> logits f32[n,V] after each."""
        return torch.stack([self.decode(token, slot) for token in ids])

    def scores(
        self, ids: Sequence[int], split: Iterable[int] | None = None, slot: int = 0, **options: Any
    ) -> Tensor:
        """Start over and feed `ids` through the all-positions variant -> logits f32[n,V] after each."""
        self.release(slot)
        parts = _parts(ids, split, self.source.limits.chunk)
        found = [
            self.step({slot: p}, tokens=self.source.limits.chunk, all_positions=True, **options)[0, : len(p)]
            for p in parts
        ]
        return torch.cat(found)

    def release(self, slot: int = 0) -> None:
        """Give a slot to a new sequence; its old state stays where it is."""
        self.positions[slot] = 0

    def poison(self, slot: int | None = None) -> None:
        """Fill the state of a slot (default: of all) with NaN, packed keys with 0xFF."""
        for tensor in self.state.values():
            nan = float("nan") if tensor.is_floating_point() else -1
            (tensor if slot is None else tensor[slot]).fill_(nan)

    def save(self) -> Saved:
        return Saved({n: t.clone() for n, t in self.state.items()}, list(self.positions))

    def restore(self, saved: Saved) -> None:
        self.state = {n: t.clone() for n, t in saved.state.items()}
        self.positions = list(saved.positions)


def load_weights(source: ModelSource) -> dict[str, Tensor]:
    """Every weight and constant of a model by name."""
    weights = source.weights()
    return {name: weights.load(name) for name in weights.names()}


def _parts(ids: Sequence[int], split: Iterable[int] | None, chunk: int) -> list[Sequence[int]]:
    lengths = (
        list(split) if split is not None else [min(chunk, len(ids) - i) for i in range(0, len(ids), chunk)]
    )
    if sum(lengths) != len(ids):
        raise ValueError(f"the split has {sum(lengths)} tokens, there are {len(ids)}")
    parts, start = [], 0
    for length in lengths:
        parts.append(ids[start : start + length])
        start += length
    return parts
