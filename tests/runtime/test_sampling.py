"""Choice of tokens from logits."""

from __future__ import annotations

import math

import pytest
import torch

from rewright.ir.errors import UsageError
from rewright.runtime.sampling import Sampler, SamplingOptions

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])


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
