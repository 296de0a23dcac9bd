"""What is kept of the values of a site: largest magnitudes, and some whole rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rewright.calibration.sites import Site

KEPT_ROWS = 512
"""Rows of a site that percentiles and errors are computed of, drawn evenly from all."""

OUTLIER = 8.0
"""A channel is an outlier if its largest magnitude is this many times that of the median channel."""


@dataclass
class SiteStatistics:
    """Of all rows that a site has seen.

    Attributes:
        site: the site.
        rows: how many.
        channel_amax: f32[columns], largest magnitude of each column.
        kept: f32[n,columns], at most `KEPT_ROWS` of the rows.
    """

    site: Site
    rows: int = 0
    channel_amax: Tensor = field(init=False)
    kept: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.channel_amax = torch.zeros(self.site.columns)
        self.kept = torch.empty(0, self.site.columns)
        # Of its own: which rows are kept depends on no other site.
        self._generator = torch.Generator().manual_seed(0)

    def add(self, rows: Tensor) -> None:
        """Take in rows [n,columns] of any float dtype."""
        if not rows.shape[0]:
            return
        rows = rows.float()
        self.channel_amax = torch.maximum(self.channel_amax, rows.abs().amax(0))
        # Algorithm R: row number i takes a random place of the first i + 1 if that is one of those kept.
        room = max(0, min(KEPT_ROWS - self.kept.shape[0], rows.shape[0]))
        self.kept = torch.cat([self.kept, rows[:room]])
        later = rows[room:]
        if later.shape[0]:
            numbers = self.rows + room + torch.arange(1, later.shape[0] + 1)
            places = (
                torch.rand(later.shape[0], generator=self._generator, dtype=torch.float64) * numbers
            ).long()
            for at in (places < KEPT_ROWS).nonzero().flatten().tolist():
                self.kept[places[at]] = later[at]
        self.rows += rows.shape[0]

    def block_amax(self, block: int) -> Tensor:
        """f32[columns/block], largest magnitude of each block over all rows."""
        return self.channel_amax.unflatten(0, (-1, block)).amax(-1)

    def percentiles(self, block: int, percents: tuple[float, ...]) -> list[float]:
        """Percentiles of the largest magnitude of a block of a row, over blocks and kept rows."""
        amax = self.kept.unflatten(-1, (-1, block)).abs().amax(-1).flatten()
        return torch.quantile(amax, torch.tensor(percents) / 100).tolist()

    def outliers(self) -> list[tuple[int, float]]:
        """Columns that are outliers, and how many times the median channel's magnitude; largest first."""
        ratio = self.channel_amax / self.channel_amax.median().clamp_min(torch.finfo().tiny)
        found = (ratio > OUTLIER).nonzero().flatten().tolist()
        return sorted(((at, float(ratio[at])) for at in found), key=lambda pair: (-pair[1], pair[0]))
