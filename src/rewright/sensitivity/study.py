"""The whole measurement: every kind and module lowered alone, and the plan that follows."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rewright.codegen.targets import TARGETS
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.manifest import TOKENIZER_NAME
from rewright.ir.precision_plan import Adjustable, Precision, PrecisionPlan
from rewright.runtime.score import Encoded, encode_texts, load_texts
from rewright.runtime.tokenizer import Tokenizer
from rewright.sensitivity.evaluator import Evaluator
from rewright.sensitivity.experiments import ASPECTS, Unit, Units, expanded, high, lowered, plan_with
from rewright.sensitivity.force_low import Forced
from rewright.sensitivity.statistics import RESAMPLES, SEED, SHARE, Divergence, TextResult, by_kind

Progress = Callable[[str, int, int], None]
FORMAT = "rewright.sensitivity"
BUDGET = 0.01
"""Nats a token that a plan may diverge from the reference by default: about 1 % of perplexity at most."""


@dataclass(frozen=True)
class StudyOptions:
    """What is measured.

    Attributes:
        aspects: of `ASPECTS`.
        kinds_only: no module is measured by itself.
        most_modules: measure the modules of the most sensitive kinds only, so many at most.
        split: (i, n): every n-th text of each kind, from the i-th on.
        budget: KL that the plan may have, nats a token; the loss of likelihood is held to it too.
        forced: roundings that no plan allows, measured beside.
        threads: of the kernels.
    """

    aspects: tuple[str, ...] = ASPECTS
    kinds_only: bool = False
    most_modules: int | None = None
    split: tuple[int, int] = (0, 1)
    budget: float = BUDGET
    forced: tuple[Forced, ...] = ()
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.aspects:
            raise UsageError("names no aspect", where="--aspects", fix=f"choose of {', '.join(ASPECTS)}")
        if not 0 <= self.budget < math.inf:
            raise UsageError(f"{self.budget} is not a number of nats from 0 up", where="--budget")
        if self.most_modules is not None and self.most_modules < 0:
            raise UsageError(f"{self.most_modules} is not a number of modules", where="--modules")


def parse_split(text: str) -> tuple[int, int]:
    """`i/n`; `UsageError` if it is something else."""
    part, slash, count = text.partition("/")
    if slash and part.isdecimal() and count.isdecimal() and int(part) < int(count):
        return int(part), int(count)
    raise UsageError(
        f"{text!r} is not PART/PARTS, counted from 0", where="--split", fix="for halves: 0/2 and 1/2"
    )


@dataclass(frozen=True)
class Finding:
    """What an experiment did to the predictions.

    Attributes:
        name: of a module, a kind, or a forced rounding.
        kind: the kind of module.
        scope: kind, module or forced.
        aspect: what was lowered.
        modules: how many modules.
        saves: bytes of one decoded token that are saved.
        all: over all texts.
        kinds: by kind of text.
    """

    name: str
    kind: str
    scope: str
    aspect: str
    modules: int
    saves: int
    all: Divergence
    kinds: dict[str, Divergence]

    @classmethod
    def of(cls, unit: Unit, results: Sequence[TextResult]) -> Finding:
        scope = "kind" if unit.is_kind else "module"
        return cls(
            unit.name,
            unit.kind,
            scope,
            unit.aspect,
            len(unit.modules),
            unit.saves,
            Divergence.of(results),
            by_kind(results),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "scope": self.scope,
            "aspect": self.aspect,
            "modules": self.modules,
            "saves_bytes": self.saves,
            "all": self.all.to_json(),
            "kinds": {kind: d.to_json() for kind, d in self.kinds.items()},
        }


@dataclass(frozen=True)
class PlannedModel:
    """A plan and what a model of it does, as measured.

    Attributes:
        plan: the plan.
        kept: units that it keeps high, of all that were ranked.
        saves: bytes of one decoded token that it saves; `most` if all were low.
        all, kinds: divergence over all texts and by kind of text.
        lowest: divergence of the model with nothing kept high.
    """

    plan: PrecisionPlan
    kept: int
    units: int
    saves: int
    most: int
    all: Divergence
    kinds: dict[str, Divergence]
    lowest: Divergence

    def to_json(self) -> dict[str, Any]:
        return {
            "default": dict(self.plan.default),
            "module_kinds": {k: dict(v) for k, v in self.plan.kinds.items()},
            "modules": {k: dict(v) for k, v in self.plan.modules.items()},
            "kept": self.kept,
            "units": self.units,
            "saves_bytes": self.saves,
            "saves_at_most_bytes": self.most,
            "all": self.all.to_json(),
            "kinds": {kind: d.to_json() for kind, d in self.kinds.items()},
            "lowest": self.lowest.to_json(),
        }


@dataclass(frozen=True)
class Study:
    """Everything that was measured.

    Attributes:
        options: what was asked for.
        fingerprint: of the checkpoint.
        reference: the reference over all texts.
        reference_kinds: and by kind of text.
        findings: the experiments, most divergence first, kinds of modules before modules.
        plan: the plan within the budget.
    """

    options: StudyOptions
    fingerprint: str
    reference: Divergence
    reference_kinds: dict[str, Divergence]
    findings: tuple[Finding, ...]
    plan: PlannedModel
    notes: tuple[str, ...] = field(default=())

    def of_scope(self, scope: str) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.scope == scope)

    def to_json(self) -> dict[str, Any]:
        o = self.options
        return {
            "format": FORMAT,
            "checkpoint": {"fingerprint": self.fingerprint},
            "aspects": list(o.aspects),
            "split": list(o.split),
            "budget": o.budget,
            "bootstrap": {"resamples": RESAMPLES, "share": SHARE, "seed": SEED},
            "reference": {
                "all": self.reference.to_json(),
                "kinds": {k: d.to_json() for k, d in self.reference_kinds.items()},
            },
            "experiments": [f.to_json() for f in self.findings],
            "plan": self.plan.to_json(),
        }


def choose_texts(texts: Iterable[Encoded], split: tuple[int, int]) -> list[Encoded]:
    """Every n-th text of each kind, so that the parts have the same mix; texts without a prediction go."""
    part, parts = split
    seen: dict[str, int] = {}
    found = []
    for text in texts:
        if len(text.ids) < 2:
            continue
        at = seen.get(text.text.kind, 0)
        seen[text.text.kind] = at + 1
        if at % parts == part:
            found.append(text)
    return found


def study(checkpoint: Path, text: Path, options: StudyOptions, progress: Progress) -> Study:
    """Measure a checkpoint.

    Args:
        checkpoint: its folder.
        text: JSONL file of texts, as `rewright score --text` reads it.
        options: what is measured.
        progress: told how far the work is.

    Raises:
        BadInput: a checkpoint or texts that cannot be used.
        MachineError: too little memory or disk space; logits that are no numbers.
    """
    encoded, context = _read_texts(checkpoint, text, options.split)
    source = _open(checkpoint, context)
    model = Adjustable.of(source.weight_types())
    aspects = tuple(a for a in options.aspects if model.modules[a])
    notes = [f"nothing to lower in {a}" for a in options.aspects if a not in aspects]
    units = Units(model, source.config, source.limits.max_context, aspects)
    if not units.modules:
        raise BadInput(
            "has nothing that could be lowered", where=str(checkpoint), fix="choose other --aspects"
        )
    reference = high(model, aspects)
    with tempfile.TemporaryDirectory(prefix="rewright-sensitivity-") as folder:
        progress("reference", 0, 1)
        evaluator = Evaluator(
            source,
            encoded,
            Path(folder),
            reference,
            [lowered(reference, units.modules)],
            threads=options.threads,
        )
        run = StudyRun(evaluator, units, reference, options, progress)
        findings = run.findings()
        plan = run.plan(model, aspects)
    order = ("kind", "module", "forced")
    findings.sort(key=lambda f: (order.index(f.scope), -f.all.kl, f.aspect, f.name))
    assert source.checkpoint is not None
    return Study(
        options,
        source.checkpoint.fingerprint(),
        Divergence.of(evaluator.reference),
        by_kind(evaluator.reference),
        tuple(findings),
        plan,
        tuple(notes),
    )


def _read_texts(checkpoint: Path, text: Path, split: tuple[int, int]) -> tuple[list[Encoded], int]:
    """The chosen texts as tokens, and the tokens of context that they take.

    An indexer chooses only where there are more entries than it keeps, so the context has room for those.
    """
    if not checkpoint.is_dir():
        raise BadInput("no such folder", where=str(checkpoint), fix="name a checkpoint folder")
    config = ModelSource.open(checkpoint, Numerics.FAITHFUL).config
    tokenizer = checkpoint / TOKENIZER_NAME
    if not tokenizer.exists():
        raise BadInput(
            f"has no {TOKENIZER_NAME}, so no text can be scored", where=str(checkpoint), fix="add it"
        )
    encoded = encode_texts(
        Tokenizer.open(tokenizer),
        load_texts(text),
        bos=config.bos_token_id,
        max_context=config.max_position_embeddings,
    )
    chosen = choose_texts(encoded, split)
    if not chosen:
        raise BadInput(
            f"part {split[0]} of {split[1]} has no text", where=str(text), fix="choose fewer parts in --split"
        )
    longest = max(len(e.ids) for e in chosen)
    return chosen, min(max(longest, 4 * config.index_topk + 1), config.max_position_embeddings)


def _open(checkpoint: Path, context: int) -> ModelSource:
    chunk = TARGETS["host"].chunk(None, 1)
    return ModelSource.open(checkpoint, Numerics.FAITHFUL, max_context=context, chunk=chunk)


class StudyRun:
    """The experiments over one evaluator.

    Attributes:
        ranked: what a plan chooses of, each with the divergence that it makes alone: modules, and kinds whose
            modules were not measured.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        units: Units,
        reference: Precision,
        options: StudyOptions,
        progress: Progress,
    ):
        self._evaluator, self._units, self._reference = evaluator, units, reference
        self._options, self._progress = options, progress
        self.ranked: list[tuple[Unit, float]] = []

    def findings(self) -> list[Finding]:
        """Every experiment, kinds first; fills the list of what the plan can choose of."""
        kinds = self._units.kinds()
        done = [(kind, self._finding(kind, at, len(kinds), "kinds")) for at, kind in enumerate(kinds)]
        divergence = [(kind, finding.all.kl) for kind, finding in done]
        most = 0 if self._options.kinds_only else self._options.most_modules
        chosen = expanded(divergence, self._units, most)
        modules = [unit for kind in chosen for unit in self._units.of(kind)]
        found = [finding for _, finding in done]
        self.ranked = [(kind, kl) for kind, kl in divergence if kind not in chosen]
        alone = {(k.aspect, k.modules[0]): f for k, f in done if len(k.modules) == 1}
        for at, unit in enumerate(modules):
            if same := alone.get((unit.aspect, unit.name)):  # the only one of its kind: measured already
                finding = replace(same, name=unit.name, scope="module")
            else:
                finding = self._finding(unit, at, len(modules), "modules")
            found.append(finding)
            self.ranked.append((unit, finding.all.kl))
        for forced in self._options.forced:
            self._progress(f"forcing {forced.name} low", 0, 1)
            results = self._evaluator.measure_forced(self._reference, forced)
            whole = Divergence.of(results)
            found.append(Finding(forced.name, forced.name, "forced", "e4m3", 0, 0, whole, by_kind(results)))
        return found

    def _finding(self, unit: Unit, at: int, total: int, what: str) -> Finding:
        self._progress(f"lowering {what}", at, total)
        return Finding.of(unit, self._evaluator.measure(lowered(self._reference, [unit])))

    def plan(self, model: Adjustable, aspects: Collection[str]) -> PlannedModel:
        """The plan that keeps as few units high as the budget allows, those first that cost most divergence
        for each byte that they save; found by bisection, and always one that was measured."""
        ranked = sorted(self.ranked, key=lambda r: (-r[1] / max(1, r[0].saves), r[0].name))
        order = [unit for unit, _ in ranked]
        measured: dict[int, list[TextResult]] = {}

        def diverges(kept: int) -> Divergence:
            if kept not in measured:
                self._progress("choosing a plan", len(measured), len(order).bit_length() + 1)
                precision = lowered(self._reference, order[kept:])
                measured[kept] = self._evaluator.measure(precision)
            return Divergence.of(measured[kept])

        lowest = diverges(0)
        few, enough = 0, 0 if self._fits(lowest) else len(order)  # with all of them high it is the reference
        while enough - few > 1:
            middle = (few + enough) // 2
            if self._fits(diverges(middle)):
                enough = middle
            else:
                few = middle
        whole = diverges(enough)
        most = sum(unit.saves for unit in order)
        saved = sum(unit.saves for unit in order[enough:])
        plan = plan_with(model, aspects, order, order[:enough])
        return PlannedModel(plan, enough, len(order), saved, most, whole, by_kind(measured[enough]), lowest)

    def _fits(self, found: Divergence) -> bool:
        loss = found.nll - Divergence.of(self._evaluator.reference).nll
        return max(found.kl, loss) <= self._options.budget
