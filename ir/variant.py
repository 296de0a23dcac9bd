"""Variants of the step function: static shapes that one model is compiled for.

A variant is keyed by tokens T, batch B, context capacity, whether logits come out for every position,
and precision. `capacity` bounds the context that reading ops touch; the state always holds max_context.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rewright.ir.errors import UsageError

ALIGN = 128
LARGEST = 2**31 - 1
PRECISIONS = ("low", "high")
"""What a compiled model can have; it always has `low`. docs/variants.md."""
BUCKETS = (8 << 10, 32 << 10, 128 << 10, 1 << 20)


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """One static shape of `step`.

    Attributes:
        tokens: T; 1 is decode.
        batch: B.
        capacity: tokens of context that this variant can read.
        all_positions: logits [B,T,V] for scoring instead of [B,V] of the last valid token.
        precision: one of `PRECISIONS`. Both have the same weights and the same state.
    """

    tokens: int
    batch: int
    capacity: int
    all_positions: bool = False
    precision: str = "low"

    @property
    def kind(self) -> str:
        if self.all_positions:
            return "score"
        return "decode" if self.tokens == 1 else "chunk"

    @property
    def name(self) -> str:
        """File-name-safe identity, for example `chunk128-b1-c4096`, or `chunk128-b1-c4096-high`."""
        tokens = "" if self.kind == "decode" else str(self.tokens)
        precision = "" if self.precision == "low" else f"-{self.precision}"
        return f"{self.kind}{tokens}-b{self.batch}-c{self.capacity}{precision}"

    @property
    def is_high(self) -> bool:
        return self.precision == "high"

    def at(self, precision: str) -> Variant:
        """The same shape in a precision."""
        return replace(self, precision=precision)

    @property
    def base(self) -> Variant | None:
        """The variant as whose difference a compiled model keeps it: of a high one that scores the same
        without logits for every position, of another high one the low one. None where it is kept whole."""
        if not self.is_high:
            return None
        return replace(self, all_positions=False) if self.all_positions else self.at("low")

    def to_json(self) -> dict[str, Any]:
        """Its attributes; the precision only where it is not `low`."""
        value = asdict(self)
        if self.precision == "low":
            del value["precision"]
        return value


@dataclass(frozen=True, slots=True)
class Limits:
    """What a compiled model must be able to hold.

    Attributes:
        max_context: longest sequence in tokens, rounded up to a multiple of 128.
        max_batch: state slots S.
        chunk: tokens of a prefill chunk.
    """

    max_context: int = 4096
    max_batch: int = 1
    chunk: int = 128

    @classmethod
    def of(cls, max_context: int, max_batch: int, chunk: int, position_limit: int) -> Limits:
        """Checked limits; `UsageError` names the option that is out of range."""
        for option, value in (("--max-context", max_context), ("--max-batch", max_batch), ("--chunk", chunk)):
            if not 1 <= value <= LARGEST:
                raise UsageError(f"{option} {value} is not from 1 to {LARGEST}")
        rounded = -(-max_context // ALIGN) * ALIGN
        if max_context > position_limit:
            raise UsageError(
                f"--max-context {max_context} is beyond the model's {position_limit} positions",
                fix=f"choose at most {position_limit}",
            )
        return cls(rounded, max_batch, chunk)

    def capacities(self, index_topk: int) -> list[int]:
        """Context buckets, ascending; the last is max_context.

        Up to 4 * index_topk tokens every compressed entry is kept, so nothing needs a score.
        """
        full = -(-4 * index_topk // ALIGN) * ALIGN
        return sorted({b for b in (full, *BUCKETS) if b < self.max_context} | {self.max_context})

    def variants(self, index_topk: int) -> list[Variant]:
        """Every variant of a compiled model: decode for B = 1, 2, 4, .., S; chunk and score for B = 1."""
        batches = [1 << i for i in range((self.max_batch - 1).bit_length() + 1) if 1 << i < self.max_batch]
        found = []
        for capacity in self.capacities(index_topk):
            found += [Variant(1, b, capacity) for b in [*batches, self.max_batch]]
            found.append(Variant(self.chunk, 1, capacity))
            found.append(Variant(self.chunk, 1, capacity, all_positions=True))
        return list(dict.fromkeys(found))  # a chunk of one token is a decode step


def smallest_capacity(variants: Iterable[Variant], context: int) -> int:
    """The smallest capacity that covers `context` tokens (max over active rows of pos + n_valid)."""
    return min(v.capacity for v in variants if v.capacity >= context)
