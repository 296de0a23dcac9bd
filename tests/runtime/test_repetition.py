"""Loops in sequences of tokens, against the definition written down as plainly as it can be."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rewright.ir.errors import UsageError
from rewright.runtime.repetition import Loop, LoopWatch, RepetitionRule, find_loop, find_own_loop

FEW = st.integers(0, 2)
RULES = st.builds(RepetitionRule, st.integers(1, 5), st.integers(2, 4), st.integers(0, 12))


def plain(tokens: list[int], rule: RepetitionRule) -> Loop | None:
    """The first loop, found by looking at every end, every unit and every begin."""
    for end in range(1, len(tokens) + 1):
        for unit in range(1, rule.longest_unit + 1):
            begin = end - unit
            while begin > 0 and tokens[begin - 1] == tokens[begin - 1 + unit]:
                begin -= 1
            if begin >= 0 and end - begin >= max(unit * rule.repeats, rule.least_tokens, unit + 1):
                return Loop(begin, end, unit)
    return None


@given(st.lists(FEW, max_size=40), RULES)
def test_it_finds_what_the_definition_says(tokens: list[int], rule: RepetitionRule) -> None:
    assert find_loop(tokens, rule) == plain(tokens, rule)


@given(st.lists(FEW, max_size=20), st.lists(FEW, min_size=1, max_size=5), RULES)
def test_a_unit_often_enough_is_always_found(
    before: list[int], unit: list[int], rule: RepetitionRule
) -> None:
    assume(len(unit) <= rule.longest_unit)
    count = max(rule.repeats, -(-rule.least_tokens // len(unit)))
    assert find_loop(before + unit * count, rule) is not None


@given(st.lists(FEW, max_size=40), RULES)
def test_a_loop_is_one(tokens: list[int], rule: RepetitionRule) -> None:
    loop = find_loop(tokens, rule)
    if loop is None:
        return
    part = tokens[loop.begin : loop.end]
    assert all(a == b for a, b in zip(part, part[loop.unit :], strict=False))
    assert len(part) >= max(loop.unit * rule.repeats, rule.least_tokens)
    before = loop.begin - 1
    assert before < 0 or tokens[before] != tokens[before + loop.unit]


@given(st.lists(FEW, max_size=60), st.lists(FEW, max_size=20), RULES)
def test_what_follows_changes_nothing(tokens: list[int], more: list[int], rule: RepetitionRule) -> None:
    if (loop := find_loop(tokens, rule)) is not None:
        assert find_loop(tokens + more, rule) == loop


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=300))
def test_tokens_that_never_come_twice_are_no_loop(tokens: list[int]) -> None:
    assert find_loop(tokens) is None


def test_the_default_rule() -> None:
    text = list(range(100, 120))
    assert find_loop(text + [1] * 31) is None
    assert find_loop(text + [1] * 32) == Loop(20, 52, 1)
    assert find_loop(text + [1, 2, 3, 4, 5, 6, 7, 8] * 4) == Loop(20, 52, 8)
    assert find_loop(text + list(range(10)) * 3 + list(range(9))) is None
    assert find_loop(text + list(range(64)) * 4) == Loop(20, 276, 64)
    assert find_loop(text + list(range(65)) * 9) is None


def test_rules_that_would_find_everything() -> None:
    for bad in ({"longest_unit": 0}, {"repeats": 1}):
        with pytest.raises(UsageError, match="is no repetition"):
            RepetitionRule(**bad)


RULE = RepetitionRule(4, 3, 0)


def test_a_loop_of_the_text_is_not_the_models() -> None:
    refrain = [9, 8] + [1, 2] * 5 + [7, 6]
    assert find_own_loop(refrain, refrain, RULE) is None
    predicted = [9, 8] + [1, 2] * 5 + [5, 5, 5]
    text = [9, 8] + [1, 2] * 5 + [7, 6, 4]
    assert find_own_loop(predicted, text, RULE) == Loop(12, 15, 1)
    assert find_own_loop(predicted, [0] * 15, RULE) == Loop(2, 8, 2)


@given(st.lists(FEW, max_size=40), RULES)
def test_right_predictions_are_never_a_loop(tokens: list[int], rule: RepetitionRule) -> None:
    assert find_own_loop(tokens, tokens, rule) is None


def test_a_token_costs_microseconds() -> None:
    """A decode step takes some hundred microseconds on a card. The bound is generous: machines differ."""
    watch, count = LoopWatch(), 20_000
    begin = time.process_time()
    for i in range(count):
        watch.push(i * i % 97)
    assert (time.process_time() - begin) / count < 100e-6


def test_no_loop_in_the_golden_run(tiny_v4: Path) -> None:
    """Texts of up to 513 tokens and greedy ones of 48."""
    golden = load_file(tiny_v4 / "golden.safetensors")
    sequences = [t.tolist() for name, t in golden.items() if name.endswith((".ids", ".greedy"))]
    assert len(sequences) == 16
    assert [find_loop(tokens) for tokens in sequences] == [None] * 16
