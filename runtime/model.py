"""What an engine asks of whatever executes a compiled model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rewright.ir.variant import Variant, smallest_capacity


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: its next tokens, where they stand, and its state slot."""

    tokens: Sequence[int]
    pos: int
    slot: int


class Model(Protocol):
    """All variants over one set of weights and one state.

    Attributes:
        precision: of the variants that steps run in. It may change between steps: the state of all variants
            is the same.

    One that can also decode without the host has `decode_loop` (`runtime/device.py`).
    """

    precision: str

    def step(self, rows: Sequence[Row], *, all_positions: bool = False) -> Tensor:
        """Run one step and update the state.

        Args:
            rows: sequences with distinct slots and equally many tokens.
            all_positions: logits of every token instead of the last.

        Returns:
            f32[len(rows), V], or f32[len(rows), tokens, V] with all_positions; where the model runs, which
            may be a card that is not done yet.
        """
        ...


def choose_variant(
    variants: Iterable[Variant],
    batch: int,
    tokens: int,
    context: int,
    all_positions: bool,
    precision: str = "low",
) -> Variant:
    """The cheapest variant of a precision that holds `batch` rows of `tokens` tokens up to a context of
    `context`."""
    fitting = [
        v
        for v in variants
        if v.batch >= batch
        and v.tokens >= tokens
        and v.all_positions == all_positions
        and v.precision == precision
    ]
    capacity = smallest_capacity(fitting, context)
    return min(v for v in fitting if v.capacity == capacity)
