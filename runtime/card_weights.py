"""Copies the weights of a compiled model to the card."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rewright.runtime.load import Artifact

STAGING_BYTES = 64 << 20
"""Pinned memory that a weight passes through, twice: one half is filled from disk while the card copies the
other."""


def load_weights(
    artifact: Artifact, where: torch.device, advance: Callable[[int], None] | None = None
) -> dict[str, Tensor]:
    """Every weight by name, as stored, as u8 of its bytes on `where`. One that was made on the card stays
    where it is; any other is copied.

    Args:
        artifact: the compiled model.
        where: the card's device.
        advance: told the bytes of each weight when it is copied.

    Raises:
        BadInput, ProblemList: a shard cannot be read, or weights are missing.
    """
    staging = _Staging() if where.type == "cuda" else None
    weights: dict[str, Tensor] = {}
    for name, mapped in artifact.each_weight():
        source = mapped.contiguous().flatten().view(torch.uint8)
        if source.is_cuda:
            weights[name] = source
        else:
            weights[name] = target = torch.empty(source.numel(), dtype=torch.uint8, device=where)
            if staging is None:
                target.copy_(source)
            else:
                staging.copy(target, source)
        if advance is not None:
            advance(source.numel())
    if staging is not None:
        torch.cuda.synchronize(where)
    return weights


class _Staging:
    def __init__(self) -> None:
        self._halves = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._next = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        for to, piece in zip(target.split(STAGING_BYTES), source.split(STAGING_BYTES), strict=True):
            half, copied = self._halves[self._next], self._copied[self._next]
            copied.synchronize()  # at once before its first record
            half[: piece.numel()].copy_(piece)
            to.copy_(half[: piece.numel()], non_blocking=True)
            copied.record()
            self._next ^= 1
