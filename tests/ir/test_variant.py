"""Which shapes a model is compiled for, and which of them a step takes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewright.ir.errors import UsageError
from rewright.ir.variant import BUCKETS, Limits, Variant, smallest_capacity


@pytest.mark.parametrize(
    ("variant", "kind", "name"),
    [
        (Variant(1, 1, 4096), "decode", "decode-b1-c4096"),
        (Variant(1, 8, 128), "decode", "decode-b8-c128"),
        (Variant(128, 1, 4096), "chunk", "chunk128-b1-c4096"),
        (Variant(128, 1, 4096, all_positions=True), "score", "score128-b1-c4096"),
        (Variant(1, 1, 128, all_positions=True), "score", "score1-b1-c128"),
        (Variant(1, 8, 128, precision="high"), "decode", "decode-b8-c128-high"),
        (Variant(128, 1, 4096, True, "high"), "score", "score128-b1-c4096-high"),
    ],
)
def test_kind_and_name(variant: Variant, kind: str, name: str) -> None:
    assert (variant.kind, variant.name) == (kind, name)


def test_to_json() -> None:
    variant = Variant(128, 1, 4096, all_positions=True)
    assert Variant(**json.loads(json.dumps(variant.to_json()))) == variant
    assert "precision" not in variant.to_json()
    assert Variant(**json.loads(json.dumps(variant.at("high").to_json()))) == variant.at("high")


def test_a_precision_is_another_variant_of_the_same_shape() -> None:
    variant = Variant(128, 1, 4096)
    assert not variant.is_high
    assert variant.at("high").is_high
    assert variant.at("high").at("low") == variant != variant.at("high")


@pytest.mark.parametrize(
    ("asked", "rounded"), [(1, 128), (127, 128), (128, 128), (129, 256), (4096, 4096), (5000, 5120)]
)
def test_context_is_rounded_up(asked: int, rounded: int) -> None:
    assert Limits.of(asked, 2, 64, 5000) == Limits(rounded, 2, 64)


@pytest.mark.parametrize(
    ("max_context", "max_batch", "chunk", "message"),
    [
        (0, 1, 1, "--max-context 0 is not from 1 to 2147483647"),
        (1, 10**12, 1, "--max-batch 1000000000000 is not from 1 to 2147483647"),
        (1, 0, 1, "--max-batch 0 is not from 1 to 2147483647"),
        (1, 1, -5, "--chunk -5 is not from 1 to 2147483647"),
        (5001, 1, 1, "--max-context 5001 is beyond the model's 5000 positions"),
    ],
)
def test_limits_out_of_range(max_context: int, max_batch: int, chunk: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Limits.of(max_context, max_batch, chunk, 5000)
    assert caught.value.what == message
    assert caught.value.fix == ("choose at most 5000" if max_context > 5000 else None)


@pytest.mark.parametrize(
    ("max_context", "index_topk", "capacities"),
    [
        (4096, 512, [2048, 4096]),
        (4096, 1024, [4096]),
        (4096, 16, [128, 4096]),
        (4096, 33, [256, 4096]),  # 132 tokens rounded up
        (128, 512, [128]),
        (8 << 10, 512, [2048, 8 << 10]),
        (100 << 10, 512, [2048, 8 << 10, 32 << 10, 100 << 10]),
        (1 << 20, 512, [2048, *BUCKETS]),
    ],
)
def test_capacities(max_context: int, index_topk: int, capacities: list[int]) -> None:
    assert Limits(max_context).capacities(index_topk) == capacities


@pytest.mark.parametrize(
    ("max_batch", "batches"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])],
)
def test_variants_of_each_capacity(max_batch: int, batches: list[int]) -> None:
    variants = Limits(4096, max_batch, 64).variants(512)
    for capacity in (2048, 4096):
        names = [v.name for v in variants if v.capacity == capacity]
        decode = [f"decode-b{b}-c{capacity}" for b in batches]
        assert names == [*decode, f"chunk64-b1-c{capacity}", f"score64-b1-c{capacity}"]
    assert {v.capacity for v in variants} == {2048, 4096}


@given(st.integers(1, 2**20), st.integers(1, 70), st.integers(1, 300), st.integers(1, 2048))
def test_variants_are_distinct_and_cover_every_context(
    max_context: int, max_batch: int, chunk: int, index_topk: int
) -> None:
    limits = Limits.of(max_context, max_batch, chunk, 2**20)
    variants = limits.variants(index_topk)
    assert len({v.name for v in variants}) == len(variants)
    assert {v.batch for v in variants if v.kind == "decode"} >= {1, max_batch}
    assert smallest_capacity(variants, limits.max_context) == limits.max_context
    assert smallest_capacity(variants, 1) == min(v.capacity for v in variants)


def test_smallest_capacity_that_covers_a_step() -> None:
    variants = Limits(4096).variants(512)
    assert [smallest_capacity(variants, n) for n in (1, 2047, 2048, 2049, 4096)] == [
        2048,
        2048,
        2048,
        4096,
        4096,
    ]
