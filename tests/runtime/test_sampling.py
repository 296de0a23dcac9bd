"""Choice of tokens from logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewright.ir.errors import MachineError, UsageError
from rewright.runtime.sampling import Sampler, SamplingOptions

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])
KNOWN = [2, 1, 0, 1, 1, 1, 2, 1, 0, 1, 2, 2]
"""What seed 7 draws at temperature 1, computed by hand from the philox of the paper."""


def draws(count: int, logits: torch.Tensor = LOGITS, **options: float) -> list[int]:
    sampler = Sampler(SamplingOptions(**options))
    return [sampler.choose(logits) for _ in range(count)]


def test_zero_temperature_takes_the_largest() -> None:
    assert draws(3, temperature=0) == [1, 1, 1]


def test_equal_logits_give_the_lower_id() -> None:
    logits = torch.zeros(5000)
    logits[[70, 4000]] = 1.0
    assert draws(1, logits, temperature=0) == [70]
    assert draws(20, logits, temperature=1, top_p=1e-9) == [70] * 20


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    count = 4_000
    found = torch.tensor(draws(count, temperature=temperature, seed=3)).bincount(minlength=4) / count
    expected = (LOGITS.double() / temperature).softmax(-1)
    # Five standard deviations of the largest count; the seed is fixed, so the outcome is too.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5 * math.sqrt(0.25 / count))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.5, {1}), (0.65, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    """The probabilities are 0.64, 0.24, 0.09 and 0.03, of ids 1, 2, 0 and 3."""
    assert set(draws(500, temperature=1, top_p=top_p)) == kept


def test_a_seed_decides_everything() -> None:
    assert draws(50, seed=1) == draws(50, seed=1)
    assert draws(50, seed=1) != draws(50, seed=2)


def test_samplers_do_not_disturb_each_other() -> None:
    expected = draws(20, seed=1)
    first, second = Sampler(SamplingOptions(seed=1)), Sampler(SamplingOptions(seed=2))
    found = []
    for _ in range(20):
        found.append(first.choose(LOGITS))
        second.choose(LOGITS)
        torch.rand(1)
    assert found == expected


def test_draws_are_a_fixed_function_of_seed_and_count() -> None:
    """The text of a request with a seed must not change with the version, the machine or the threads."""
    assert draws(12, seed=7) == KNOWN


def test_the_order_of_draws_is_that_of_the_calls_to_one_sampler() -> None:
    sampler = Sampler(SamplingOptions(seed=5))
    halves = [sampler.choose(LOGITS) for _ in range(10)] + [sampler.choose(LOGITS) for _ in range(10)]
    assert halves == draws(20, seed=5)
    assert halves[:10] != halves[10:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused_with_the_token(temperature: float) -> None:
    for broken, says in (
        ([0.0, float("nan"), 1.0], "the logit of token 1 is NaN"),
        ([float("nan"), 0.0], "token 0 is NaN"),
        ([float("-inf")] * 3, "no logit is finite"),
        ([0.0, float("inf")], "no logit is finite"),
    ):
        with pytest.raises(MachineError, match=says) as caught:
            draws(1, torch.tensor(broken), temperature=temperature)
        assert "--reference" in str(caught.value)


def test_a_token_with_a_logit_of_minus_infinity_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.1])
    assert set(draws(300, logits, temperature=100)) == {1, 3}


@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    temperature=st.sampled_from([0.1, 1.0, 7.0]),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_what_is_drawn_is_in_the_smallest_likely_set(
    logits: list[int], temperature: float, top_p: float, seed: int
) -> None:
    """A token is drawn only where those before it, more likely or equal with a lower id, have less
    than top_p."""
    values = torch.tensor(logits) / 4
    probabilities = (values.double() / temperature).softmax(-1)
    for token in draws(5, values, temperature=temperature, top_p=top_p, seed=seed):
        before = [i for i, v in enumerate(values) if (-v, i) < (-values[token], token)]
        assert probabilities[before].sum() < top_p + 1e-12


@given(logits=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_zero_temperature_takes_the_first_of_the_largest(logits: list[float]) -> None:
    assert draws(1, torch.tensor(logits), temperature=0) == [logits.index(max(logits))]


def test_logits_may_be_a_view_with_gaps() -> None:
    wide = torch.full((4, 3), 9.0)
    wide[:, 1] = LOGITS
    assert draws(20, wide[:, 1], seed=3) == draws(20, LOGITS, seed=3)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([-300.0, 300.0, 299.9])
    assert set(draws(200, logits, temperature=temperature)) == ({1} if temperature < 1 else {0, 1, 2})


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.1}, "--top-p"),
        ({"top_p": float("nan")}, "--top-p"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**63}, "--seed"),
    ],
)
def test_options_out_of_range(options: dict, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingOptions(**options)
    assert caught.value.where == where


def test_options_at_their_limits() -> None:
    SamplingOptions(temperature=0, top_p=1, seed=0)
    assert draws(1, seed=2**63 - 1, top_p=5e-324) == [1]
