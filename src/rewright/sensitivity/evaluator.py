"""Runs one model in many precisions over the same texts, with the kernels of this processor.

All share one set of packed weights, mapped from a temporary folder: an experiment costs its graph, its plan
and a pass over the texts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rewright.codegen.derive import WithDerived
from rewright.codegen.pack import PackedWeights, layouts_of
from rewright.codegen.plan import make_plan
from rewright.codegen.shards import write_shards
from rewright.codegen.targets import TARGETS
from rewright.frontend.source import ModelSource
from rewright.ir.derived import DerivedWeight
from rewright.ir.errors import CompilerBug, MachineError
from rewright.ir.manifest import Manifest, Memory
from rewright.ir.plan import Plan
from rewright.ir.precision_plan import Precision
from rewright.ir.types import ValueType
from rewright.ir.variant import Variant
from rewright.passes.manager import PassOptions, Rewritten, run_passes, weight_types_of
from rewright.passes.pipelines import LAST_STAGE, pass_names
from rewright.rewriting import facts_of
from rewright.runtime.host import HostModel
from rewright.runtime.load import Artifact
from rewright.runtime.logit_check import require_likelihoods
from rewright.runtime.model import Row
from rewright.runtime.score import Encoded
from rewright.sensitivity.force_low import Forced, force_low
from rewright.sensitivity.log_probs import BYTES, LogProbs
from rewright.sensitivity.statistics import TextResult

HEADROOM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SwappedArtifact(Artifact):
    """One experiment, as `Artifact` shows a model to what executes it.

    Attributes:
        plan: of its only variant.
        tensors: packed weights by name; those of all experiments are the same tensors.
    """

    plan: Plan
    tensors: Mapping[str, Tensor]

    def plan_text(self, variant: Variant) -> str:
        return self.plan.to_text()

    def each_weight(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class Evaluator:
    """A model, texts, and the predictions of a reference that others are compared with.

    Attributes:
        reference: what the reference makes of each text; its divergence is 0.
    """

    def __init__(
        self,
        source: ModelSource,
        texts: Sequence[Encoded],
        folder: Path,
        reference: Precision,
        others: Sequence[Precision] = (),
        *,
        threads: int | None = None,
    ):
        """
        Args:
            source: the checkpoint, opened with faithful numerics.
            texts: with two tokens or more each.
            folder: an empty one for packed weights.
            reference: what others are compared with.
            others: precisions that together read every weight that any experiment reads.
            threads: of the kernels.

        Raises:
            MachineError: too little space on the disk, or too little memory.
        """
        self._source, self._texts, self._folder, self._threads = source, texts, folder, threads
        self._target = TARGETS["host"]
        self._variant = max(v for v in source.variants() if v.all_positions)
        self._traced = source.graph(self._variant)
        plan, rewritten = self._planned(reference)
        self._manifest = self._manifest_of(plan)
        made = [(plan, rewritten), *(self._planned(precision) for precision in others)]
        self._layouts = layouts_of(p for p, _ in made)
        self._tensors = self._pack([r for _, r in made])
        self._log_probs = LogProbs(sum(len(t.ids) - 1 for t in texts), source.config.vocab_size)
        self.reference = self._run(plan, self._remember)

    def measure(self, precision: Precision) -> list[TextResult]:
        """What a model of this precision makes of each text."""
        return self._run(self._planned(precision)[0], self._compare)

    def measure_forced(self, precision: Precision, forced: Forced) -> list[TextResult]:
        """The same with a rounding that no plan allows."""
        facts = facts_of(self._source, precision=precision)
        graph = force_low(self._traced, forced)
        # Rules find less around the roundings: nothing is expected of them.
        rewritten = run_passes(graph, replace(facts, model={}))
        return self._run(make_plan(rewritten.graph, self._variant, self._target), self._compare)

    # -- one model ----------------------------------------------------------------------------

    def _planned(self, precision: Precision) -> tuple[Plan, Rewritten]:
        rewritten = run_passes(self._traced, facts_of(self._source, precision=precision), PassOptions())
        return make_plan(rewritten.graph, self._variant, self._target), rewritten

    def _run(self, plan: Plan, judge: Callable[[Encoded, int, int, Tensor], Judged]) -> list[TextResult]:
        if any(self._layouts.get(name, "") != layout for name, layout in layouts_of([plan]).items()):
            raise CompilerBug("an experiment reads a weight in another layout than the others")
        manifest = replace(self._manifest, memory=Memory(plan.arena_bytes, plan.state_bytes))
        artifact = SwappedArtifact(self._folder, manifest, plan, self._tensors)
        model = HostModel(artifact, threads=self._threads)
        found: list[TextResult] = []
        row = 0
        for text in self._texts:
            given, parts = text.ids[:-1], []
            for start in range(0, len(given), self._variant.tokens):
                chunk = given[start : start + self._variant.tokens]
                logits = model.step([Row(chunk, start, 0)], all_positions=True)[0]
                parts.append(judge(text, start, row + start, logits))
            nll, kl, agreements = (sum(of_chunks) for of_chunks in zip(*parts, strict=True))
            found.append(TextResult(text.text.kind, len(given), nll, kl, int(agreements)))
            row += len(given)
        return found

    def _remember(self, text: Encoded, start: int, row: int, logits: Tensor) -> Judged:
        found = torch.log_softmax(logits, -1)
        self._log_probs.write(row, found)
        return _nll(text, start, found, logits), 0.0, len(found)

    def _compare(self, text: Encoded, start: int, row: int, logits: Tensor) -> Judged:
        wanted, found = self._log_probs.read(row, len(logits)), torch.log_softmax(logits, -1)
        nll = _nll(text, start, found, logits)
        kl = (wanted.exp() * (wanted - found)).sum(-1).double().sum()
        return nll, float(kl), int((wanted.argmax(-1) == found.argmax(-1)).sum())

    # -- what all share -----------------------------------------------------------------------

    def _pack(self, models: Sequence[Rewritten]) -> dict[str, Tensor]:
        """Every weight that one of the models reads, packed once and mapped."""
        types: dict[str, ValueType] = {}
        derived: dict[str, DerivedWeight] = {}
        for model in models:
            types |= weight_types_of(model.graph)
            derived |= model.derived
        self._require_disk(sum(t.nbytes for t in types.values()))
        weights = PackedWeights(WithDerived(self._source.weights(), derived), self._layouts)
        shards = sorted(set(write_shards(self._folder, types, weights, lambda _: None)[0].values()))
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            with safe_open(self._folder / shard, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors

    def _require_disk(self, weights: int) -> None:
        rows = sum(len(t.ids) - 1 for t in self._texts)
        needed = weights + rows * self._source.config.vocab_size * BYTES + HEADROOM_BYTES
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise MachineError(
                f"packed weights and the reference's predictions take {needed:,} bytes, {free:,} are free",
                where=str(self._folder.parent),
                fix="free some space, or name another folder in TMPDIR",
            )

    def _manifest_of(self, plan: Plan) -> Manifest:
        return Manifest(
            model=self._source.config.to_dict(),
            fingerprint="",
            target=self._target.name,
            abi=self._target.abi,
            numerics=self._source.numerics.value,
            kv="bf16",
            passes=pass_names(),
            fold_wo=False,
            static_scales="",
            stages=(LAST_STAGE,),
            memory=Memory(plan.arena_bytes, plan.state_bytes),
            limits=self._source.limits,
            variants={self._variant: ""},
            tensors={},
            layouts={},
            files={},
        )


Judged = tuple[float, float, int]
"""Sums over the tokens of a chunk: negative log-likelihood, divergence, agreements."""


def _nll(text: Encoded, start: int, log_probs: Tensor, logits: Tensor) -> float:
    """Sum of the negative log-likelihoods of the tokens behind `start`."""
    target = torch.tensor(text.ids[start + 1 : start + 1 + len(logits)])
    nll = -log_probs.gather(-1, target[:, None])[:, 0]
    require_likelihoods(nll, logits, text.text.where, start + 1)
    return float(nll.double().sum())
