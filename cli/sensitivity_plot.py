"""`rewright sensitivity --plot`: a picture of the ranking."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rewright.cli.picture import open_pyplot, save

if TYPE_CHECKING:
    from rewright.sensitivity.study import Study

_COLORS = {"activations": "#1f6feb", "keys": "#2da44e", "weights": "#bf8700", "e4m3": "#cf222e"}
_MOST_BARS = 40


def draw(path: Path, found: Study) -> None:
    """Write a bar for each kind of module and forced rounding, most divergence first, on a logarithmic axis;
    dots are single modules, a line across the end of a bar is its interval.

    Raises:
        MachineError: it cannot be written.
    """
    pyplot = open_pyplot()
    bars = sorted((*found.of_scope("kind"), *found.of_scope("forced")), key=lambda f: -f.all.kl)[:_MOST_BARS]
    modules = found.of_scope("module")
    figure, axis = pyplot.subplots(figsize=(8, 1.2 + 0.27 * len(bars)))
    shown: set[str] = set()
    for at, bar in enumerate(bars):
        d = bar.all
        label = None if bar.aspect in shown else bar.aspect
        shown.add(bar.aspect)
        error = [[max(0.0, d.kl - d.low)], [max(0.0, d.high - d.kl)]]
        axis.barh(at, d.kl, color=_COLORS[bar.aspect], xerr=error, label=label, error_kw={"linewidth": 0.8})
        alone = [m.all.kl for m in modules if (m.kind, m.aspect) == (bar.kind, bar.aspect)]
        axis.plot(alone, [at] * len(alone), "o", color="black", markersize=2.5)
    axis.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8)
    axis.invert_yaxis()
    if any(bar.all.kl > 0 for bar in bars):
        axis.set_xscale("log")
    axis.legend(fontsize=8, loc="lower right")
    axis.set_xlabel("KL(reference || lowered), nats a token; dots: single modules", fontsize=8)
    axis.set_title("What lowering a kind of module does", loc="left", fontsize=10)
    save(pyplot, figure, path)
