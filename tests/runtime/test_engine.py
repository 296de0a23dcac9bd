"""Sequences in slots: what shares a batch, how a prompt is cut, or what a slot held changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import rewright
from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.numerics import Numerics
from rewright.ir.errors import BadInput
from rewright.runtime.engine import Engine
from rewright.runtime.generate import GenerateOptions, generate
from rewright.runtime.sampling import SamplingOptions

GREEDY = SamplingOptions(temperature=0)
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def engine(compiled_tiny: Path) -> Engine:
    return rewright.load(compiled_tiny)


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """Four prompts of different kinds and lengths; the longest has more than one chunk."""
    tokenizer = engine.artifact.tokenizer()
    texts = [
        "In the beginning God created",
        "def add(a, b):\n    return",
        "<｜User｜>What is 17 + 25?<｜Assistant｜></think>",
        "And it came to pass in those days, " * 15,
    ]
    found = [[0, *tokenizer.encode(text)] for text in texts]
    assert [len(ids) > engine.limits.chunk for ids in found] == [False, False, False, True]
    return found


def complete(
    engine: Engine, prompts: list[list[int]], sampling: SamplingOptions = GREEDY, count: int = NEW_TOKENS
) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in generate(engine, prompts, GenerateOptions(sampling, count)):
        assert event.token is not None
        tokens[event.request].append(event.token)
    return tokens


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy completion of each prompt when nothing else runs."""
    return [complete(engine, [ids])[0] for ids in prompts]


@pytest.fixture(scope="module")
def exact(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The model without roundings: nothing depends on how a prompt is split."""
    out = tmp_path_factory.mktemp("exact") / "out"
    compile_model(tiny_v4, out, CompileOptions(Numerics.FP32, max_context=1024, max_batch=2, target="host"))
    return rewright.load(out)


@pytest.mark.parametrize("parts", [[1, 2, 3, 5, 7], [127, 1, 2], [64, 64, 4], [3, 128]])
def test_a_prompt_in_parts(exact: Engine, prompts: list[list[int]], parts: list[int]) -> None:
    engine, ids = exact, prompts[3]
    engine.reset(0)
    start = 0
    for part in parts:
        engine.prefill(0, ids[start : start + part])
        start += part
    logits = engine.prefill(0, ids[start:])
    assert engine.length(0) == len(ids)
    tokens = [int(logits.argmax())]
    while len(tokens) < NEW_TOKENS:
        tokens.append(int(engine.decode({0: tokens[-1]})[0].argmax()))
    assert tokens == complete(engine, [ids])[0]


def test_prefill_tells_its_progress(engine: Engine, prompts: list[list[int]]) -> None:
    told: list[int] = []
    engine.reset(0)
    engine.prefill(0, prompts[3], progress=told.append)
    assert told == [128, len(prompts[3]) - 128]


def test_a_batch_gives_what_each_gives_alone(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    assert complete(engine, prompts) == alone
    assert complete(engine, prompts[::-1]) == alone[::-1]


def test_more_prompts_than_slots(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    assert engine.limits.max_batch == 4
    many = [0, 1, 2, 0, 1, 2]
    found = complete(engine, [prompts[i] for i in many], count=4)
    assert found == [alone[i][:4] for i in many]


def test_identical_requests_give_identical_text(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    ids = prompts[0]
    assert complete(engine, [ids, ids, ids]) == [alone[0]] * 3
    assert complete(engine, [ids, prompts[1], ids])[::2] == [alone[0]] * 2


def test_identical_requests_draw_identical_text(engine: Engine, prompts: list[list[int]]) -> None:
    """The same seed draws the same, alone and in a batch."""
    ids, sampling = prompts[0], SamplingOptions(temperature=1.5, seed=7)
    single = complete(engine, [ids], sampling)
    assert complete(engine, [ids], sampling) == single
    assert complete(engine, [ids, ids, ids], sampling) == single * 3
    assert complete(engine, [prompts[2], ids, prompts[1]], sampling)[1:2] == single
    assert complete(engine, [ids], SamplingOptions(temperature=1.5, seed=8)) != single


def test_a_slot_is_reused_whatever_it_holds(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    engine.model.state.fill_(0xFF)  # NaN in every float format
    assert complete(engine, [prompts[0]]) == [alone[0]]
    engine.model.state.fill_(0xFF)
    assert complete(engine, [prompts[3]]) == [alone[3]]


def test_scoring_agrees_with_prefill(exact: Engine, prompts: list[list[int]]) -> None:
    """Likelihoods of all tokens, across a chunk boundary, are those of the logits before each."""
    engine, ids = exact, prompts[3]
    nll = engine.score(1, ids)
    assert nll.shape == (len(ids) - 1,)
    for at in (1, 5, 128, 129, len(ids) - 1):
        engine.reset(0)
        logits = engine.prefill(0, ids[:at])
        assert nll[at - 1].item() == pytest.approx(-logits.log_softmax(-1)[ids[at]].item(), abs=1e-3)


def test_a_single_token_has_no_likelihood(engine: Engine) -> None:
    assert engine.score(0, [5]).shape == (0,)


def test_a_prompt_of_one_token(engine: Engine) -> None:
    assert len(complete(engine, [[0]], count=3)[0]) == 3


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(BadInput, match="no tokens"):
        complete(engine, [[0], []])


@pytest.mark.parametrize("token", [-1, 4096, 2**40])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(engine: Engine, token: int) -> None:
    for call in (
        lambda: complete(engine, [[0, token]]),
        lambda: engine.prefill(0, [0, token]),
        lambda: engine.score(0, [0, token]),
        lambda: engine.decode({0: token}),
    ):
        with pytest.raises(BadInput, match=rf"token id {token} is not from 0 to 4095"):
            call()


def test_a_prompt_beyond_the_compiled_context_is_refused(engine: Engine) -> None:
    ids = [5] * (engine.limits.max_context + 1)
    with pytest.raises(BadInput, match="1025 tokens do not fit the compiled maximum of 1024") as caught:
        complete(engine, [[0], ids])
    assert "--max-context" in str(caught.value)


@pytest.fixture(scope="module")
def small(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model for 128 tokens, so that its end is near."""
    out = tmp_path_factory.mktemp("small") / "out"
    compile_model(tiny_v4, out, CompileOptions(max_context=128, chunk=32, target="host"))
    return rewright.load(out)


def events(engine: Engine, ids: list[int], count: int | None) -> list[tuple]:
    found = generate(engine, [ids], GenerateOptions(GREEDY, count))
    return [(event.token is not None, event.finish) for event in found]


def test_generation_ends_where_the_context_does(small: Engine) -> None:
    """The last position holds a token and predicts one more, which needs no position."""
    assert events(small, [5] * 126, None) == [(True, None), (True, None), (True, "length")]
    assert events(small, [5] * 128, None) == [(True, "length")]
    assert events(small, [5] * 126, 2) == [(True, None), (True, "length")]


def test_a_full_slot_takes_no_more(small: Engine) -> None:
    small.reset(0)
    small.prefill(0, [5] * 128)
    with pytest.raises(BadInput, match="129 tokens do not fit"):
        small.decode({0: 5})
    assert small.length(0) == 128
    small.reset(0)
    small.prefill(0, [5])
    assert small.length(0) == 1


def test_a_refused_prefill_leaves_the_sequence_as_it_was(small: Engine) -> None:
    small.reset(0)
    small.prefill(0, [5] * 100)
    with pytest.raises(BadInput, match="129 tokens do not fit"):
        small.prefill(0, [5] * 29)
    assert small.length(0) == 100
