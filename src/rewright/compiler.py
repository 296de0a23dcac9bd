"""The driver: chains the stages from a checkpoint to a compiled model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewright.codegen.artifact import check_replaceable, copy_file, new_artifact, write_text
from rewright.codegen.derive import WithDerived
from rewright.codegen.pack import PackedWeights, layouts_of
from rewright.codegen.plan import make_plan
from rewright.codegen.shards import write_shards
from rewright.codegen.targets import Target
from rewright.dump_folder import DumpFolder
from rewright.frontend.chat_constants import CHAT_CONSTANTS_NAME, read_chat_constants
from rewright.frontend.kv_formats import PLAIN, KvFormats
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.derived import DerivedWeight
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.graph import Graph
from rewright.ir.line_edits import edit_script
from rewright.ir.manifest import (
    CHAT_NAME,
    GENERATION_NAME,
    MANIFEST_NAME,
    PASSES_NAME,
    TOKENIZER_NAME,
    FileEntry,
    Manifest,
    Memory,
    graph_file,
    plan_file,
)
from rewright.ir.plan import Plan
from rewright.ir.precision_plan import Precision, PrecisionPlan
from rewright.ir.printer import print_graph
from rewright.ir.static_scales import StaticScales
from rewright.ir.types import ValueType
from rewright.ir.variant import Variant
from rewright.passes.facts import FoldWo
from rewright.passes.fold_wo import is_folded
from rewright.passes.manager import PassOptions, weight_types_of
from rewright.passes.pipelines import REACHABLE
from rewright.passes.report import Report
from rewright.quality_gate import Quality, QualityGate, QualityLimit
from rewright.rewriting import NO_PLAN, REPRODUCER, require_scales_fit, resolve_plan, rewrite
from rewright.runtime.load import Artifact
from rewright.runtime.memory import require_memory
from rewright.runtime.tokenizer import Tokenizer
from rewright.target_choice import choose_target
from rewright.variant_choice import notes_of, require_difference, variants_of

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and the total."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What changes the result of a compilation, and what is checked on the way.

    Attributes:
        numerics: which roundings of the released model are kept.
        max_context: longest sequence in tokens.
        max_batch: sequences that can run at once.
        chunk: tokens of a prefill chunk; None takes what the target's kernels are made for.
        fold_wo: whether wo_a and wo_b become one matrix; `auto` decides by bytes and numerics.
        passes: which passes run, up to which stage, and whether each rewrite is verified.
        target: set of kernels, a name of `codegen.targets.TARGETS`; "auto" takes what this machine runs.
        quality: how well the compiled model must predict which texts; None asks nothing. With several
            precisions the low one is asked.
        static_scales: calibrated scales of activations; None leaves them to be found as the model runs.
        kv: how keys are stored.
        precisions: of `ir.variant.PRECISIONS`, `low` among them.
        precision: which modules keep more or get less precision than the numerics say.
    """

    numerics: Numerics = Numerics.FAITHFUL
    max_context: int = 4096
    max_batch: int = 1
    chunk: int | None = None
    fold_wo: FoldWo = "auto"
    passes: PassOptions = field(default_factory=PassOptions)
    target: str = "auto"
    quality: QualityLimit | None = None
    static_scales: StaticScales | None = None
    kv: KvFormats = PLAIN
    precision: PrecisionPlan | None = None
    precisions: tuple[str, ...] = ("low",)

    def __post_init__(self) -> None:
        require_difference(self.precisions, self.numerics, self.passes)

    def choose_target(self) -> Target:
        """The set of kernels; `UsageError` for an unknown one."""
        return choose_target(self.target, self.numerics)

    def open(self, path: Path, target: Target) -> ModelSource:
        """A checkpoint folder or a config.json, opened with these options.

        Raises:
            UsageError: limits that the model or the target's kernels do not have, numerics that static scales
                do not go with.
            BadInput: static scales of another checkpoint.
        """
        source = ModelSource.open(
            path,
            self.numerics,
            max_context=self.max_context,
            max_batch=self.max_batch,
            chunk=target.chunk(self.chunk, self.max_batch),
            kv=self.kv,
        )
        if self.static_scales is not None:
            require_scales_fit(self.static_scales, source)
        return source


@dataclass(frozen=True)
class Compiled:
    """What a compilation tells beside the folder that it writes.

    Attributes:
        notes: for the user: ignored configuration keys, tensors left out, things that are missing.
        reports: what the passes did, by variant name.
        seconds: time of each step of the compilation, by name.
        target: what it was compiled for.
        quality: what the quality gate found, None if there was none.
    """

    notes: list[str]
    reports: dict[str, Report]
    seconds: dict[str, float]
    target: str
    quality: Quality | None = None


class Stopwatch:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def _silent(what: str, done: int, total: int) -> None:
    pass


def compile_model(
    checkpoint: str | Path,
    out: str | Path,
    options: CompileOptions | None = None,
    *,
    force: bool = False,
    dump_dir: Path | None = None,
    progress: Progress = _silent,
) -> Compiled:
    """Compile a checkpoint folder into the artifact `out`.

    Args:
        checkpoint: folder with config.json and safetensors shards.
        out: folder to create.
        options: numerics, limits and passes.
        force: replace an existing compiled model.
        dump_dir: folder for the text of every graph after every pass that changed it.
        progress: told how far the work is.

    Raises:
        UserError: with the exit code that docs/errors.md gives for its kind.
    """
    options = options or CompileOptions()
    target = options.choose_target()
    checkpoint, out = Path(checkpoint), Path(out)
    check_replaceable(out, force=force)
    if dump_dir is not None and dump_dir.resolve().is_relative_to(out.resolve()):
        raise UsageError("lies in OUT", where=f"--dump-dir {dump_dir}", fix="choose a folder elsewhere")
    if not checkpoint.is_dir():
        raise BadInput("no such folder", where=str(checkpoint), fix="name a checkpoint folder")
    clock = Stopwatch()
    source = options.open(checkpoint, target)
    notes = list(source.notes)
    gate = None
    if options.quality is not None:
        plain = replace(options, numerics=Numerics.FP32, static_scales=None, kv=PLAIN, precisions=("low",))
        exact = plain.open(checkpoint, target)
        gate = QualityGate(options.quality, checkpoint, exact)
    clock.lap("open")
    failed = out.resolve().with_name(f"{out.resolve().name}.reproducer.json")
    model = rewrite_all(source, options, dump_dir=dump_dir, reproducer=failed, progress=progress)
    notes += notes_of({v: model.reports[v.name] for v in model.graphs})
    clock.lap("trace and passes")
    plans = plan_all(model.graphs, target)
    layouts = layouts_of(plans)
    memory = Memory(max(p.arena_bytes for p in plans), max(p.state_bytes for p in plans))
    clock.lap("plans")
    if target.name == "host":  # what runs on a card may be compiled on a smaller machine
        require_memory(memory.arena_bytes + memory.state_bytes, "state and activations of the compiled model")
    total = sum(t.nbytes for t in model.weights.values())
    with new_artifact(out, force=force, needed_bytes=total) as folder:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress("packing weights", min(done, total), total)

        files = {name: write_text(folder, name, text) for name, text in model.texts.items()}
        texts = {p.variant: p.to_text() for p in plans}
        for variant, text in texts.items():
            if variant.base is not None:
                text = edit_script(texts[variant.base], text)
            files[plan_file(variant)] = write_text(folder, plan_file(variant), text)
        files |= _copy_text_files(checkpoint, folder, source, notes)
        weights = PackedWeights(WithDerived(source.weights(), model.derived), layouts)
        tensors, shards = write_shards(folder, model.weights, weights, advance)
        assert source.checkpoint is not None
        stages = REACHABLE[: REACHABLE.index(options.passes.to) + 1]
        manifest = Manifest(
            model=source.config.to_dict(),
            fingerprint=source.checkpoint.fingerprint(),
            target=target.name,
            abi=target.abi,
            numerics=options.numerics.value,
            kv=str(options.kv),
            passes=options.passes.passes,
            fold_wo=any(map(is_folded, model.derived)),
            precision=model.precision,
            static_scales="" if options.static_scales is None else options.static_scales.digest(),
            stages=stages,
            memory=memory,
            limits=source.limits,
            variants={v: graph_file(stages[-1], v) for v in model.graphs},
            tensors=tensors,
            layouts={name: layout for name, layout in sorted(layouts.items()) if layout},
            files=files | shards,
        )
        write_text(folder, MANIFEST_NAME, manifest.to_text())
        clock.lap("weights")
        quality = None
        if gate is not None:
            quality = gate.check(Artifact(folder, manifest), progress)
            clock.lap("quality")
    return Compiled(notes, model.reports, clock.seconds, target.name, quality)


def plan_all(graphs: Mapping[Variant, Graph], target: Target, progress: Progress = _silent) -> list[Plan]:
    """The plan of every variant; `Refused` names a node that the target has no kernel for."""
    plans = []
    for done, (variant, graph) in enumerate(graphs.items()):
        progress("planning", done, len(graphs))
        plans.append(make_plan(graph, variant, target))
    return plans


@dataclass(frozen=True)
class RewrittenModel:
    """Every variant of a model after the passes.

    Attributes:
        texts: text files of the artifact by path: each variant at each stage, a high one at the last only,
            as its difference from its base, and the pass report.
        reports: what the passes did, by variant name.
        weights: type of every weight that a variant reads, by name.
        derived: those of them that are computed.
        graphs: the last graph of every variant.
        precision: what the precision plan came to.
    """

    texts: dict[str, str]
    reports: dict[str, Report]
    weights: dict[str, ValueType]
    derived: dict[str, DerivedWeight]
    graphs: dict[Variant, Graph]
    precision: Precision = NO_PLAN


def rewrite_all(
    source: ModelSource,
    options: CompileOptions,
    *,
    variants: Sequence[Variant] | None = None,
    dump_dir: Path | None = None,
    reproducer: Path = REPRODUCER,
    progress: Progress = _silent,
) -> RewrittenModel:
    """Trace every variant, or those given (each behind its base), and take it through the passes; a failed
    one leaves the file `reproducer`."""
    precision = NO_PLAN if options.precision is None else resolve_plan(options.precision, source)
    model = RewrittenModel({}, {}, {}, {}, {}, precision)
    variants = variants_of(source, options.precisions) if variants is None else variants
    last: dict[Variant, str] = {}
    dump = DumpFolder(dump_dir) if dump_dir is not None else None
    for done, variant in enumerate(variants):
        progress("rewriting graphs", done, len(variants))

        def observe(stage: str, name: str, graph: Graph, variant: Variant = variant) -> None:
            if not name and (variant.base is None or stage == options.passes.to):
                last[variant] = text = print_graph(graph)
                if variant.base is not None:
                    text = edit_script(last[variant.base], text)
                model.texts[graph_file(stage, variant)] = text
            if dump is not None and (name or stage == "traced"):
                dump.add(variant.name, stage, name, graph)

        result = rewrite(
            source,
            variant,
            options.passes,
            options.fold_wo,
            precision=precision,
            static_scales=options.static_scales,
            observe=observe,
            reproducer=reproducer,
        )
        model.reports[variant.name] = result.report
        model.derived.update(result.derived)
        model.weights.update(weight_types_of(result.graph))
        model.graphs[variant] = result.graph
    progress("rewriting graphs", len(variants), len(variants))
    report = {name: r.to_json() for name, r in model.reports.items()}
    model.texts[PASSES_NAME] = json.dumps(report, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return model


def _copy_text_files(
    checkpoint: Path, folder: Path, source: ModelSource, notes: list[str]
) -> dict[str, FileEntry]:
    """Tokenizer, generation defaults and chat constants, as far as the checkpoint has them."""
    files: dict[str, FileEntry] = {}
    tokenizer = checkpoint / TOKENIZER_NAME
    if tokenizer.exists():
        Tokenizer.open(tokenizer).check_vocabulary(source.config.vocab_size)
        files[TOKENIZER_NAME] = copy_file(tokenizer, folder, TOKENIZER_NAME)
    else:
        notes.append(f"{checkpoint} has no {TOKENIZER_NAME}: the compiled model takes token ids only")
    if (checkpoint / GENERATION_NAME).exists():
        files[GENERATION_NAME] = copy_file(checkpoint / GENERATION_NAME, folder, GENERATION_NAME)
    constants = read_chat_constants(checkpoint)
    if constants is None:
        notes.append(
            f"{checkpoint} has no {CHAT_CONSTANTS_NAME}: chat works, except tools, effort max and response "
            "format"
        )
    else:
        text = json.dumps(constants, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        files[CHAT_NAME] = write_text(folder, CHAT_NAME, text)
    return files
