"""Compares two runs of the same cases, in the format that `rewright score --logits` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """How far two runs agree.

    Attributes:
        cosines: cosine of every logits row, by case.
        argmax: share of logits rows with the same largest logit; 1 without logits.
        greedy: share of greedy tokens that are equal, each case up to its first difference; 1 without.
        nll: mean negative log-likelihood of the first run minus that of the second, by case.
    """

    cosines: dict[str, Tensor] = field(default_factory=dict)
    argmax: float = 1.0
    greedy: float = 1.0
    nll: dict[str, float] = field(default_factory=dict)

    @property
    def mean_cosine(self) -> float:
        return float(torch.cat(list(self.cosines.values())).mean())


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Comparison:
    """Compare two runs; `ValueError` if they are not of the same cases, or hold a NaN or infinity."""
    _require_comparable(ours, theirs)
    cosines: dict[str, Tensor] = {}
    nll: dict[str, float] = {}
    same_argmax: list[Tensor] = []
    same_greedy: list[Tensor] = []
    for key, mine in ours.items():
        case, kind = key.rsplit(".", 1)
        a, b = mine.double(), theirs[key].double()
        if kind == "logits":
            cosines[case] = torch.nn.functional.cosine_similarity(a, b, dim=-1)
            same_argmax.append(a.argmax(-1) == b.argmax(-1))
        elif kind == "nll":
            nll[case] = float(a.mean() - b.mean())
        elif kind == "greedy":
            same_greedy.append((a == b).long().cumprod(0))
    return Comparison(cosines, _share(same_argmax), _share(same_greedy), nll)


def _require_comparable(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    if ours.keys() != theirs.keys():
        raise ValueError(f"only in one run: {', '.join(sorted(ours.keys() ^ theirs.keys()))}")
    for key, mine in ours.items():
        other = theirs[key]
        if mine.shape != other.shape:
            raise ValueError(
                f"{key} has shape {list(mine.shape)} in one run and {list(other.shape)} in the other"
            )
        if not (mine.isfinite().all() and other.isfinite().all()):
            raise ValueError(f"{key} is not finite")
        if key.endswith(".ids") and not torch.equal(mine, other):
            raise ValueError(f"{key} differs: the runs are of different tokens")


def _share(hits: list[Tensor]) -> float:
    return float(torch.cat(hits).double().mean()) if hits else 1.0
