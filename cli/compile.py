"""`compile-model`: checkpoint -> compiled model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import MachineError, UsageError

if TYPE_CHECKING:
    from rewright.compiler import Compiled, CompileOptions
    from rewright.passes.report import Report

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT",
        help="Checkpoint folder: config.json and safetensors shards. With --dry-run also a config.json.",
    ),
]
Out = Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="Folder to create.")]
MaxContext = Annotated[int, typer.Option(help="Longest sequence in tokens, prompt and completion.")]
MaxBatch = Annotated[int, typer.Option(help="Sequences that can run at once.")]
Chunk = Annotated[
    int | None, typer.Option(help="Tokens of a prefill chunk; if not given, 128 on host and 8 on sm80.")
]
Numerics = Annotated[
    str,
    typer.Option(
        help="faithful keeps every rounding of the released model, bf16 drops the quantisation of "
        "activations before linears, fp32 has no rounding."
    ),
]
Kv = Annotated[
    str,
    typer.Option(
        metavar="FORMATS",
        help="How keys are stored: bf16, or packed as the codes that they are rounded to (same results, half "
        "the memory); behind it exceptions by comma, packed,csa=fp4 for example. Kinds are window, csa, hca "
        "and index; fp4 rounds more.",
    ),
]
FoldWo = Annotated[str, typer.Option(help="Fold wo_a and wo_b into one matrix: always, auto or never.")]
Passes = Annotated[
    str | None, typer.Option("--passes", metavar="LIST", help="Run only these passes, by comma.")
]
NoPass = Annotated[
    list[str] | None, typer.Option("--no-pass", metavar="NAME", help="Leave a pass out. Repeatable.")
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="STAGE",
        help="Last stage that is made: traced, canonical, fused, precision or layout.",
    ),
]
Verify = Annotated[bool, typer.Option("--verify", help="Run every rewritten region before and after.")]
Explain = Annotated[bool, typer.Option("--explain", help="Print what each pass did, and why not more.")]
DumpDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write the graphs after every pass into this folder.")
]
Timings = Annotated[Path | None, typer.Option(metavar="FILE", help="Write times as JSON.")]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--precision-plan",
        metavar="FILE",
        help="TOML file: which modules keep more or get less precision (`rewright sensitivity` writes one).",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        help="Kernels that execute it: host (this processor), sm80 (A100, A800), or auto for what runs here."
    ),
]
MaxNllLoss = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Refuse the model if it predicts the texts of --text worse than the checkpoint without rounding "
        "by more than X nats a token.",
    ),
]
QualityText = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help='JSONL file of {"kind": ..., "text": ...} lines.'),
]
StaticScales = Annotated[
    Path | None,
    typer.Option(
        "--static-scales",
        metavar="FILE",
        help="Quantise activations by the scales of this file, which rewright calibrate has written.",
    ),
]
Variants = Annotated[
    str,
    typer.Option(
        "--variants",
        metavar="LIST",
        help="low, or low,high: high variants beside, which quantise no activation before linears and share "
        "weights and state with the others.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print sizes and write no model.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing compiled model.")]


def compile_model(
    ckpt: Checkpoint,
    out: Out = None,
    max_context: MaxContext = 4096,
    max_batch: MaxBatch = 1,
    chunk: Chunk = None,
    numerics: Numerics = "faithful",
    kv: Kv = "bf16",
    fold_wo: FoldWo = "auto",
    passes: Passes = None,
    no_pass: NoPass = None,
    to: To = "layout",
    verify: Verify = False,
    explain: Explain = False,
    dump_dir: DumpDir = None,
    timings: Timings = None,
    max_nll_loss: MaxNllLoss = None,
    text: QualityText = None,
    static_scales: StaticScales = None,
    dry_run: DryRun = False,
    force: Force = False,
    target: Target = "auto",
    variants: Variants = "low",
    precision_plan: PlanFile = None,
) -> None:
    """Compile a checkpoint into a folder that `rewright generate` runs.

    Examples:

      compile-model examples/tiny-v4 -o out --max-context 8192

      compile-model examples/tiny-v4 -o out --explain --no-pass fuse_norm_quant

      compile-model examples/tiny-v4 -o out --max-nll-loss 0.01 --text examples/tiny-v4/text/evaluation.jsonl

      compile-model examples/tiny-v4 -o out --kv packed

      compile-model examples/tiny-v4 -o out --variants low,high

      compile-model examples/tiny-v4 -o out --precision-plan plan.toml

      compile-model examples/configs/v4-flash.json --dry-run --explain
    """
    from rewright.compiler import CompileOptions
    from rewright.compiler import compile_model as compile_checkpoint
    from rewright.frontend.kv_formats import parse_kv
    from rewright.frontend.numerics import parse_numerics
    from rewright.ir.precision_plan import read_plan
    from rewright.ir.static_scales import read_scales
    from rewright.passes.facts import parse_fold_wo
    from rewright.passes.manager import PassOptions
    from rewright.quality_gate import QualityLimit
    from rewright.variant_choice import parse_precisions

    begin = time.monotonic()
    if (max_nll_loss is None) != (text is None):
        raise UsageError("--max-nll-loss and --text go together", where="compile-model")
    options = CompileOptions(
        parse_numerics(numerics),
        max_context,
        max_batch,
        chunk,
        parse_fold_wo(fold_wo),
        PassOptions.of(passes, tuple(no_pass or ()), to, verify),
        target,
        None if max_nll_loss is None or text is None else QualityLimit(max_nll_loss, text),
        static_scales=None if static_scales is None else read_scales(static_scales),
        kv=parse_kv(kv),
        precisions=parse_precisions(variants),
        precision=None if precision_plan is None else read_plan(precision_plan),
    )
    if dry_run:
        if options.quality is not None:
            raise UsageError("--max-nll-loss goes with -o", where="--dry-run", fix="leave it out")
        if timings is not None or dump_dir is not None:
            raise UsageError("--timings and --dump-dir go with -o", where="--dry-run", fix="leave them out")
        _print_sizes(ckpt, options, explain)
        return
    if ckpt.is_file():
        raise UsageError(
            "is a configuration without weights",
            where=str(ckpt),
            fix="name a checkpoint folder, or add --dry-run for sizes and --explain for the passes",
        )
    if out is None:
        raise UsageError("no folder to create", where="-o", fix="name one with -o OUT, or ask with --dry-run")
    with output.ProgressBar() as bar:
        done = compile_checkpoint(ckpt, out, options, force=force, dump_dir=dump_dir, progress=bar)
    output.notes(done.notes)
    if explain:
        _explain(done.reports)
    if (quality := done.quality) is not None:
        output.note(
            f"quality: {quality.loss:.4g} nats a token lost, {max_nll_loss:g} are allowed ({quality.nll:.4f} "
            f"instead of {quality.reference:.4f} over {quality.tokens:,} tokens)"
        )
    if timings is not None:
        _write_timings(timings, done, time.monotonic() - begin)
    output.note(f"compiled for target {done.target} in {time.monotonic() - begin:.1f} s")
    output.result(str(out))


def _print_sizes(ckpt: Path, options: CompileOptions, explain: bool) -> None:
    from rewright.ir.errors import BadInput
    from rewright.sizes import measure, render

    if not ckpt.exists():
        raise BadInput("no such file or folder", where=str(ckpt), fix="check the path")
    with output.ProgressBar() as bar:
        sizes, reports, notes = measure(ckpt, options, bar)
    output.notes(notes)
    if explain:
        _explain(reports)
    output.result(render(sizes), end="")


def _explain(reports: Mapping[str, Report]) -> None:
    """The whole table for the largest decode step and the largest chunk of the low precision; of the others
    what remains."""
    from rewright.passes.report import render, render_line

    low = [name for name, report in reports.items() if "precision" not in report.attrs]
    kinds = {name.partition("-")[0]: name for name in low}  # the last has the largest capacity
    shown = [name for kind, name in kinds.items() if not kind.startswith("score")]
    for name, report in reports.items():
        if name in shown:
            output.result(render(report), end="\n")
    for name, report in reports.items():
        if name not in shown:
            output.result(render_line(report))


def _write_timings(path: Path, done: Compiled, total: float) -> None:
    value = {
        "seconds": {**done.seconds, "total": total},
        "passes": {
            name: {p.name: {"seconds": p.seconds, "verify_seconds": p.verify_seconds} for p in report.passes}
            for name, report in done.reports.items()
        },
    }
    try:
        path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as e:
        raise MachineError(
            f"cannot be written ({e.strerror})", where=str(path), fix="choose another file"
        ) from e
