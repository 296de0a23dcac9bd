"""`rewright calibrate` as a Markdown table, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from rewright.cli import output
from rewright.cli.bench_table import markdown

if TYPE_CHECKING:
    from rewright.calibration.calibrate import Calibration, SiteReport
    from rewright.calibration.errors import QuantError


def render(found: Calibration, *, as_csv: bool) -> None:
    """Print the inputs of linears, with the errors of calibrated scales; then the path of attention, with
    those of the scales that each row has there."""
    from rewright.calibration.calibrate import BLOCKS

    columns = ["site", "columns", "amax", "outliers", *_pairs(BLOCKS), "block", "segment"]
    if found.checked:
        columns.append("saturated")
    rows = [_row(report, BLOCKS, bool(found.checked)) for report in found.sites]
    if as_csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([columns, *rows])
        output.result(text.getvalue(), end="")
        return
    for line in markdown(columns, rows):
        output.result(line)
    if found.attention:
        output.result("\nkeys, entries and index vectors, which keep the scales of their rows:\n")
        columns = ["site", "columns", "amax", "format", "block", "median", "95 %"]
        for line in markdown(columns, [_attention_row(report) for report in found.attention]):
            output.result(line)


def _pairs(blocks: tuple[str, ...]) -> list[str]:
    return [f"{'' if b == 'tensor' else 'block '}{b} {what}" for b in blocks for what in ("median", "95 %")]


def _row(report: SiteReport, blocks: tuple[str, ...], checked: bool) -> list[str]:
    statistics = report.statistics
    cells = [*_about(report), str(len(statistics.outliers()))]
    for block in blocks:
        cells += _percent(report.static.get(block))
    cells += [report.block, report.segment or ""]
    return [*cells, f"{report.saturated:,}"] if checked else cells


def _attention_row(report: SiteReport) -> list[str]:
    site = report.statistics.site
    return [*_about(report), site.fmt, str(site.block), *_percent(report.dynamic.get(str(site.block)))]


def _about(report: SiteReport) -> list[str]:
    statistics = report.statistics
    return [statistics.site.name, str(statistics.site.columns), f"{float(statistics.channel_amax.max()):.4g}"]


def _percent(error: QuantError | None) -> list[str]:
    return ["", ""] if error is None else [f"{100 * error.median:.2f} %", f"{100 * error.p95:.2f} %"]
