"""`rewright graph`: dump a graph, or compare two."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.cli.traffic import traffic
from rewright.ir.errors import MachineError, UsageError

if TYPE_CHECKING:
    from rewright.graph_spec import GraphSpec
    from rewright.ir.graph import Graph
    from rewright.ir.plan import Plan

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at graphs.\n\nExample: rewright graph dump examples/tiny-v4",
)
app.command()(traffic)


class Format(StrEnum):
    text = "text"
    json = "json"
    dot = "dot"
    onnx = "onnx"
    html = "html"


class Kind(StrEnum):
    decode = "decode"
    chunk = "chunk"
    score = "score"


_OPTIONS_HELP = (
    "PATH[@STAGE][?option=value&...]: a checkpoint folder, config.json or compiled model. Stages: traced, "
    "canonical, fused, precision, layout; in graph dump also selected and planned. Options: numerics, "
    "max-context, max-batch, chunk, variant, "
    "batch, precision, passes, no-pass, fold-wo, precision-plan, static-scales, target."
)
Source = Annotated[str, typer.Argument(metavar="X", help=_OPTIONS_HELP)]
Spec = Annotated[str, typer.Argument(help=_OPTIONS_HELP)]


@app.command()
def dump(
    x: Source,
    stage: Annotated[
        str | None,
        typer.Option(
            help="traced, canonical, fused, precision, layout, or selected and planned for the plan. "
            "Default: traced; of an artifact its last graph."
        ),
    ] = None,
    module: Annotated[str, typer.Option(help="Only this module, for example layers.2.attn.")] = "",
    variant: Annotated[Kind | None, typer.Option(help="Which step function.")] = None,
    numerics: Annotated[str | None, typer.Option(help="faithful, bf16 or fp32.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Sequences that can run at once.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens of a prefill chunk.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Kernels of the plan, at stages selected and planned and in a page: host or sm80."),
    ] = None,
    format: Annotated[Format, typer.Option(help="Form of the output.")] = Format.text,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Print a graph. Only configuration and tensor headers are read.

    `html` is a page to look at: the graph after every pass up to the stage, or to the plan if none is
    named, with costs, kernels, near misses; one file that needs no network.

    Examples:

      rewright graph dump examples/tiny-v4 --module layers.2.attn

      rewright graph dump examples/configs/v4-flash.json --format onnx -o flash.onnx

      rewright graph dump examples/configs/v4-flash.json@planned --target sm80 --module layers.4

      rewright graph dump examples/configs/v4-flash.json --target sm80 --format html -o report.html
    """
    from dataclasses import replace

    from rewright.graph_spec import PLAN_STAGES, load_graph, load_plan, parse_spec

    if format in (Format.onnx, Format.html) and out is None and sys.stdout.isatty():
        what = "ONNX is binary" if format is Format.onnx else "a page is for a browser"
        raise UsageError(what, where=f"--format {format.value}", fix="write it to a file with -o FILE")
    spec = parse_spec(x).with_options(
        variant=variant.value if variant else None,
        numerics=numerics,
        max_context=max_context,
        max_batch=max_batch,
        chunk=chunk,
    )
    if stage and spec.stage not in (None, stage):
        raise UsageError(f"--stage {stage}, but {x} names another", fix="leave one of them out")
    spec = replace(spec, stage=stage) if stage else spec
    if target is not None:
        spec = spec.with_options(target=target)
    if format is Format.html:
        data, notes = _render_report(spec, module)
    elif spec.stage in PLAN_STAGES:
        plan, notes = load_plan(spec)
        data = _render_plan(plan, format, module)
    else:
        graph, notes = load_graph(spec)
        data = _render(graph, format, module)
    output.notes(notes)
    _write(data, out)


def _write(data: bytes, out: Path | None) -> None:
    """Write a result to a file, or to stdout if there is none."""
    if out is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    try:
        out.write_bytes(data)
    except OSError as e:
        fix = "choose a file in a folder that exists and can be written"
        raise MachineError(f"cannot be written ({e.strerror})", where=str(out), fix=fix) from e


def _render_report(spec: GraphSpec, module: str) -> tuple[bytes, list[str]]:
    from rewright.ir.subgraph import subgraph
    from rewright.report.document import study_document
    from rewright.report.page import render_page
    from rewright.report.study import study

    with output.ProgressBar() as bar:
        found = study(spec, bar)
    subgraph(found.graph, module)  # refuses a module that does not exist
    return render_page(study_document(found, module)).encode(), list(found.notes)


def _render(graph: Graph, format: Format, module: str) -> bytes:
    from rewright.ir.export.dot import graph_to_dot
    from rewright.ir.export.json_graph import graph_to_json, json_text
    from rewright.ir.printer import print_graph
    from rewright.ir.subgraph import subgraph

    if format is Format.json:
        return json_text(graph_to_json(graph, module=module)).encode()
    if format is Format.dot:
        return graph_to_dot(graph, module=module).encode()
    if format is Format.onnx:
        from rewright.ir.export.onnx_graph import graph_to_onnx

        return graph_to_onnx(graph, module=module).SerializeToString(deterministic=True)
    subgraph(graph, module)  # refuses a module that does not exist
    return print_graph(graph, module=module).encode()


def _render_plan(plan: Plan, format: Format, module: str) -> bytes:
    from rewright.codegen.plan_text import print_plan

    if format not in (Format.text, Format.json):
        raise UsageError(f"a plan has no form {format.value}", where="--format", fix="text or json")
    if format is Format.json:
        if module:
            raise UsageError("--module goes with the text of a plan", where="--format json")
        return plan.to_text().encode()
    return print_plan(plan, module=module).encode()


@app.command()
def diff(
    a: Spec,
    b: Spec,
    stat: Annotated[bool, typer.Option("--stat", help="Totals instead of the differences.")] = False,
    module: Annotated[str, typer.Option(help="Only this module, for example layers.2.attn.")] = "",
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens in context, for bytes; by default the capacity.")
    ] = None,
    no_fold: Annotated[
        bool, typer.Option("--no-fold", help="Print every layer, also where many are alike.")
    ] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the graphs differ.")] = False,
    format: Annotated[str, typer.Option(help="text, json or html.")] = "text",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Compare two graphs: what each rewrite made of which nodes, the bytes it saves, all other changes.

    On a terminal lines that are gone, new or changed have colours (NO_COLOR switches them off). `html` is a
    page that shows both graphs side by side.

    Examples:

      rewright graph diff ckpt@traced ckpt@layout --module layers.2.attn

      rewright graph diff 'ckpt@traced?numerics=faithful' 'ckpt@traced?numerics=fp32' --stat

      rewright graph diff 'ckpt@layout?no-pass=fuse_norm_quant' ckpt@layout --format html -o diff.html
    """
    from rewright.cli.colour import coloured
    from rewright.graph_spec import load_graph, parse_spec
    from rewright.ir.diff import diff_graphs
    from rewright.ir.diff_json import to_json
    from rewright.ir.diff_stat import render_stat, stat_json
    from rewright.ir.diff_text import render
    from rewright.ir.export.json_graph import json_text

    if format not in ("text", "json", "html"):
        raise UsageError(f"unknown format {format!r}", where="--format", fix="text, json or html")
    if format == "html":
        if stat:
            raise UsageError("a page shows the totals too", where="--stat", fix="leave it out")
        page, differ = _render_comparison(a, b, module, context)
        _write(page, out)
        if exit_code and differ:
            raise typer.Exit(1)
        return
    (before, notes), (after, more) = load_graph(parse_spec(a)), load_graph(parse_spec(b))
    output.notes(dict.fromkeys([*notes, *more]))
    difference = diff_graphs(before, after)
    if module:
        difference = difference.within(module)
    if format == "json":
        document = stat_json(difference, context) if stat else to_json(difference, context)
        _write(json_text(document).encode(), out)
    else:
        text = render_stat(difference, context) if stat else render(difference, context, fold=not no_fold)
        _write((coloured(text) if out is None else text).encode(), out)
    if exit_code and not (difference.empty and not difference.header):
        raise typer.Exit(1)


def _render_comparison(a: str, b: str, module: str, context: int | None) -> tuple[bytes, bool]:
    """The page that compares two graphs, and whether they differ."""
    from rewright.graph_spec import parse_spec
    from rewright.ir.diff import diff_graphs
    from rewright.report.document import diff_document
    from rewright.report.page import render_page
    from rewright.report.study import study

    with output.ProgressBar() as bar:
        before, after = (study(parse_spec(text), bar, plan=False) for text in (a, b))
    output.notes(dict.fromkeys([*before.notes, *after.notes]))
    difference = diff_graphs(before.graph, after.graph)
    if module:
        difference.within(module)  # refuses a module that does not exist
    page = render_page(diff_document((a, b), difference, module, context, after))
    return page.encode(), not (difference.empty and not difference.header)
