"""`rewright calibrate --plot`: a picture of the errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rewright.cli.picture import open_pyplot, save

if TYPE_CHECKING:
    from rewright.calibration.calibrate import Calibration

_COLORS = {"32": "#1f6feb", "128": "#8250df", "tensor": "#cf222e"}


def draw(path: Path, found: Calibration) -> None:
    """Write the picture: for every site a bar for each block, from 0 to the median error, its line to the
    95th percentile.

    Raises:
        MachineError: it cannot be written.
    """
    pyplot = open_pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.3 * len(found.sites)))
    height = 0.8 / len(_COLORS)
    for place, (block, color) in enumerate(_COLORS.items()):
        shown = [(at, r.static[block]) for at, r in enumerate(found.sites) if block in r.static]
        medians = [100 * e.median for _, e in shown]
        axis.barh(
            [at + (place - 1) * height for at, _ in shown],
            medians,
            height,
            color=color,
            xerr=[[0.0] * len(shown), [100 * (e.p95 - e.median) for _, e in shown]],
            label="one scale a row" if block == "tensor" else f"block {block}",
            error_kw={"linewidth": 0.8},
        )
    names = [report.statistics.site.name for report in found.sites]
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(
        "error of a row with calibrated scales, %: median, and line to the 95th percentile", fontsize=8
    )
    axis.legend(fontsize=8)
    save(pyplot, figure, path)
