"""How far a model's predictions lie from a reference's, over texts, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

RESAMPLES = 1000
SHARE = 0.95
"""Of the resampled means that lie in an interval."""
SEED = 0


@dataclass(frozen=True, slots=True)
class TextResult:
    """Sums over the predicted tokens of a text, in nats.

    Attributes:
        kind: of text.
        tokens: how many were predicted.
        nll: negative log-likelihood of the text.
        kl: KL(reference || model) of the distributions of the next token.
        agreements: places where both find the same token most likely.
    """

    kind: str
    tokens: int
    nll: float
    kl: float
    agreements: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over the tokens of several texts.

    Attributes:
        texts, tokens: how many.
        nll: nats a token.
        kl: KL(reference || model), nats a token.
        low, high: interval of `kl` over resampled texts.
        agreement: share of places where both find the same token most likely.
    """

    texts: int
    tokens: int
    nll: float
    kl: float
    low: float
    high: float
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @classmethod
    def of(cls, results: Sequence[TextResult]) -> Divergence:
        """Of some texts, at least one."""
        tokens = sum(r.tokens for r in results)
        low, high = bootstrap([r.kl for r in results], [r.tokens for r in results])
        return cls(
            len(results),
            tokens,
            sum(r.nll for r in results) / tokens,
            sum(r.kl for r in results) / tokens,
            low,
            high,
            sum(r.agreements for r in results) / tokens,
        )

    def overlaps(self, other: Divergence) -> bool:
        """Whether the two intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high

    def to_json(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "nll": self.nll,
            "perplexity": self.perplexity,
            "kl": self.kl,
            "kl_interval": [self.low, self.high],
            "top1_agreement": self.agreement,
        }


def by_kind(results: Sequence[TextResult]) -> dict[str, Divergence]:
    """The divergence over the texts of each kind, in order of appearance."""
    kinds = dict.fromkeys(r.kind for r in results)
    return {kind: Divergence.of([r for r in results if r.kind == kind]) for kind in kinds}


def bootstrap(
    sums: Sequence[float],
    tokens: Sequence[int],
    *,
    resamples: int = RESAMPLES,
    share: float = SHARE,
    seed: int = SEED,
) -> tuple[float, float]:
    """Interval of the mean of a token, from texts drawn again with replacement.

    A text is drawn as a whole: its tokens depend on each other, so single ones would make the interval too
    narrow.

    Args:
        sums: of each text.
        tokens: of each text.
        resamples: how often as many texts are drawn as there are.
        share: of the resampled means that lie between the two ends.
        seed: of the draws.
    """
    values, counts = torch.tensor(sums, dtype=torch.float64), torch.tensor(tokens, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(sums), (resamples, len(sums)), generator=generator)
    means = values[drawn].sum(1) / counts[drawn].sum(1)
    outside = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)
    low, high = means.quantile(outside).tolist()
    return low, high
