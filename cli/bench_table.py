"""`rewright bench` as a Markdown table, and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rewright.cli import output

if TYPE_CHECKING:
    from rewright.cli.bench_compare import Pair
    from rewright.runtime.bench import Result

_MEMORY = {
    "process": "of the process",
    "card_allocated": "allocated on the card",
    "card_reserved": "reserved there by torch",
    "card_in_use": "in use there by all programs, as the driver counts",
}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a Markdown table whose columns align as plain text too.

    Args:
        columns: headings.
        rows: cells.
        left: so many first columns are text, those behind are numbers.
    """
    widths = [max(3, *(len(row[i]) for row in (columns, *rows))) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths))
    return [line(columns), f"| {' | '.join(rule)} |", *map(line, rows)]


def render_markdown(record: Mapping[str, Any], measured: Mapping[str, Sequence[Result]]) -> None:
    """Print the results and the peak memory.

    Args:
        record: what JSON has of the run.
        measured: results by what ran; the first is ours. The bytes of peers are not known, only ours are
            counted: their columns stay empty.
    """
    ours, ceiling = record["target"], record["read_bytes_per_second"]
    own = {r.case: r for r in measured[ours]}
    columns = ["model", "size", "runs on", "test", "tok/s", "spread", "MB/token", "GB/s", "of ceiling"]
    high = ", high" if record["precision"] == "high" else ""
    model = f"{record['model']['type']} {record['model']['layers']}L {record['numerics']}{high}"
    size = _size(record["model"]["weight_bytes"])
    rows = []
    for name, results in measured.items():
        for r in results:
            row = [model, size, name, r.case.name, f"{r.tokens_per_second:,.1f}", f"{r.spread:.0%}"]
            row += _moved(r, ceiling) if name == ours else [""] * 3
            if len(measured) > 1:
                ratio = own[r.case].tokens_per_second / r.tokens_per_second
                row.append("" if name == ours else f"{ratio:,.1f}x")
            rows.append(row)
    if len(measured) > 1:
        columns.append(f"{ours} is")
    for line in markdown(columns, rows, left=4):
        output.result(line)
    said = [f"{_size(n)} {_MEMORY[k]}" for k, n in record["peak_memory"].items() if n is not None]
    if said:
        output.result(f"\npeak memory: {', '.join(said)}")


def render_csv(record: Mapping[str, Any], pairs: Sequence[Pair] | None) -> None:
    """Print a line for each result, with all that JSON says of the run in each.

    Args:
        record: what JSON has of the run.
        pairs: what an earlier run is compared with; None without --compare.
    """
    compared = {p.case: p for p in pairs or ()}
    head = _flat(record)
    lines = []
    for name, results in record["results"].items():
        for r in results:
            line = {**head, "runs_on": name, **r, "seconds": json.dumps(r["seconds"])}
            own = name == record["target"]  # the bytes are those of our ops, not of a peer's
            line["share_of_ceiling"] = r["bytes_per_second"] / record["read_bytes_per_second"] if own else ""
            if pairs is not None:
                pair = compared.get(r["case"]) if own else None
                line["old_tokens_per_second"] = pair.old.tokens_per_second if pair else ""
                line["ratio"] = pair.ratio if pair else ""
            lines.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    output.result(text.getvalue(), end="")


def _moved(r: Result, ceiling: float) -> list[str]:
    """Bytes of a token, bytes of a second, and their share of the ceiling."""
    rate = r.bytes_per_second
    return [f"{r.bytes_per_token / 1e6:,.2f}", f"{rate / 1e9:,.2f}", f"{rate / ceiling:.1%}"]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Single values of a record; those of an object in it have its name before theirs."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping) and key != "results":
            found.update(_flat(value, f"{prefix}{key}_"))
        elif not isinstance(value, list | Mapping):
            found[prefix + key] = "" if value is None else value
    return found
