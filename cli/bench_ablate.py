"""`rewright bench --ablate`: what each pass is worth."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.cli.bench_model import BenchModel
from rewright.cli.execution import open_engine
from rewright.ir.errors import UsageError, UserError

if TYPE_CHECKING:
    from rewright.runtime.ablation import Ablation
    from rewright.runtime.bench import Case
    from rewright.runtime.load import Artifact

Ablate = Annotated[
    bool,
    typer.Option(
        "--ablate",
        help="Decode again with each pass left out, and with all of them: what each is worth. Needs "
        "--random-weights.",
    ),
]


def measure_without(
    model: BenchModel, usual: Artifact, cases: Sequence[Case], repeats: int, threads: int | None
) -> list[Ablation]:
    """Decode with everything, with each pass left out, with all of them, on a card without CUDA graphs, and
    with everything again, which shows what the machine's own changes of speed are worth.

    A row that cannot be planned or run says so, and the others go on.

    Args:
        model: a random model.
        usual: the same, planned with all passes.
        cases: decodes.
        repeats: timed runs of each.
        threads: of the host's kernels.
    """
    import torch

    from rewright.passes.pipelines import pass_names
    from rewright.runtime.ablation import Ablation, measure_row

    left_out = set(model.random.no_pass or ())
    passes = [name for name in pass_names() if name not in left_out]
    rows: list[tuple[str, list[str], bool]] = [("default", [], True)]
    rows += [(f"without {name}", [name], True) for name in passes]
    rows.append(("without any pass", passes, True))
    rows.append(("default again", [], True))
    found: list[Ablation] = []
    with output.ProgressBar() as bar:
        while rows:
            name, without, graphs = rows.pop(0)
            bar("leaving passes out", len(found), len(found) + len(rows) + 1)
            try:
                artifact = model.artifact(without, _quiet) if without else usual
                engine = open_engine(artifact, threads=threads, graphs=graphs, quiet=bool(found))
                found.append(measure_row(engine, name, without, graphs, cases, repeats))
                del engine, artifact
            except UserError as e:
                if not found:  # nothing to compare the others with
                    raise
                found.append(Ablation.refused(name, without, str(e)))
            if name == "default" and found[0].on_card:
                rows.insert(-1, ("no graph", [], False))
            gc.collect()  # the weights of the next model take the place of these
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
    return found


def _quiet(what: str, done: int, total: int) -> None:
    """The bar counts rows, not what each is made of."""


def require_random(model: BenchModel) -> None:
    """Refuse a compiled model: it holds nothing that differs between two compilations of the same input, so
    its manifest does not say where its checkpoint lies."""
    if model.out is not None:
        raise UsageError(
            "passes cannot be left out of a compiled model, and it does not say where its checkpoint lies",
            where=f"--ablate {model.out}",
            fix="measure its configuration: rewright bench --random-weights CONFIG --ablate",
        )


def render(found: Sequence[Ablation], cases: Sequence[Case]) -> None:
    """Print a table for each case; a ratio above 1 is the time that a row takes longer than the default."""
    for at, case in enumerate(cases):
        usual = found[0].steps[at]
        rows = []
        for row in found:
            if row.refusal is not None:
                rows.append((row.name, "not run", "", "", "", ""))
                continue
            step = row.steps[at]
            rows.append(
                (
                    row.name,
                    f"{step.us:,.1f}",
                    f"{step.spread:.0%}",
                    f"{step.us / usual.us:.3f}",
                    f"{len(step.launches):,}" + ("=" if step.launches == usual.launches else " "),
                    f"{step.bytes:,}",
                )
            )
        output.result(("\n" if at else "") + f"{case.name}: a decode step at {case.middle} tokens")
        output.table(("", "us", "spread", "ratio", "launches ", "bytes"), rows)
    output.note(
        "=: launches are those of the default; where nothing else differs, a ratio other than 1 is noise, as "
        "it is of the default's second run"
    )
    for row in found:
        if row.refusal is not None:
            output.note(f"{row.name}: {row.refusal}")
