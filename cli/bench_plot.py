"""`rewright bench --plot`: a picture of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli.picture import open_pyplot, save

if TYPE_CHECKING:
    from rewright.cli.bench_compare import Earlier
    from rewright.runtime.bench import Result

Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the results into a .png or .svg; needs matplotlib."),
]


def bars_of(
    measured: Mapping[str, Sequence[Result]], earlier: Earlier | None
) -> list[tuple[str, float, float, float]]:
    """Label, median, slowest and fastest tokens per second of every bar, from the top.

    An earlier run has a median only, which stands for all three.
    """
    bars = []
    for at, (name, results) in enumerate(measured.items()):
        for r in results:
            slow, fast = (r.case.tokens / seconds for seconds in (max(r.seconds), min(r.seconds)))
            bars.append((f"{r.case.name}, {name}", r.tokens_per_second, slow, fast))
            if at == 0 and earlier is not None and (old := earlier.rows.get(r.case.name)):
                bars.append((f"{r.case.name}, before", *[old.tokens_per_second] * 3))
    return bars


def draw(path: Path, measured: Mapping[str, Sequence[Result]], earlier: Earlier | None, title: str) -> None:
    """Write the picture; a line across the end of a bar goes from the slowest run to the fastest.

    Raises:
        MachineError: it cannot be written.
    """
    pyplot = open_pyplot()
    bars = bars_of(measured, earlier)
    ours = next(iter(measured))
    figure, axis = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(bars)))
    for at, (label, median, slow, fast) in enumerate(bars):
        color = "#1f6feb" if label.endswith(f", {ours}") else "#9aa4b2"
        axis.barh(at, median, color=color, xerr=[[median - slow], [fast - median]])
        axis.text(fast, at, f" {median:,.1f}", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(right=1.2 * max(fast for *_, fast in bars))
    axis.set_xlabel("tokens per second: median, slowest and fastest run", fontsize=8)
    axis.set_title(title, loc="left", fontsize=10)
    save(pyplot, figure, path)
