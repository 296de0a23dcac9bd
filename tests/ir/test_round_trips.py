"""Bytes of values that go through memory and back: by hand on small graphs, in sum on whole models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch.fx import Node

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir import round_trips as module
from rewright.ir.graph import Graph, name_of, updated_state
from rewright.ir.op import Cost
from rewright.ir.parser import parse
from rewright.ir.round_trips import RoundTrip, StepBytes, TripGroup, by_layer, round_trips, step_bytes
from rewright.ir.traffic import traffic
from rewright.passes.facts import Facts
from rewright.passes.manager import run_passes

SMALL = """\
graph small {capacity=128, numerics="faithful"}
stage traced
ir 1

input %tokens : i32[1,1]
input %pos : i32[1]
input %n_valid : i32[1]
input %slot : i32[1]
state %attn.window : f32[1,8,128]

.:
  @embed.weight : f32[32,128]
  %embed : f32[1,1,128] = embed(%tokens, @embed.weight) {out="f32"}

attn:
  @norm.weight : f32[128]
  %norm : f32[1,1,128] = rms_norm(%.embed, @norm.weight) {eps=1e-06}
  @wkv.weight : f32[128,128]
  %wkv : f32[1,1,128] = linear(%norm, _, @wkv.weight, _) {out="f32"}
  %codes, %codes.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%wkv) {block=128, fmt="e4m3"}
  %window.next : f32[1,8,128] = ring_write(%.attn.window, %wkv, %.pos, %.n_valid, %.slot)

.:
  @head.weight : f32[32,128]
  %logits : f32[1,1,32] = linear(%attn.wkv, _, @head.weight, _) {out="f32"}

return logits = %logits
next %attn.window = %attn.window.next
"""
QUANTIZE = '  %codes, %codes.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%wkv) {block=128, fmt="e4m3"}\n'


def test_small_graph_by_hand() -> None:
    assert round_trips(parse(SMALL)) == [
        RoundTrip("attn.wkv", "linear", ("quantize", "ring_write", "linear"), 512, 3 * 512),
        RoundTrip("attn.norm", "rms_norm", ("linear",), 512, 512),
        RoundTrip("embed", "embed", ("rms_norm",), 512, 512),
        RoundTrip("attn.codes", "quantize", (), 128, 0),
        RoundTrip("logits", "linear", (), 128, 0),
        RoundTrip("attn.codes.scale", "quantize", (), 1, 0),
    ]


def test_totals_by_hand() -> None:
    found = step_bytes(parse(SMALL))
    assert found == StepBytes(
        nodes=6,
        weights=512 + 512 + 128 * 128 * 4 + 32 * 128 * 4,
        constants=0,
        state_read=0,
        state_written=512,
        activations_read=5 * 512 + 4 + 3 * 4,
        activations_written=3 * 512 + 128 + 1 + 128,
    )
    assert found.total == 82_944 + 512 + 2_576 + 1_793


def test_who_reads_a_reshape_reads_the_value_beneath() -> None:
    text = SMALL.replace(
        QUANTIZE,
        "  %heads : f32[1,1,2,64] = reshape(%wkv) {tail=[2,64]}\n"
        "  %again : f32[1,1,4,32] = reshape(%heads) {tail=[4,32]}\n"
        "  %normed : f32[1,1,4,32] = head_rms_norm(%again) {eps=1e-06}\n",
    )
    trips = {trip.name: trip for trip in round_trips(parse(text))}
    assert trips["attn.wkv"].readers == ("head_rms_norm", "ring_write", "linear")
    assert trips["attn.wkv"].read == 3 * 512
    assert trips.keys() == {"attn.wkv", "attn.norm", "attn.normed", "embed", "logits"}


def test_one_op_that_reads_a_value_twice_is_one_reader() -> None:
    text = SMALL.replace(QUANTIZE, "  %hidden : f32[1,1,128] = swiglu(%wkv, %wkv, _) {limit=10.0}\n")
    wkv = round_trips(parse(text))[0]
    assert wkv == RoundTrip("attn.wkv", "linear", ("swiglu", "ring_write", "linear"), 512, 4 * 512)


def test_results_share_what_a_cost_says_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.node_cost

    def third(node: Node, context: int) -> Cost:
        cost = original(node, context)
        return replace(cost, writes=cost.writes // 3)

    monkeypatch.setattr(module, "node_cost", third)
    written = {trip.name: trip.written for trip in round_trips(parse(SMALL))}
    assert (written["attn.codes"], written["attn.codes.scale"]) == (42, 1)
    assert written["logits"] == 42


def test_layers_are_one_line() -> None:
    trips = [
        RoundTrip("layers.0.attn.q", "linear", ("rope",), 10, 10),
        RoundTrip("layers.12.attn.q", "linear", ("rope", "rms_norm"), 10, 20),
        RoundTrip("layers.3.attn.q", "multi_linear", ("rope",), 40, 40),
        RoundTrip("my.layers.1.x", "linear", (), 50, 0),
        RoundTrip("layers.1", "add", (), 50, 0),
    ]
    assert by_layer(trips) == [
        TripGroup("layers.3.attn.q", 1, "multi_linear", Counter(rope=1), 40, 40),
        TripGroup("layers.*.attn.q", 2, "linear", Counter(rope=2, rms_norm=1), 20, 30),
        TripGroup("layers.1", 1, "add", Counter(), 50, 0),
        TripGroup("my.layers.1.x", 1, "linear", Counter(), 50, 0),
    ]


@pytest.fixture(scope="module")
def source(tiny_v4: Path) -> ModelSource:
    return ModelSource.open(tiny_v4, Numerics.FAITHFUL)


@pytest.fixture(scope="module")
def staged(source: ModelSource) -> list[Graph]:
    """Every stage of the largest decode step, chunk and score of tiny-v4."""
    graphs: list[Graph] = []
    facts = Facts(source.config.to_dict(), "faithful", source.weight_types())
    variants = {variant.kind: variant for variant in source.variants()}  # the last one is the largest
    for variant in variants.values():
        graph = source.graph(variant)

        def keep(stage: str, name: str, graph: Graph) -> None:
            if not name:
                graphs.append(graph.copy())

        run_passes(graph, facts, observe=keep)
    assert len(graphs) == 3 * 5
    return graphs


def test_round_trips_and_totals_are_all_traffic(staged: list[Graph]) -> None:
    for graph in staged:
        for context in (100, None):
            moved, step = traffic(graph, context), step_bytes(graph, context)
            trips = round_trips(graph, context)
            assert step.total == sum(moved.reads.values()) + moved.written
            assert step.nodes == len(graph.ops)
            assert step.weights == sum(moved.weight_reads.values())
            assert sum(t.read for t in trips) == moved.reads["op"]
            assert sum(t.written for t in trips) == step.activations_written
            assert step.state_written > 0
            groups = by_layer(trips)
            assert sum(g.total for g in groups) == sum(t.total for t in trips)
            assert sum(g.count for g in groups) == len(trips)
            assert len(groups) < len(trips)


def test_no_weight_and_no_state_is_a_round_trip(staged: list[Graph]) -> None:
    for graph in staged:
        names = {trip.name for trip in round_trips(graph)}
        left_out = [name_of(n) for n in graph.of_kind("weight", "constant", "state", "input")]
        left_out += [name_of(n) for n in graph.of_kind("op", "item") if updated_state(n) is not None]
        assert len(left_out) > 100
        assert names.isdisjoint(left_out)


def test_what_is_read_was_written_and_readers_read(staged: list[Graph]) -> None:
    for graph in staged:
        for trip in round_trips(graph):
            assert trip.written > 0, trip
            assert trip.read > 0 or not trip.readers, trip


def test_order(staged: list[Graph]) -> None:
    for graph in staged:
        trips = round_trips(graph)
        assert trips == sorted(trips, key=lambda t: (-t.total, t.name))


def test_scores_are_written_as_far_as_the_context_goes(source: ModelSource) -> None:
    decode = max((v for v in source.variants() if v.kind == "decode"), key=lambda v: v.capacity)
    for context, entries in ((256, 64), (1024, 256)):
        scores = [t for t in round_trips(source.graph(decode), context) if t.producer == "index_score"]
        assert [(t.written, t.read) for t in scores] == [(2 * entries, 2 * entries)] * 2
