"""From a model and texts to a file of scales."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from rewright.calibration.errors import QuantError, dynamic_error, saturated, static_error
from rewright.calibration.model import CalibrationModel
from rewright.calibration.run import Watch, run_texts
from rewright.calibration.segments import share
from rewright.calibration.sites import Site, find_sites
from rewright.calibration.statistics import SiteStatistics
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.static_scales import FORMAT, Segment, StaticScales

PER_TENSOR = "tensor"
BLOCKS = ("32", "128", PER_TENSOR)
"""Sizes of a block that scales can be made for; the last is one scale for a whole row."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and the total."""


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How scales are chosen.

    Attributes:
        block: one of `BLOCKS`, for all sites that `sites` does not name.
        sites: (pattern, block) of single sites, `*` standing for anything; a later one wins.
        headroom: binades between the largest magnitude seen and the largest that fits.
        span: binades by which a shared scale may exceed a layer's own.
    """

    block: str = "32"
    sites: tuple[tuple[str, str], ...] = ()
    headroom: int = 1
    span: int = 3

    def __post_init__(self) -> None:
        for where, block in (("--block", self.block), *((f"--site {p}={b}", b) for p, b in self.sites)):
            if block not in BLOCKS:
                raise UsageError(f"{block!r} is no block", where=where, fix=f"choose {', '.join(BLOCKS)}")
        if not 0 <= self.headroom <= 8:
            raise UsageError(f"{self.headroom} is not from 0 to 8", where="--headroom")
        if not 0 <= self.span <= 16:
            raise UsageError(f"{self.span} is not from 0 to 16", where="--span")

    def block_of(self, site: Site) -> str:
        """What was chosen for a site."""
        chosen = [
            block for pattern, block in self.sites if any(fnmatchcase(n, pattern) for n in site.readers)
        ]
        return (self.block, *chosen)[-1]


@dataclass
class SiteReport:
    """One site and what quantisation does to it.

    Attributes:
        statistics: its values.
        block: the block that was chosen.
        segment: of its scales; None on the path of attention.
        static, dynamic: error by block, with scales known beforehand and with those of each row.
        saturated: values beyond their range in the texts that it is checked with.
    """

    statistics: SiteStatistics
    block: str = ""
    segment: str | None = None
    static: dict[str, QuantError] = field(default_factory=dict)
    dynamic: dict[str, QuantError] = field(default_factory=dict)
    saturated: int = 0


@dataclass
class Calibration:
    """The outcome.

    Attributes:
        scales: for the compiler.
        sites: inputs of linears.
        attention: keys, entries and index vectors: apart, for they keep the scales of their rows.
        tokens: how many the scales come from.
        checked: values of the inputs of linears in the texts of the check, 0 without one.
    """

    scales: StaticScales
    sites: list[SiteReport]
    attention: list[SiteReport]
    tokens: int
    checked: int = 0

    @property
    def saturated(self) -> int:
        """Values beyond their range in the texts of the check."""
        return sum(report.saturated for report in self.sites)


def calibrate(
    model: CalibrationModel,
    texts: Sequence[Sequence[int]],
    options: CalibrationOptions,
    *,
    check: Sequence[Sequence[int]] = (),
    progress: Progress,
) -> Calibration:
    """Run texts through a model and choose scales for everything that it quantises for linears.

    Args:
        model: graph and weights.
        texts: token ids that the scales are made of.
        options: how.
        check: other texts, in which values are counted that the scales cannot hold.
        progress: told how far it is.

    Raises:
        BadInput: the model quantises nothing.
        UsageError: a pattern of `options.sites` that names no site.
    """
    sites = find_sites(model.graph)
    inputs = [site for site in sites if site.readers]
    if not inputs:
        raise BadInput(
            "quantises no input of a linear, so there is nothing to calibrate",
            where=model.where,
            fix="calibrate a model with FP8 or FP4 weights, in faithful numerics",
        )
    for pattern, _ in options.sites:
        if not any(fnmatchcase(name, pattern) for site in inputs for name in site.readers):
            names = ", ".join(sorted({site.kind for site in inputs}))
            raise UsageError("names no site", where=f"--site {pattern}", fix=f"sites of a layer: {names}")
    statistics = {site.name: SiteStatistics(site) for site in sites}
    _run(model, sites, texts, lambda site, rows: statistics[site.name].add(rows), "calibrating", progress)
    reports = {name: SiteReport(found) for name, found in statistics.items()}
    scales = _choose(model.fingerprint, [reports[site.name] for site in inputs], options)
    for report in reports.values():
        _measure_dynamic(report)
    tokens = sum(map(len, texts))
    attention = [reports[site.name] for site in sites if not site.readers]
    found = Calibration(scales, [reports[site.name] for site in inputs], attention, tokens)
    if check:
        _check(model, inputs, check, found, reports, progress)
    return found


def _run(
    model: CalibrationModel,
    sites: Sequence[Site],
    texts: Sequence[Sequence[int]],
    take: Callable[[Site, Tensor], None],
    what: str,
    progress: Progress,
) -> None:
    total, done = sum(map(len, texts)), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, total)

    run_texts(model.graph, model.weights, texts, Watch(sites, take), advance)


def _choose(fingerprint: str, reports: Sequence[SiteReport], options: CalibrationOptions) -> StaticScales:
    """Segments for every block size, errors with each, and the scales with the chosen ones."""
    kinds: defaultdict[tuple[str, int], list[SiteReport]] = defaultdict(list)
    for report in reports:
        site = report.statistics.site
        report.block = options.block_of(site)
        kinds[site.kind, site.columns].append(report)
    segments: dict[str, Segment] = {}
    sites: dict[str, str] = {}
    for (_, columns), layers in kinds.items():
        for block in BLOCKS:
            size = columns if block == PER_TENSOR else int(block)
            if columns % size:
                continue
            # Measured with all layers at this block; used by those for which it was chosen.
            for segment, members in share(
                [r.statistics for r in layers], size, options.headroom, options.span
            ):
                for member in members:
                    report = next(r for r in layers if r.statistics is member)
                    report.static[block] = static_error(member.kept, member.site.fmt, segment)
            chosen = [r for r in layers if r.block == block]
            for segment, members in _runs(chosen, size, options):
                if len({r.block for r in layers}) > 1:
                    segment = Segment(f"{segment.name}.b{block}", size, segment.exponents)
                segments[segment.name] = segment
                for report in members:
                    report.segment = segment.name
                    sites |= dict.fromkeys(report.statistics.site.readers, segment.name)
    return StaticScales(fingerprint, segments, sites)


def _runs(
    chosen: list[SiteReport], size: int, options: CalibrationOptions
) -> list[tuple[Segment, list[SiteReport]]]:
    if not chosen:
        return []
    shared = share([r.statistics for r in chosen], size, options.headroom, options.span)
    return [(segment, [r for r in chosen if r.statistics in members]) for segment, members in shared]


def _measure_dynamic(report: SiteReport) -> None:
    site, kept = report.statistics.site, report.statistics.kept
    sizes = {b: site.columns if b == PER_TENSOR else int(b) for b in BLOCKS} if site.readers else {}
    sizes.setdefault(str(site.block), site.block)
    for block, size in sizes.items():
        if kept.shape[0] and site.columns % size == 0:
            report.dynamic[block] = dynamic_error(kept, site.fmt, size)


def _check(
    model: CalibrationModel,
    inputs: Sequence[Site],
    texts: Sequence[Sequence[int]],
    found: Calibration,
    reports: Mapping[str, SiteReport],
    progress: Progress,
) -> None:
    def take(site: Site, rows: Tensor) -> None:
        segment = found.scales.find(site.readers)
        assert segment is not None
        reports[site.name].saturated += saturated(rows, site.fmt, segment)
        found.checked += rows.numel()

    _run(model, inputs, texts, take, "checking", progress)


def to_json(found: Calibration, text: bytes, options: CalibrationOptions) -> dict[str, Any]:
    """The file of scales: what the compiler reads, and what they come from.

    Args:
        found: the calibration.
        text: the file of texts.
        options: how.
    """
    return {
        "format": FORMAT,
        "text": {"sha256": hashlib.sha256(text).hexdigest(), "tokens": found.tokens},
        "options": {
            "block": options.block,
            "sites": [list(pair) for pair in options.sites],
            "headroom": options.headroom,
            "span": options.span,
        },
        **found.scales.to_json(),
        "statistics": {r.statistics.site.name: _site_json(r) for r in found.sites},
        "attention": {r.statistics.site.name: _site_json(r) for r in found.attention},
        "check": {"values": found.checked, "saturated": found.saturated} if found.checked else None,
    }


def _site_json(report: SiteReport) -> dict[str, Any]:
    statistics = report.statistics
    sizes = [b for b in (32, 64, 128) if statistics.site.columns % b == 0 and statistics.rows]
    return {
        "columns": statistics.site.columns,
        "rows": statistics.rows,
        "format": statistics.site.fmt,
        "block": report.block or str(statistics.site.block),
        "segment": report.segment,
        "amax": float(statistics.channel_amax.max()),
        "block_amax_percentiles": {
            str(b): dict(zip(("50", "95", "99.9"), statistics.percentiles(b, (50, 95, 99.9)), strict=True))
            for b in sizes
        },
        "outlier_channels": [list(pair) for pair in statistics.outliers()[:16]],
        "relative_error": {
            name: {b: [e.median, e.p95] for b, e in errors.items()}
            for name, errors in (("static", report.static), ("dynamic", report.dynamic))
        },
        "saturated": report.saturated,
    }


def to_text(value: Mapping[str, Any]) -> str:
    """Canonical JSON of the file."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
