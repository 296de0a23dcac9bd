"""Power-of-two scales of sites, shared by neighbouring layers where that costs little."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.calibration.statistics import SiteStatistics
from rewright.ir.formats import block_scale_exponent
from rewright.ir.static_scales import LARGEST_EXPONENT, LEAST_EXPONENT, Segment


def exponents_of(statistics: SiteStatistics, block: int, headroom: int) -> Tensor:
    """i32[columns/block], e of the scale 2^e of every block.

    The scale of the largest magnitude seen, `headroom` binades larger, so that values up to 2^headroom
    times as large are still in range.
    """
    exponent = block_scale_exponent(statistics.block_amax(block), statistics.site.fmt) + headroom
    return exponent.clamp(LEAST_EXPONENT, LARGEST_EXPONENT)


def share(
    statistics: list[SiteStatistics], block: int, headroom: int, span: int
) -> list[tuple[Segment, list[SiteStatistics]]]:
    """Cut the layers of one kind of site into segments that share scales.

    A segment's scales are the largest of its layers'. It grows, layer by layer, as long as they lie at most
    `span` binades above each layer's own, in every block: an outlier of one layer stays its own.
    Floating-point codes lose nothing by that but the smallest values; no value saturates
    that did not before.

    Args:
        statistics: of the layers in order, rows of one width.
        block: elements that share a scale.
        headroom: as in `exponents_of`.
        span: binades.
    """
    found: list[tuple[Tensor, list[Tensor], list[SiteStatistics]]] = []
    for site in statistics:
        own = exponents_of(site, block, headroom)
        if found:
            shared, members, sites = found[-1]
            larger = torch.maximum(shared, own)
            if all(int((larger - e).max()) <= span for e in (*members, own)):
                found[-1] = (larger, [*members, own], [*sites, site])
                continue
        found.append((own, [own], [site]))
    kind = statistics[0].site.kind
    return [
        (Segment(f"{kind}.{number}", block, tuple(shared.tolist())), sites)
        for number, (shared, _, sites) in enumerate(found)
    ]
