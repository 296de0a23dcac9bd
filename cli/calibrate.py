"""`rewright calibrate`: scales of activations from texts."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.cli.files import check_place, write_whole
from rewright.ir.errors import UsageError

if TYPE_CHECKING:
    from rewright.calibration.calibrate import Calibration


class Format(StrEnum):
    md = "md"
    json = "json"
    csv = "csv"


def calibrate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder, or compiled model.")],
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help='JSONL file of {"kind": ..., "text": ...} lines.')
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="SCALES", help="File to write.")],
    block: Annotated[
        str, typer.Option(help="Elements that share a scale: 32, 128, or tensor for one scale a row.")
    ] = "32",
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=BLOCK",
            help="Another block for single sites, for example 'layers.*.ffn.experts.w2.x=128'. Repeatable.",
        ),
    ] = None,
    headroom: Annotated[
        int, typer.Option(help="Powers of two between the largest magnitude seen and the largest that fits.")
    ] = 1,
    span: Annotated[
        int,
        typer.Option(help="Powers of two by which a shared scale may exceed what a layer needs itself."),
    ] = 3,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Other texts, in which values are counted that do not fit."),
    ] = None,
    format: Annotated[Format, typer.Option(help="Of the table.")] = Format.md,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the errors into a .png or .svg; needs matplotlib."),
    ] = None,
) -> None:
    """Find how large activations get, and write scales that `compile-model --static-scales` uses.

    Prints the error of quantisation at every site: median and 95th percentile over rows of |x - q(x)| / |x|.

    Examples:

      rewright calibrate examples/tiny-v4 --text examples/tiny-v4/text/calibration.jsonl -o scales.json
    """
    from rewright.calibration.calibrate import CalibrationOptions, to_json, to_text
    from rewright.calibration.calibrate import calibrate as measure
    from rewright.calibration.model import CalibrationModel
    from rewright.cli.calibration_table import render
    from rewright.cli.picture import check_plot

    options = CalibrationOptions(block, tuple(map(_pair, site or ())), headroom, span)
    if plot is not None:
        check_plot(plot)
    check_place(out, f"-o {out}")
    opened = CalibrationModel.open(model)
    texts, others = ([] if path is None else opened.read_texts(path) for path in (text, check))
    with output.ProgressBar() as bar:
        found = measure(opened, [e.ids for e in texts], options, check=[e.ids for e in others], progress=bar)
    value = to_json(found, text.read_bytes(), options)
    write_whole(out, to_text(value).encode(), f"-o {out}")
    if format is Format.json:
        output.result(
            json.dumps({"statistics": value["statistics"], "attention": value["attention"]}, indent=1)
        )
    else:
        render(found, as_csv=format is Format.csv)
    if plot is not None:
        from rewright.cli.calibration_plot import draw

        draw(plot, found)
    _say(found)
    output.note(f"scales written to {out}")


def _pair(text: str) -> tuple[str, str]:
    pattern, equals, block = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError("names no block", where=f"--site {text}", fix="write PATTERN=32, =128 or =tensor")
    return pattern, block


def _say(found: Calibration) -> None:
    segments = len(found.scales.segments)
    output.note(f"{len(found.sites)} sites share the scales of {segments} segments, {found.tokens:,} tokens")
    if found.checked:
        output.note(f"check: {found.saturated:,} of {found.checked:,} values do not fit their scales")
