"""Choice of the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_p: keeps the smallest set of most likely tokens whose probability reaches it.
        seed: of the random numbers; equal requests with equal seeds give equal text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"{self.temperature} is not a number from 0 up", where="--temperature")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"{self.top_p} is not above 0 and at most 1", where="--top-p")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"{self.seed} is not from 0 to 2^63 - 1", where="--seed")


class Sampler:
    """Draws the tokens of one sequence; its random numbers belong to it alone, so what else runs in
    the batch changes nothing."""

    def __init__(self, options: SamplingOptions):
        self._options = options
        self._generator = torch.Generator().manual_seed(options.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token id from f32[V] logits; equal logits give the lower id."""
        o = self._options
        if o.temperature == 0:
            return int(logits.argmax())
        scaled = (logits.double() - logits.max()) / o.temperature  # at most 0, so it cannot overflow
        order = scaled.sort(descending=True, stable=True)
        probabilities = order.values.softmax(-1)
        if o.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= o.top_p, 0.0)
        drawn = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(order.indices[drawn])
