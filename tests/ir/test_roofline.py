"""Floors: bytes and times by hand, the published shares of V4-Flash, splits that do not go."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import UsageError
from rewright.ir.graph import Graph
from rewright.ir.parser import parse
from rewright.ir.roofline import CARDS, Card, CardBytes, Floor, card_bytes, card_named
from rewright.ir.tensor_parallel import TensorParallel, is_split, legal_sizes, split_axes
from rewright.ir.types import parse_type
from rewright.ir.variant import Variant
from rewright.passes.facts import Facts
from rewright.passes.manager import PassOptions, run_passes

SMALL = """\
graph small {batch=3, capacity=128, tokens=1}
stage traced
ir 1

input %tokens : i32[3,1]
input %pos : i32[3]
input %n_valid : i32[3]
input %slot : i32[3]
state %layers.0.window : bf16[3,8,64]

.:
  @embed.weight : bf16[32,64]
  %embed : bf16[3,1,64] = embed(%tokens, @embed.weight) {out="bf16"}

layers.0:
  @norm.weight : bf16[64]
  %norm : bf16[3,1,64] = rms_norm(%.embed, @norm.weight) {eps=1e-06}
  %window.next : bf16[3,8,64] = ring_write(%.layers.0.window, %norm, %.pos, %.n_valid, %.slot)

.:
  @head.weight : bf16[32,64]
  %logits : f32[3,1,32] = linear(%layers.0.norm, _, @head.weight, _) {out="f32"}

return logits = %logits
next %layers.0.window = %layers.0.window.next
"""
ROW = 3 * 64 * 2  # bytes of an activation


@pytest.fixture(scope="module")
def flash_source(repo_root: Path) -> ModelSource:
    return ModelSource.open(repo_root / "examples" / "configs" / "v4-flash.json", Numerics.FAITHFUL)


@pytest.fixture(scope="module")
def flash(flash_source: ModelSource) -> Graph:
    return flash_source.graph(Variant(1, 1, 4096))


@pytest.mark.parametrize("cards", [1, 2, 4])
def test_small_graph_by_hand(cards: int) -> None:
    assert card_bytes(parse(SMALL), cards) == CardBytes(
        cards=cards,
        tokens=3,
        split=ROW + 4096 // cards,  # three rows of the embedding, each from one card; the head
        replicated=128,
        constants=0,
        state=ROW,  # written
        # embed, norm and logits written; embed read once, norm twice; four inputs of three i32
        activations=2 * ROW + 3 * 32 * 4 + 3 * ROW + 4 * 12,
        resident=2 * 4096 // cards + 128 + 3 * 8 * 64 * 2,
    )


def test_a_floor_is_bytes_over_bandwidth() -> None:
    moved = CardBytes(2, 3, split=100, replicated=40, constants=7, state=3, activations=50, resident=90)
    assert moved.total == 200
    floor = Floor(Card("toy", nominal=1000, memory=90), moved)
    assert (floor.seconds, floor.tokens_per_second, floor.fits) == (0.2, 15.0, True)
    assert not Floor(Card("toy", nominal=1000, memory=89), moved).fits
    measured = Card("toy", nominal=1000, memory=90, measured=500)
    assert (measured.rate, measured.rate_kind) == (500, "measured")
    assert Floor(measured, moved).seconds == 0.4


def test_cards() -> None:
    rates = {card.name: (card.rate, card.rate_kind, card.memory) for card in CARDS}
    assert rates == {
        "a100-80g-pcie": (1_935e9, "nominal", 80e9),
        "a100-80g-sxm": (2_039e9, "nominal", 80e9),
        "a800-80g-pcie": (1_935e9, "nominal", 80e9),
        "h200": (4_340e9, "measured", 141e9),
    }
    assert card_named("h200") is CARDS[-1]
    with pytest.raises(UsageError, match=r"a100-80g-pcie, .*, h200"):
        card_named("h100")


def test_flash_on_one_card(flash: Graph) -> None:
    """The weights are those that tests/frontend/test_bytes.py asserts."""
    moved = card_bytes(flash, 1, 1024)
    assert moved.split + moved.replicated == 11_212_055_916
    assert moved.split == pytest.approx(5_574.6e6 + 3_449.3e6 + 1_082.2e6, rel=1e-4)
    assert moved.resident == pytest.approx(156_015_698_140, rel=1e-3)
    assert moved.resident > 156_015_698_140
    assert moved.activations / moved.total < 0.01
    floors = {card.name: Floor(card, moved) for card in CARDS}
    assert floors["h200"].seconds == moved.total / 4.34e12
    assert floors["h200"].seconds == pytest.approx(2.59e-3, rel=0.01)
    assert not any(floor.fits for floor in floors.values())


@pytest.mark.parametrize(("cards", "published"), [(2, 6.164e9), (4, 3.638e9), (8, 2.374e9)])
def test_flash_shares(flash: Graph, cards: int, published: float) -> None:
    """Published for experts split by width. They count every row of `ape`, a step reads one of each."""
    alone, moved = card_bytes(flash, 1, 1024), card_bytes(flash, cards, 1024)
    unread = 11_217_580_396 - 11_212_055_916
    assert moved.split + moved.replicated + unread == pytest.approx(published, abs=1e6)
    assert moved.split == pytest.approx(alone.split / cards, rel=1e-5)
    whole = ("replicated", "constants", "state", "activations", "tokens")
    assert [getattr(moved, key) for key in whole] == [getattr(alone, key) for key in whole]
    assert all(Floor(card, moved).fits for card in CARDS)


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        (3, r"attention heads: 64 .*; expert width: 2,048 .*; index heads: 64 .*; output groups: 8 .*; voc"),
        (5, "attention heads: 64 is no multiple of 5"),
        (16, "output groups: 8 is no multiple of 16"),
        (0, "not a number of cards"),
        (-2, "not a number of cards"),
    ],
)
def test_flash_cannot_be_split_so(flash: Graph, cards: int, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"--tp {cards}: {reason}(.|\n)*sizes: 1, 2, 4, 8$"):
        card_bytes(flash, cards)


def test_every_stage_splits_the_same_weights(flash: Graph, flash_source: ModelSource) -> None:
    facts = Facts(flash_source.config.to_dict(), "faithful", flash_source.weight_types())
    fused = run_passes(flash, facts, PassOptions.of(to="fused")).graph
    assert split_axes(fused) == split_axes(flash)
    before, after = card_bytes(flash, 4, 1024), card_bytes(fused, 4, 1024)
    assert (after.split, after.replicated) == (before.split, before.replicated)
    assert after.resident == before.resident
    assert after.activations < before.activations / 2


HEADS = {"attn_sink": "f32[16]", "wq_b.weight": "f8e4m3[2048,128]"}
OUTPUTS = {"wo_a.weight": "f8e4m3[1024,256]", "wo_b.weight": "f8e4m3[128,1024]"}
INDEX = {"indexer.wq_b.weight": "f8e4m3[768,128]", "indexer.weights_proj.weight": "bf16[6,128]"}


def weights(attn: dict[str, str], ffn: dict[str, str] | None = None, **others: str) -> Graph:
    graph = Graph("g")
    named = {f"layers.0.attn.{k}": v for k, v in attn.items()}
    named |= {f"layers.0.ffn.{k}": v for k, v in (ffn or {}).items()}
    named |= {f"{k}.weight": v for k, v in others.items()}
    for name, text in named.items():
        graph.leaf("weight", name, parse_type(text))
    return graph


def experts(dtype: str, width: int, where: str = "experts", lead: str = "4,") -> dict[str, str]:
    return {
        f"{where}.w1.weight": f"{dtype}[{lead}{width},256]",
        f"{where}.w3.weight": f"{dtype}[{lead}{width},256]",
        f"{where}.w2.weight": f"{dtype}[{lead}256,{width}]",
    }


@pytest.mark.parametrize(
    ("graph", "sizes"),
    [
        pytest.param(weights({}), [1], id="nothing to split"),
        pytest.param(weights({"wkv.weight": "bf16[512,64]"}), [1], id="nothing that splits"),
        pytest.param(weights(HEADS), [1, 2, 4, 8, 16], id="heads"),
        pytest.param(weights({**HEADS, "wq_b.weight": "f8e4m3[1024,128]"}), [1, 2, 4, 8], id="head blocks"),
        pytest.param(weights({**HEADS, "wq_b.weight": "bf16[1024,128]"}), [1, 2, 4, 8, 16], id="float heads"),
        pytest.param(weights({**HEADS, **OUTPUTS}), [1, 2, 4, 8], id="groups"),
        pytest.param(weights({**HEADS, **INDEX}), [1, 2], id="index heads"),
        pytest.param(weights({}, experts("e2m1", 192)), [1, 2, 3, 6], id="fp4 blocks"),
        pytest.param(weights({}, experts("f8e4m3", 768)), [1, 2, 3, 6], id="fp8 blocks"),
        pytest.param(
            weights({}, experts("e2m1", 512) | experts("f8e4m3", 512, "shared_experts", "")),
            [1, 2, 4],
            id="blocks of the shared expert",
        ),
        pytest.param(weights({}, experts("bf16", 6)), [1, 2, 3, 6], id="float experts"),
        pytest.param(weights(HEADS, head="bf16[12,64]", embed="bf16[12,64]"), [1, 2, 4], id="vocabulary"),
    ],
)
def test_legal_sizes(graph: Graph, sizes: list[int]) -> None:
    assert legal_sizes(split_axes(graph)) == sizes
    for cards in range(1, 20):
        if cards in sizes:
            assert TensorParallel.of(graph, cards).cards == cards
        else:
            with pytest.raises(UsageError, match=f"sizes: {', '.join(map(str, sizes))}$"):
                TensorParallel.of(graph, cards)


def test_what_is_split(flash: Graph) -> None:
    parts = ("wq_b", "wo_a", "wo_b", "indexer.wq_b", "indexer.weights_proj")
    split = {f"layers.4.attn.{part}.weight" for part in parts} | {"layers.4.attn.attn_sink"}
    split |= {f"layers.4.attn.{part}.scale" for part in parts[:4]}
    for expert in ("experts", "shared_experts"):
        split |= {f"layers.4.ffn.{expert}.w{i}.{t}" for i in (1, 2, 3) for t in ("weight", "scale")}
    names = [node.meta["names"][0] for node in flash.of_kind("weight")]
    assert {n for n in names if is_split(n) and n.startswith("layers.4.")} == split
    assert {n for n in names if is_split(n) and "layers" not in n} == {"head.weight", "embed.weight"}


def test_folded_outputs_split_by_heads(tiny_v4: Path) -> None:
    source = ModelSource.open(tiny_v4, Numerics.BF16)
    facts = Facts(source.config.to_dict(), "bf16", source.weight_types(), "always")
    graph = run_passes(source.graph(source.variants()[0]), facts, PassOptions.of(to="fused")).graph
    assert is_split("layers.0.attn.wo.weight")
    assert "layers.0.attn.wo.weight" in graph
    assert "output groups" not in {axis.unit for axis in split_axes(graph)}
