"""A decode loop that runs ahead of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rewright.ir.errors import CompilerBug
from rewright.runtime.logit_check import place
from rewright.runtime.sampling import SamplingOptions, bad_logits

AHEAD = 4
"""Steps under way: enough that the card never waits for the host, few enough that a request which waits for
a slot hardly notices."""


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence that is to decode by itself.

    Attributes:
        token: what it is fed first.
        pos: position of that token.
        slot: its state slot.
        most: tokens that it may draw, at least 1.
        sampling: how they are drawn.
        draw: draws that its request has made before.
        name: what an error calls the sequence; its slot if not given.
    """

    token: int
    pos: int
    slot: int
    most: int
    sampling: SamplingOptions
    draw: int = 0
    name: str = ""


class DecodeLoop:
    """Steps that feed themselves: each draws a token for every sequence, which the next one is fed.

    Iterating gives, step by step, the token drawn for each slot whose sequence is not over. A sequence is
    over behind a token of `stop`, or behind its last. It masks itself on the card then, so what was launched
    beyond leaves its state alone; no token is ever taken back. The last token drawn is not in the state yet:
    the sequence can go on from it in another loop or step.

    The loop must be read to its end, or closed, before anything else runs on the model.
    """

    def __init__(
        self,
        launch: Callable[[int], None],
        read: Callable[[int, int], int],
        starts: Sequence[Start],
        stop: frozenset[int],
        advance: Callable[[int], None],
        ahead: int,
    ):
        """
        Args:
            launch: launches step `at` and waits for nothing.
            read: waits for the token of (step, row).
            starts: sequences by row.
            stop: tokens that end a sequence.
            advance: told the slot whenever its sequence has one token more in the state.
            ahead: steps that are launched before the tokens of the first are read.
        """
        if any(s.most < 1 for s in starts) or ahead < 1:
            raise CompilerBug("a decode loop without a step")
        self._launch, self._read, self._stop, self._advance = launch, read, stop, advance
        self._running = dict(enumerate(starts))
        self._ahead, self._most = ahead, max(s.most for s in starts)
        self._launched = self._taken = 0

    def __iter__(self) -> Iterator[dict[int, int]]:
        while self._running:
            while self._launched < self._most and self._launched - self._taken < self._ahead:
                self._launch(self._launched)
                self._launched += 1
            if self._taken == self._launched:
                return
            yield self._take()

    def end(self) -> None:
        """Launch no more; iterating gives what is under way and ends."""
        self._most = self._launched

    def close(self) -> None:
        """End, and wait for what is under way; its tokens are dropped, and drawn all the same."""
        self.end()
        for _ in self:
            pass

    def _take(self) -> dict[int, int]:
        at = self._taken
        self._taken += 1
        drawn: dict[int, int] = {}
        broken: tuple[int, Start] | None = None
        for row, start in list(self._running.items()):
            token = self._read(at, row)
            self._advance(start.slot)
            if token < 0 and broken is None:
                broken = token, start
            if token < 0 or token in self._stop or at + 1 == start.most:
                del self._running[row]
            drawn[start.slot] = token
        if broken is not None:  # every sequence has been counted first
            code, start = broken
            raise bad_logits(code, place(start.name or f"slot {start.slot}", start.pos + at + 1))
        return drawn
