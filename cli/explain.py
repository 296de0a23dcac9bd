"""`rewright explain`: the life of one value."""

from __future__ import annotations

from typing import Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import UsageError


def explain(
    x: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="PATH[@STAGE][?option=value&...]: a compiled model, checkpoint folder or config.json.",
        ),
    ],
    node: Annotated[str, typer.Argument(metavar="NODE", help="A value, for example layers.4.attn.o.groups.")],
    variant: Annotated[str | None, typer.Option(help="Which step function: decode, chunk or score.")] = None,
    target: Annotated[str | None, typer.Option(help="Kernels of the plan: host or sm80.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens in context, for bytes; by default the capacity.")
    ] = None,
    format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Tell the life of a value: where it came from, each rewrite, kernel, bytes, why not fused further.

    Any graph on the way may have the value: of one that was fused away it says what it is a part of now.
    A compiled model keeps its graph after every stage, not after every pass.

    Examples:

      rewright explain examples/tiny-v4 layers.2.attn.o.groups

      rewright explain examples/configs/v4-flash.json layers.4.attn.wo_a --target sm80
    """
    from rewright.cli.colour import coloured
    from rewright.graph_spec import parse_spec
    from rewright.ir.export.json_graph import json_text
    from rewright.report.life import life_of
    from rewright.report.life_text import render_life
    from rewright.report.study import study

    if format not in ("text", "json"):
        raise UsageError(f"unknown format {format!r}", where="--format", fix="text or json")
    spec = parse_spec(x).with_options(variant=variant, target=target)
    with output.ProgressBar() as bar:
        found = study(spec, bar)
    output.notes(found.notes)
    life = life_of(found, node.lstrip("%@"), context)
    if format == "json":
        output.result(json_text(life.to_json()), end="")
    else:
        output.result(coloured(render_life(life)), end="")
