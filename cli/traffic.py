"""`rewright graph traffic`: where the bytes of one step go, and the least time they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import UsageError

Spec = Annotated[str, typer.Argument(metavar="X", help="PATH[@STAGE][?option=value&...]")]
Stage = Annotated[str | None, typer.Option(help="Only this stage.")]
Context = Annotated[
    int | None, typer.Option(metavar="TOKENS", help="Tokens of the sequence after the step; default: all.")
]
Top = Annotated[int, typer.Option(min=1, help="Values listed of a stage.")]
CardName = Annotated[
    str | None, typer.Option(help="a100-80g-pcie, a100-80g-sxm, a800-80g-pcie or h200; default: all.")
]
Tp = Annotated[int, typer.Option("--tp", metavar="N", help="Cards that share the weights.")]
AllStages = Annotated[
    bool, typer.Option("--all-stages", help="List values and floors of every stage, not of the last only.")
]


def traffic(
    x: Spec,
    stage: Stage = None,
    context: Context = None,
    top: Top = 20,
    card: CardName = None,
    tp: Tp = 1,
    format: Annotated[str, typer.Option(help="text or json.")] = "text",
    all_stages: AllStages = False,
) -> None:
    """Count the bytes of one step, from the costs of the ops. Nothing is run.

    First the totals of every stage. Then, of the last one, the values that an op writes and others
    read again, and the least time of a step: bytes over the memory bandwidth of a card.

    JSON: `stages` has the totals by stage, `round_trips` the values by stage, `floors` by stage the
    `bytes` of one card (split and replicated weights, constants, state, activations, total, resident)
    and for each of the `cards` seconds, tokens_per_second, bytes_per_second, whether that rate is
    nominal or measured, and whether resident fits its memory. All amounts are bytes.

    Examples:

      rewright graph traffic examples/tiny-v4 --context 256

      rewright graph traffic examples/configs/v4-flash.json@traced --card h200 --tp 2
    """
    from rewright.graph_spec import load_graph, load_stages, parse_spec
    from rewright.ir.export.json_graph import json_text
    from rewright.ir.roofline import CARDS, card_named
    from rewright.ir.traffic_text import (
        measure_stage,
        render_floors,
        render_totals,
        render_trips,
        to_json,
        visible_context,
    )

    if format not in ("text", "json"):
        raise UsageError(f"unknown format {format!r}", where="--format", fix="text or json")
    cards = CARDS if card is None else (card_named(card),)
    spec = parse_spec(x)
    only = stage or spec.stage
    if only and all_stages:
        raise UsageError("--all-stages and a stage exclude each other", where=only, fix="leave one out")
    if only:
        graph, said = load_graph(replace(spec, stage=only))
        graphs = [graph]
    else:
        stages, said = load_stages(spec)
        graphs = list(stages.values())
    graph = graphs[-1]
    visible = visible_context(graph, context)
    found = [measure_stage(g, visible, cards, tp) for g in graphs]
    notes = dict.fromkeys(said)
    if (tokens := graph.attrs["tokens"]) > 1:
        text = f"a step of {tokens} tokens can take longer than its floor, which leaves arithmetic out"
        notes[text] = None
    output.notes(notes)
    detailed = found if all_stages else found[-1:]
    if format == "json":
        output.result(json_text(to_json(graph, visible, top, found, detailed)), end="")
        return
    output.result(f"{graph.name}, {graph.attrs['numerics']}, context {visible:,}: bytes of one step\n")
    output.result(render_totals(found), end="")
    for at in detailed:
        output.result("\n" + render_trips(at, top), end="")
        output.result("\n" + render_floors(at), end="")
