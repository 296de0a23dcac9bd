"""What `rewright graph traffic` reports: the bytes of a graph's stages, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rewright.ir.errors import UsageError
from rewright.ir.graph import Graph
from rewright.ir.roofline import Card, CardBytes, Floor, card_bytes
from rewright.ir.round_trips import StepBytes, TripGroup, by_layer, round_trips, step_bytes

Cells = Sequence[str]


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """Bytes of one step at one stage.

    Attributes:
        stage: its name.
        step: totals.
        trips: values that are written and read again, layers added up, most bytes first.
        moved: what one of the cards moves and holds.
        floors: the least time on each card asked for.
    """

    stage: str
    step: StepBytes
    trips: list[TripGroup]
    moved: CardBytes
    floors: list[Floor]


def measure_stage(graph: Graph, context: int, cards: Iterable[Card], tp: int) -> StageTraffic:
    """Everything that is reported of a graph.

    Args:
        graph: the graph.
        context: tokens of the sequence after the step.
        cards: cards whose floors are wanted.
        tp: cards that work together.

    Raises:
        UsageError: the weights cannot be split over so many cards.
    """
    moved = card_bytes(graph, tp, context)
    return StageTraffic(
        stage=graph.stage,
        step=step_bytes(graph, context),
        trips=by_layer(round_trips(graph, context)),
        moved=moved,
        floors=[Floor(card, moved) for card in cards],
    )


def visible_context(graph: Graph, context: int | None) -> int:
    """The context to count with, by default the graph's capacity; `UsageError` beyond that."""
    capacity: int = graph.attrs["capacity"]
    if context is None:
        return capacity
    if not 1 <= context <= capacity:
        fix = f"choose from 1 to {capacity}, or a graph with a larger ?max-context"
        raise UsageError(f"{context} is not a context of {graph.name}", where="--context", fix=fix)
    return context


def render_totals(stages: Iterable[StageTraffic]) -> str:
    """One line a stage: nodes, and bytes by kind."""
    rows: list[Cells] = [
        ("stage", "nodes", "act. written", "act. read", "state", "weights", "constants", "total")
    ]
    for at in stages:
        s = at.step
        amounts = (
            s.nodes,
            s.activations_written,
            s.activations_read,
            s.state,
            s.weights,
            s.constants,
            s.total,
        )
        rows.append((at.stage, *(f"{a:,}" for a in amounts)))
    return _table(rows, left={0})


def render_trips(at: StageTraffic, top: int) -> str:
    """The largest round trips of a stage, and what they all add up to."""
    rows: list[Cells] = [("total", "written", "read", "values", "value", "written by", "read by")]
    for t in at.trips[:top]:
        amounts = (t.total, t.written, t.read, t.count)
        rows.append((*(f"{a:,}" for a in amounts), t.name, t.producer, _readers(t.readers)))
    written, read, count = (sum(getattr(t, k) for t in at.trips) for k in ("written", "read", "count"))
    rows.append((f"{written + read:,}", f"{written:,}", f"{read:,}", f"{count:,}", "all", "", ""))
    shown = f"{min(top, len(at.trips))} of {len(at.trips)} lines, layers added up"
    return f"written and read again at stage {at.stage}: {shown}\n" + _table(rows, left={4, 5, 6})


def render_floors(at: StageTraffic) -> str:
    """What a card moves, and the least time of it on each card."""
    b = at.moved
    each = "the card" if b.cards == 1 else f"each of {b.cards} cards"
    amounts = {
        "weights split over cards": b.split,
        "weights on every card": b.replicated,
        "constants": b.constants,
        "state": b.state,
        "activations": b.activations,
        "total": b.total,
        "held: weights, constants, state": b.resident,
    }
    moved = _table([(label, f"{amount:,}") for label, amount in amounts.items()], left={0})
    rows: list[Cells] = [("card", "GB/s", "", "ms", "tok/s", "memory")]
    for floor in at.floors:
        card = floor.card
        rate, ms = f"{card.rate / 1e9:,.0f}", f"{floor.seconds * 1e3:,.3f}"
        rows.append((card.name, rate, card.rate_kind, ms, f"{floor.tokens_per_second:,.1f}", _fits(floor)))
    title = f"floor at stage {at.stage}, bytes that {each} moves in a step\n"
    return title + moved + "\n" + _table(rows, left={0, 2, 5})


def to_json(
    graph: Graph, context: int, top: int, totals: list[StageTraffic], detailed: list[StageTraffic]
) -> dict[str, Any]:
    """The report as JSON values; what each means is in the help of `rewright graph traffic`.

    Args:
        graph: any of the stages' graphs, for its name and attributes.
        context: tokens of the sequence after the step.
        top: most round trips listed of a stage.
        totals: stages whose totals are wanted.
        detailed: stages whose round trips and floors are wanted.
    """
    return {
        "graph": {"name": graph.name, "attrs": dict(graph.attrs)},
        "context": context,
        "stages": {at.stage: {**asdict(at.step), "total": at.step.total} for at in totals},
        "round_trips": {at.stage: [_trip_json(t) for t in at.trips[:top]] for at in detailed},
        "floors": {at.stage: _floors_json(at) for at in detailed},
    }


def _trip_json(t: TripGroup) -> dict[str, Any]:
    return {
        "value": t.name,
        "values": t.count,
        "producer": t.producer,
        "readers": dict(t.readers),
        "written": t.written,
        "read": t.read,
        "total": t.total,
    }


def _floors_json(at: StageTraffic) -> dict[str, Any]:
    cards = {
        f.card.name: {
            "bytes_per_second": f.card.rate,
            "rate": f.card.rate_kind,
            "seconds": f.seconds,
            "tokens_per_second": f.tokens_per_second,
            "memory": f.card.memory,
            "fits": f.fits,
        }
        for f in at.floors
    }
    return {"bytes": {**asdict(at.moved), "total": at.moved.total}, "cards": cards}


def _fits(floor: Floor) -> str:
    needs, has = floor.moved.resident / 1e9, floor.card.memory / 1e9
    return f"{'fits' if floor.fits else 'does not fit'}: needs {needs:,.2f} GB of {has:,.0f} GB"


def _readers(readers: Counter[str]) -> str:
    ordered = sorted(readers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {op}" for op, count in ordered) or "-"


def _table(rows: Sequence[Cells], left: set[int]) -> str:
    """Aligned columns, those in `left` to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
