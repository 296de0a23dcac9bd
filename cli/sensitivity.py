"""`rewright sensitivity`: what each module's precision is worth, and a precision plan."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.cli.execution import Threads
from rewright.cli.files import check_place, write_whole
from rewright.cli.picture import check_plot
from rewright.ir.errors import UsageError

if TYPE_CHECKING:
    from rewright.sensitivity.study import Study


class Format(StrEnum):
    md = "md"
    json = "json"
    csv = "csv"


def sensitivity(
    ckpt: Annotated[
        Path, typer.Argument(metavar="CKPT", help="Checkpoint folder: config.json and safetensors shards.")
    ],
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help='JSONL file of {"kind": ..., "text": ...} lines.')
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="PLAN", help="Write the precision plan to this TOML file."),
    ] = None,
    aspects: Annotated[
        str, typer.Option(metavar="LIST", help="What is lowered, by comma: activations, keys, weights.")
    ] = "activations,keys,weights",
    kinds_only: Annotated[
        bool, typer.Option("--kinds-only", help="Lower kinds of modules only, no single module.")
    ] = False,
    modules: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Measure so many modules at most: those of the most sensitive kinds that fit."
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="The plan's largest divergence, and largest loss of likelihood, in nats a token.",
        ),
    ] = 0.01,
    split: Annotated[
        str,
        typer.Option(metavar="I/N", help="Every N-th text of each kind, from the I-th on; halves: 0/2, 1/2."),
    ] = "0/1",
    force_low: Annotated[
        list[str] | None,
        typer.Option(
            "--force-low",
            metavar="NAME",
            help="Also show what rounding to FP8 would do where it never happens: router, attention or hc. "
            "Repeatable; never part of the plan.",
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="Form of the results.")] = Format.md,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw the ranking into a .png or .svg; needs matplotlib."
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Lower one kind of module, then one module, and measure what becomes of the predictions.

    The reference keeps activations and keys in bf16 and weights as stored. Prints a ranking, and writes a
    plan for compile-model --precision-plan that keeps within a budget what matters most.

    Examples:

      rewright sensitivity examples/tiny-v4 --text examples/tiny-v4/text/evaluation.jsonl -o plan.toml

      rewright sensitivity examples/tiny-v4 --text examples/tiny-v4/text/evaluation.jsonl --kinds-only
      --aspects activations,keys --force-low router
    """
    from rewright.sensitivity.experiments import parse_aspects
    from rewright.sensitivity.force_low import parse_forced
    from rewright.sensitivity.study import StudyOptions, parse_split, study

    if kinds_only and modules is not None:
        raise UsageError("--kinds-only and --modules do not go together", where="sensitivity")
    options = StudyOptions(
        parse_aspects(aspects),
        kinds_only,
        modules,
        parse_split(split),
        budget,
        parse_forced(force_low or []),
        threads,
    )
    if out is not None:
        check_place(out, f"-o {out}")
    if plot is not None:
        check_plot(plot)
    begin = time.monotonic()
    with output.ProgressBar() as bar:
        found = study(ckpt, text, options, bar)
    output.notes(found.notes)
    _render(found, format)
    if out is not None:
        write_whole(out, plan_text(found).encode(), f"-o {out}")
        output.note(f"plan written to {out}")
    if plot is not None:
        from rewright.cli.sensitivity_plot import draw

        draw(plot, found)
    output.note(f"{len(found.findings)} experiments in {time.monotonic() - begin:.0f} s")


def plan_text(found: Study) -> str:
    """The plan with what was measured of it as comments."""
    plan = found.plan
    loss = plan.all.nll - found.reference.nll
    return plan.plan.to_text(
        (
            f"KL {plan.all.kl:.4g} nats a token ({plan.all.low:.4g} to {plan.all.high:.4g}), "
            f"loss {loss:.4g}, budget {found.options.budget:g}",
            f"measured over {plan.all.texts} texts, {plan.all.tokens} tokens, against nothing lowered in "
            f"{', '.join(found.options.aspects)}",
            f"checkpoint {found.fingerprint}",
        )
    )


def _render(found: Study, format: Format) -> None:
    from rewright.cli.sensitivity_table import render_csv, render_markdown

    if format is Format.json:
        output.result(json.dumps(found.to_json(), indent=1))
    elif format is Format.csv:
        render_csv(found)
    else:
        render_markdown(found)
