"""Refuses logits that are no numbers, and says whose they are."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.errors import MachineError

_FIX = "run it with --reference as well; if that fails too, check the checkpoint's weights"


def place(sequence: str, position: int) -> str:
    """How a message names the token at `position`, counted from 0, of a sequence."""
    return f"{sequence}, position {position}"


def broken_logits(what: str, where: str) -> MachineError:
    """The error about logits from which no token can be chosen."""
    return MachineError(what, where=where, fix=_FIX)


def require_numbers(logits: Tensor, sequence: str, position: int) -> None:
    """Refuse f32[V] from which no token could be chosen: the same ones that a `Sampler` refuses.

    Args:
        logits: for the token at `position`.
        sequence: what the message calls the sequence.
    """
    if not torch.isfinite(logits.max()):  # NaN where any logit is
        raise broken_logits(_fault(logits), place(sequence, position))


def require_likelihoods(nll: Tensor, logits: Tensor, sequence: str, position: int) -> None:
    """Refuse likelihoods that are no numbers; logits with NaN or +inf make them so, whatever the token.

    Args:
        nll: f32[n], of the tokens at `position` and behind it.
        logits: f32[n, V] that they were made of.
        sequence: what the message calls the sequence.
    """
    if bool(nll.isfinite().all()):
        return
    at = int((~nll.isfinite()).nonzero()[0])
    raise broken_logits(_fault(logits[at]), place(sequence, position + at))


def _fault(logits: Tensor) -> str:
    nan = logits.isnan().nonzero()
    if len(nan):
        return f"the logit of token {int(nan[0])} is NaN"
    largest = int(logits.argmax())
    if logits[largest] == torch.inf:
        return f"the logit of token {largest} is infinite"
    if logits[largest] == -torch.inf:
        return "no logit is finite"
    return f"the logit of token {int(logits.argmin())} is infinite"
