"""Divergence over texts and its interval."""

from __future__ import annotations

import itertools
import math

import pytest

from rewright.sensitivity.statistics import Divergence, TextResult, bootstrap, by_kind


def result(kl: float, tokens: int = 10, kind: str = "prose") -> TextResult:
    return TextResult(kind, tokens, 2.0 * tokens, kl, tokens // 2)


def test_means_are_of_tokens() -> None:
    found = Divergence.of([result(1.0, 10), result(5.0, 30)])
    assert (found.texts, found.tokens) == (2, 40)
    assert found.kl == 6 / 40
    assert found.nll == 2.0
    assert found.perplexity == pytest.approx(math.e**2)
    assert found.agreement == 0.5
    assert found.to_json()["kl_interval"] == [found.low, found.high]


def test_equal_texts_have_no_spread() -> None:
    found = Divergence.of([result(0.5)] * 7)
    assert found.low == found.kl == found.high == 0.05


def test_the_interval_is_seeded() -> None:
    sums, tokens = [float(i * i) for i in range(20)], [10] * 20
    assert bootstrap(sums, tokens) == bootstrap(sums, tokens)
    assert bootstrap(sums, tokens) != bootstrap(sums, tokens, seed=1)
    low, high = bootstrap(sums, tokens)
    assert low < sum(sums) / 200 < high


def test_the_interval_of_two_texts() -> None:
    """Drawn with replacement the mean is 0, 1/2 or 1, a quarter, a half and a quarter of the time."""
    assert bootstrap([0.0, 10.0], [10, 10], resamples=4000) == (0.0, 1.0)
    low, high = bootstrap([0.0, 10.0], [10, 10], resamples=4000, share=0.4)
    assert (low, high) == (0.5, 0.5)


def test_the_interval_of_three_texts_is_that_of_all_draws() -> None:
    sums, tokens = [1.0, 2.0, 9.0], [5, 10, 20]
    draws = itertools.product(range(3), repeat=3)
    means = sorted(sum(sums[i] for i in d) / sum(tokens[i] for i in d) for d in draws)
    low, high = bootstrap(sums, tokens, resamples=20000)
    assert (low, high) == pytest.approx((means[0], means[-1]))  # one of 27 draws is more than 2.5 %
    low, high = bootstrap(sums, tokens, resamples=20000, share=0.5)
    assert (low, high) == pytest.approx((means[27 // 4], means[27 * 3 // 4]))


def test_long_texts_count_by_their_tokens() -> None:
    """A text of many tokens is one draw, not many: the interval is as wide as the texts differ."""
    low, high = bootstrap([0.0, 1000.0], [1000, 1000])
    assert (low, high) == (0.0, 1.0)


def test_by_kind_keeps_the_order() -> None:
    found = by_kind([result(1.0, kind="code"), result(2.0), result(3.0, kind="code")])
    assert list(found) == ["code", "prose"]
    assert found["code"].kl == 0.2


def test_overlap() -> None:
    def between(low: float, high: float) -> Divergence:
        return Divergence(1, 1, 0.0, 0.0, low, high, 1.0)

    assert between(0, 1).overlaps(between(1, 2))
    assert not between(0, 1).overlaps(between(1.1, 2))
    assert between(0, 9).overlaps(between(3, 4))
