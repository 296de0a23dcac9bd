"""Measures a compiled model: prefill and decode speed, bytes, share of the memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rewright.ir.errors import UsageError
from rewright.ir.traffic import traffic
from rewright.ir.variant import Limits, Variant
from rewright.runtime.decode_loop import Start
from rewright.runtime.engine import Engine
from rewright.runtime.model import choose_variant
from rewright.runtime.sampling import SamplingOptions

SEED = 0
WARM_UP_RUNS = 1
"""Runs of a case before the clock: the first step binds plans, touches weights, and records graphs."""

_STREAM_BYTES = 256 << 20
_CARD_STREAM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        prompt: tokens in the context of each sequence when the clock starts (decode), or that the clock
            runs for (prefill).
        new: tokens that each sequence generates; 0 for prefill.
        batch: sequences.
    """

    prompt: int
    new: int
    batch: int

    @property
    def name(self) -> str:
        """As the table calls it: pp512, tg128@512 x 8."""
        base = f"tg{self.new}@{self.prompt}" if self.new else f"pp{self.prompt}"
        return base if self.batch == 1 else f"{base} x {self.batch}"

    @property
    def middle(self) -> int:
        """Tokens of a sequence after the step in the middle of a decode."""
        return self.prompt + (self.new + 1) // 2

    @property
    def tokens(self) -> int:
        """Tokens that one repetition is counted for."""
        return (self.new or self.prompt) * self.batch


@dataclass(frozen=True, slots=True)
class Result:
    """Times of one case.

    Attributes:
        case: what was measured.
        seconds: of each repetition.
        bytes_per_token: bytes that the ops of one step read and write for each of its tokens, as their
            costs state them at the middle of the measured contexts.
    """

    case: Case
    seconds: tuple[float, ...]
    bytes_per_token: float

    @property
    def tokens_per_second(self) -> float:
        """Median over the repetitions."""
        return self.case.tokens / statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_per_token * self.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        c = self.case
        return {
            "case": c.name,
            "prompt": c.prompt,
            "new": c.new,
            "batch": c.batch,
            "tokens": c.tokens,
            "warm_up_runs": WARM_UP_RUNS,
            "seconds": list(self.seconds),
            "tokens_per_second": self.tokens_per_second,
            "spread": self.spread,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_second": self.bytes_per_second,
        }


def cases(limits: Limits, prompts: Sequence[int], new: int, batches: Sequence[int]) -> list[Case]:
    """Prefill of every prompt length, then decode behind each for every batch size.

    Raises:
        UsageError: what does not fit the compiled context or batch.
    """
    for prompt in prompts:
        if prompt < 1 or new < 0 or prompt + new > limits.max_context:
            raise UsageError(
                f"{prompt} + {new} tokens do not fit the compiled maximum of {limits.max_context}",
                where="-p, -n",
            )
    for batch in batches:
        if not 1 <= batch <= limits.max_batch:
            raise UsageError(f"{batch} is not from 1 to the compiled {limits.max_batch}", where="-b")
    found = [Case(prompt, 0, 1) for prompt in prompts]
    if new:
        found += [Case(prompt, new, batch) for prompt in prompts for batch in batches]
    return found


def measure(engine: Engine, case: Case, repeats: int) -> Result:
    """Run a case `WARM_UP_RUNS` times without the clock, then `repeats` times with it."""
    for _ in range(WARM_UP_RUNS):
        measure_seconds(engine, case)
    seconds = tuple(measure_seconds(engine, case) for _ in range(repeats))
    return Result(case, seconds, _bytes_per_token(engine, case))


def measure_seconds(engine: Engine, case: Case) -> float:
    """Run a case once and say how long it took."""
    return _decode(engine, case) if case.new else _prefill(engine, case)


def _ids(engine: Engine, case: Case) -> list[list[int]]:
    """The same random prompts in every run, others for every sequence."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (case.batch, case.prompt)
    return torch.randint(engine.vocab_size, shape, generator=generator).tolist()


def _prefill(engine: Engine, case: Case) -> float:
    ids = _ids(engine, case)[0]
    engine.reset(0)
    begin = time.perf_counter()
    engine.prefill(0, ids)
    return time.perf_counter() - begin


def _decode(engine: Engine, case: Case) -> float:
    tokens = {}
    for slot, ids in enumerate(_ids(engine, case)):
        engine.reset(slot)
        tokens[slot] = int(engine.prefill(slot, ids).argmax())
    if engine.can_loop():
        return _decode_ahead(engine, case, tokens)
    begin = time.perf_counter()
    for _ in range(case.new):
        logits = engine.decode(tokens)
        tokens = {slot: int(row.argmax()) for slot, row in logits.items()}
    return time.perf_counter() - begin


def _decode_ahead(engine: Engine, case: Case, tokens: dict[int, int]) -> float:
    greedy = SamplingOptions(temperature=0)
    begin = time.perf_counter()
    for _ in engine.decode_loop([Start(t, case.prompt, s, case.new, greedy) for s, t in tokens.items()]):
        pass
    return time.perf_counter() - begin


def _bytes_per_token(engine: Engine, case: Case) -> float:
    """Over the steps of a case, of the variants that execute them."""
    total = 0.0
    for variant, context, weight in _steps(engine, case):
        moved = traffic(engine.artifact.graph(variant), context)
        total += (sum(moved.reads.values()) + moved.written) * weight
    return total / case.tokens


def _steps(engine: Engine, case: Case) -> Iterator[tuple[Variant, int, float]]:
    """Variants of a case with the context that each is counted at, and how often it runs."""
    variants, precision = engine.artifact.manifest.variants, engine.precision
    if case.new:
        variant = choose_variant(variants, case.batch, 1, case.middle, False, precision)
        yield variant, case.middle, case.new
        return
    chunk = engine.limits.chunk
    for end in range(chunk, case.prompt + chunk, chunk):
        context = min(end, case.prompt)
        tokens = min(chunk, context - end + chunk)
        variant = choose_variant(variants, 1, tokens, context, False, precision)
        yield variant, context, 1.0


def card_bandwidth(where: torch.device, advance: Callable[[], None] = lambda: None) -> float:
    """Bytes per second that a card reads from its memory: the best of several sums over 1 GiB."""
    block = torch.ones(_CARD_STREAM_BYTES // 8, dtype=torch.int64, device=where)
    best = float("inf")
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        block.sum()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
        advance()
    return _CARD_STREAM_BYTES / best


def read_bandwidth(threads: int, advance: Callable[[], None] = lambda: None) -> float:
    """Bytes per second that this machine reads from memory: the best of several sums over 256 MB."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        block = torch.ones(_STREAM_BYTES // 8, dtype=torch.int64)
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            block.sum()
            best = min(best, time.perf_counter() - begin)
            advance()
        return _STREAM_BYTES / best
    finally:
        torch.set_num_threads(before)
