"""The generation loop on a model that counts: its next token is always one more than the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rewright.ir.errors import BadInput
from rewright.ir.variant import Limits
from rewright.runtime.engine import Engine
from rewright.runtime.generate import GenerateOptions, Token, generate
from rewright.runtime.repetition import Loop
from rewright.runtime.sampling import SamplingOptions

VOCABULARY = 64


@dataclass
class CountingEngine:
    """Has the face of `Engine`, and notes what it was asked to do."""

    limits: Limits = field(default_factory=lambda: Limits(32, 2, 8))
    calls: list[Any] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)

    check = Engine.check
    can_loop = Engine.can_loop
    model = None
    precision = "low"
    vocab_size = VOCABULARY

    def length(self, slot: int) -> int:
        return self.lengths[slot]

    def reset(self, slot: int) -> None:
        self.lengths[slot] = 0

    def prefill(self, slot: int, ids: Sequence[int]) -> Tensor:
        assert self.lengths[slot] == 0
        self.lengths[slot] = len(ids)
        self.calls.append(("prefill", slot, list(ids)))
        return self._after(ids[-1])

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        self.calls.append(("decode", dict(tokens)))
        for slot in tokens:
            self.lengths[slot] += 1
            assert self.lengths[slot] <= self.limits.max_context
        return {slot: self._after(token) for slot, token in tokens.items()}

    @staticmethod
    def _after(token: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(token + 1), VOCABULARY).float()


def run(
    prompts: list[list[int]],
    count: int | None = None,
    stop: Sequence[int] = (),
    engine: CountingEngine | None = None,
    *,
    stop_on_repetition: bool = False,
) -> list[tuple[int, int | None, str | None]]:
    options = GenerateOptions(SamplingOptions(temperature=0), count, frozenset(stop), stop_on_repetition)
    events = generate(cast(Engine, engine or CountingEngine()), prompts, options)
    return [(e.request, e.token, e.finish) for e in events]


def test_a_stop_token_ends_a_completion_and_is_not_part_of_it() -> None:
    assert run([[1]], 9, stop=[4]) == [(0, 2, None), (0, 3, None), (0, None, "eos")]


def test_any_of_several_stop_tokens_does() -> None:
    assert run([[1]], 9, stop=[50, 3]) == [(0, 2, None), (0, None, "eos")]


def test_a_stop_token_may_come_first() -> None:
    assert run([[1]], 9, stop=[2]) == [(0, None, "eos")]


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    assert run([[4, 1]], 1, stop=[4]) == [(0, 2, "length")]


def test_without_stop_tokens_only_the_length_ends_it() -> None:
    assert run([[1]], 4) == [(0, 2, None), (0, 3, None), (0, 4, None), (0, 5, "length")]


def test_a_stop_token_as_the_last_allowed_one_counts_as_a_stop() -> None:
    assert run([[1]], 3, stop=[4])[-1] == (0, None, "eos")


def test_no_new_tokens() -> None:
    engine = CountingEngine()
    assert run([[1], [2]], 0, engine=engine) == [(0, None, "length"), (1, None, "length")]
    assert [call[0] for call in engine.calls] == ["prefill", "prefill"]


def test_nothing_is_decoded_after_the_last_token() -> None:
    engine = CountingEngine()
    run([[1]], 3, engine=engine)
    assert engine.calls == [("prefill", 0, [1]), ("decode", {0: 2}), ("decode", {0: 3})]


def test_the_end_of_the_context_is_a_length() -> None:
    events = run([[1] * 30])
    assert events == [(0, 2, None), (0, 3, None), (0, 4, "length")]


def test_prompts_wait_for_a_free_slot() -> None:
    """Two slots, three prompts: the first ends early, and the third goes on in its place."""
    engine = CountingEngine()
    events = run([[1], [20], [40]], 3, stop=[3], engine=engine)
    assert engine.calls == [
        ("prefill", 0, [1]),
        ("prefill", 1, [20]),
        ("decode", {0: 2, 1: 21}),
        ("prefill", 0, [40]),
        ("decode", {1: 22, 0: 41}),
        ("decode", {0: 42}),
    ]
    by_request = [[e[1:] for e in events if e[0] == i] for i in range(3)]
    assert by_request == [
        [(2, None), (None, "eos")],
        [(21, None), (22, None), (23, "length")],
        [(41, None), (42, None), (43, "length")],
    ]


def test_every_request_finishes_once() -> None:
    events = run([[i] for i in range(7)], 5, stop=[5])
    ends = [request for request, _, finish in events if finish]
    assert sorted(ends) == list(range(7))
    last = {request: at for at, (request, _, _) in enumerate(events)}
    assert all(events[at][2] for at in last.values())


@dataclass
class CirclingEngine(CountingEngine):
    """Counts to 9 and begins again at 5."""

    limits: Limits = field(default_factory=lambda: Limits(128, 2, 8))

    @staticmethod
    def _after(token: int) -> Tensor:
        return CountingEngine._after(4 if token == 9 else token)


def test_a_loop_is_told_once_where_it_became_one() -> None:
    options = GenerateOptions(SamplingOptions(temperature=0), 60)
    events = list(generate(cast(Engine, CirclingEngine()), [[2]], options))
    # 3 and 4, then 5 to 9 over and over: 32 tokens of it are a loop.
    assert [(at, e.loop) for at, e in enumerate(events) if e.loop] == [(33, Loop(2, 34, 5))]
    assert (len(events), events[-1].finish) == (60, "length")


def test_a_loop_can_end_a_completion_and_the_others_go_on() -> None:
    events = run([[2], [20], [3]], 36, engine=CirclingEngine(), stop_on_repetition=True)
    by_request = [[e[1:] for e in events if e[0] == i] for i in range(3)]
    assert [len(e) for e in by_request] == [34, 36, 33]
    assert [e[-1][1] for e in by_request] == ["repetition", "length", "repetition"]
    assert by_request[0][-1][0] == 6  # the token that makes it a loop is shown


def test_a_loop_that_ends_with_the_length_is_a_repetition_only_if_asked_for() -> None:
    assert run([[2]], 34, engine=CirclingEngine())[-1] == (0, 6, "length")
    assert run([[2]], 34, engine=CirclingEngine(), stop_on_repetition=True)[-1] == (0, 6, "repetition")
    assert run([[2]], 33, engine=CirclingEngine(), stop_on_repetition=True)[-1] == (0, 5, "length")


def test_a_loop_in_the_prompt_is_not_the_models() -> None:
    assert run([[7] * 64 + [10]], 8, engine=CirclingEngine(), stop_on_repetition=True)[-1][2] == "length"


def test_no_prompts() -> None:
    assert run([]) == []


def test_bad_prompts_are_refused_before_anything_runs() -> None:
    for bad, message in (([], "no tokens"), ([VOCABULARY], "token id 64"), ([1] * 33, "33 tokens")):
        engine = CountingEngine()
        with pytest.raises(BadInput, match=message):
            run([[1], bad], engine=engine)
        assert engine.calls == []


def test_tokens_arrive_as_they_are_made() -> None:
    engine = CountingEngine()
    events = generate(cast(Engine, engine), [[1]], GenerateOptions(SamplingOptions(temperature=0), 5))
    assert next(events) == Token(0, 2, None)
    assert engine.calls == [("prefill", 0, [1])]
