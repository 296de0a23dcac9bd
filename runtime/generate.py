"""The generation loop: prompts share a batch, each in a slot of its own, at its own position."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from rewright.ir.errors import BadInput
from rewright.runtime.decode_loop import Start
from rewright.runtime.engine import Engine, require_precision
from rewright.runtime.logit_check import place
from rewright.runtime.repetition import Loop, LoopWatch
from rewright.runtime.sampling import Sampler, SamplingOptions

Finish = Literal["eos", "length", "repetition"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token of request `request`; `finish` is set on its last event.

    `token` is None where a request ends without one (nothing fits after the prompt). `loop` is set once, on
    the token that makes the completion a loop; its places count from the first generated token.
    """

    request: int
    token: int | None
    finish: Finish | None
    loop: Loop | None = None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """When a completion ends, and how its tokens are drawn.

    Attributes:
        max_new_tokens: None goes on to the compiled context.
        stop: token ids that end a completion (and are not part of it).
        stop_on_repetition: end a completion that has become a loop; what made it one is part of it.
    """

    sampling: SamplingOptions
    max_new_tokens: int | None = None
    stop: frozenset[int] = frozenset()
    stop_on_repetition: bool = False


@dataclass(slots=True)
class _Sequence:
    request: int
    slot: int
    sampler: Sampler
    precision: str
    produced: int = 0
    pending: int = field(default=-1)  # the token to feed next
    watch: LoopWatch | None = field(default_factory=LoopWatch)  # None: a loop has been found

    @property
    def name(self) -> str:
        return f"prompt {self.request + 1}"


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    precisions: Sequence[str] = (),
) -> Iterator[Token]:
    """Complete every prompt; events of one request come in order, requests interleave.

    A prompt waits for a free slot, is prefilled alone in chunks, then decodes with all others of its
    precision. Where the model decodes by itself (`Engine.can_loop`) all but the first token of each are drawn
    there.

    Args:
        engine: whose slots are all used.
        prompts: token ids of each.
        options: for all of them.
        precisions: of each prompt; if not given, all have the engine's.

    Raises:
        BadInput: an empty prompt, or one that does not fit the compiled context.
        UsageError: the model was not compiled in one of the precisions.
    """
    for ids in prompts:
        if not ids:
            raise BadInput("the prompt has no tokens", where="prompt", fix="give at least one token")
        engine.check(ids, 0)
    before = engine.precision
    for precision in dict.fromkeys(precisions):
        require_precision(engine.artifact, precision)
    try:
        yield from _complete(engine, prompts, options, precisions or [before] * len(prompts))
    finally:
        engine.precision = before


def _complete(
    engine: Engine, prompts: Sequence[Sequence[int]], options: GenerateOptions, precisions: Sequence[str]
) -> Iterator[Token]:
    waiting = deque(zip(range(len(prompts)), prompts, precisions, strict=True))
    free = list(range(engine.limits.max_batch))
    active: list[_Sequence] = []
    while waiting or active:
        while waiting and free:
            request, ids, precision = waiting.popleft()
            sequence = _Sequence(request, free.pop(0), Sampler(options.sampling), precision)
            engine.precision = precision
            engine.reset(sequence.slot)
            yield from _advance(engine, sequence, engine.prefill(sequence.slot, ids), options, active, free)
        if not active:
            continue
        # Those of one precision at a time: of the sequence that has waited longest.
        engine.precision = active[0].precision
        stepping = [s for s in active if s.precision == engine.precision]
        if engine.can_loop(options.stop):
            for sequence in stepping:
                active.remove(sequence)
            yield from _run_ahead(engine, options, stepping, free, more=bool(waiting))
            active.extend(stepping)
            continue
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
    chosen = -1
    if options.max_new_tokens == sequence.produced:
        event = Token(sequence.request, None, "length")
    else:
        chosen = sequence.sampler.choose(logits, place(sequence.name, engine.length(sequence.slot)))
        event = _produced(engine, sequence, chosen, options)
    yield event
    if event.finish is None:
        sequence.pending = chosen
        active.append(sequence)
    else:
        free.append(sequence.slot)


def _produced(engine: Engine, sequence: _Sequence, token: int, options: GenerateOptions) -> Token:
    """Count a token; what is shown of it, and whether it is the last."""
    sequence.produced += 1
    if token in options.stop:
        return Token(sequence.request, None, "eos")
    loop = sequence.watch.push(token) if sequence.watch is not None else None
    if loop is not None:
        sequence.watch = None
    finish: Finish | None = None
    full = engine.length(sequence.slot) == engine.limits.max_context
    if loop is not None and options.stop_on_repetition:
        finish = "repetition"
    elif full or options.max_new_tokens == sequence.produced:
        finish = "length"
    return Token(sequence.request, token, finish, loop)


def _run_ahead(
    engine: Engine, options: GenerateOptions, active: list[_Sequence], free: list[int], *, more: bool
) -> Iterator[Token]:
    """Decode all of `active` where the model is, until they are over, or with `more` until one is."""
    running = {sequence.slot: sequence for sequence in active}
    active.clear()
    loop = engine.decode_loop([_start(engine, s, options) for s in running.values()], options.stop)
    try:
        for drawn in loop:
            for slot, drawn_token in drawn.items():
                sequence = running.get(slot)
                if sequence is None:  # ended here, not on the card: drawn before that, for nobody
                    continue
                sequence.sampler.count()
                event = _produced(engine, sequence, drawn_token, options)
                if event.finish is None:
                    sequence.pending = drawn_token
                else:
                    del running[slot]
                    free.append(slot)
                    if more or event.finish == "repetition":
                        loop.end()
                yield event
    finally:
        loop.close()
    active.extend(running.values())


def _start(engine: Engine, sequence: _Sequence, options: GenerateOptions) -> Start:
    length = engine.length(sequence.slot)
    most = engine.limits.max_context - length
    if options.max_new_tokens is not None:
        most = min(most, options.max_new_tokens - sequence.produced)
    sampler = sequence.sampler
    return Start(sequence.pending, length, sequence.slot, most, sampler.options, sampler.draws, sequence.name)
