"""Choice of the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rewright.ir.errors import MachineError, UsageError
from rewright.runtime import _native
from rewright.runtime.logit_check import broken_logits


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
        self._draws = 0

    @property
    def draws(self) -> int:
        """Tokens drawn so far."""
        return self._draws

    @property
    def options(self) -> SamplingOptions:
        return self._options

    def count(self) -> None:
        """Count a draw that was made elsewhere."""
        self._draws += 1

    def choose(self, logits: Tensor, where: str = "sampling") -> int:
        """The next token id from f32[V] logits; equal logits give the lower id.

        Args:
            where: what an error is about: which token of which sequence.

        Raises:
            MachineError: a logit is NaN, or none is finite.
        """
        o = self._options
        values = logits.float().contiguous()
        draw, self._draws = self._draws, self._draws + 1
        try:
            return _native.sample(values.data_ptr(), values.numel(), o.temperature, o.top_p, o.seed, draw)
        except _native.PlanError as e:
            raise broken_logits(str(e), where) from e


def bad_logits(code: int, where: str) -> MachineError:
    """What is wrong with logits that the card gave this code in place of a token."""
    if code == _native.NONE_FINITE:
        return broken_logits("no logit is finite", where)
    return broken_logits(f"the logit of token {_native.NAN_FIRST - code} is NaN", where)
