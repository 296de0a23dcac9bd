"""The generation loop: prompts share a batch, each in a slot of its own, at its own position."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from rewright.ir.errors import BadInput
from rewright.runtime.engine import Engine
from rewright.runtime.sampling import Sampler, SamplingOptions

Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token of request `request`; `finish` is set on its last event.

    `token` is None where a request ends without one (nothing fits after the prompt).
    """

    request: int
    token: int | None
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """When a completion ends, and how its tokens are drawn.

    Attributes:
        max_new_tokens: None goes on to the compiled context.
        stop: token ids that end a completion (and are not part of it).
    """

    sampling: SamplingOptions
    max_new_tokens: int | None = None
    stop: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Sequence:
    request: int
    slot: int
    sampler: Sampler
    produced: int = 0
    pending: int = field(default=-1)  # the token to feed next


def generate(engine: Engine, prompts: Sequence[Sequence[int]], options: GenerateOptions) -> Iterator[Token]:
    """Complete every prompt; events of one request come in order, requests interleave.

    A prompt waits for a free slot, is prefilled alone in chunks, then decodes with all others.

    Raises:
        BadInput: an empty prompt, or one that does not fit the compiled context.
    """
    for ids in prompts:
        if not ids:
            raise BadInput("the prompt has no tokens", where="prompt", fix="give at least one token")
        engine.check(ids, 0)
    waiting = deque(enumerate(prompts))
    free = list(range(engine.limits.max_batch))
    active: list[_Sequence] = []
    while waiting or active:
        while waiting and free:
            request, ids = waiting.popleft()
            sequence = _Sequence(request, free.pop(0), Sampler(options.sampling))
            engine.reset(sequence.slot)
            yield from _advance(engine, sequence, engine.prefill(sequence.slot, ids), options, active, free)
        if not active:
            continue
        stepping = list(active)
        logits = engine.decode({s.slot: s.pending for s in stepping})
        for sequence in stepping:
            active.remove(sequence)
            yield from _advance(engine, sequence, logits[sequence.slot], options, active, free)


def _advance(
    engine: Engine,
    sequence: _Sequence,
    logits: Tensor,
    options: GenerateOptions,
    active: list[_Sequence],
    free: list[int],
) -> Iterator[Token]:
    """Choose a token; the sequence goes on in `active`, or ends and gives its slot back."""
    token: int | None = None
    finish: Finish | None = None
    if options.max_new_tokens == sequence.produced:
        finish = "length"
    else:
        token = sequence.sampler.choose(logits)
        sequence.produced += 1
        if token in options.stop:
            token, finish = None, "eos"
        elif (
            options.max_new_tokens == sequence.produced
            or engine.length(sequence.slot) == engine.limits.max_context
        ):
            finish = "length"
    yield Token(sequence.request, token, finish)
    if finish is None:
        assert token is not None
        sequence.pending = token
        active.append(sequence)
    else:
        free.append(sequence.slot)
