"""Bytes that a decode step of the released models moves, against the published sizes.

The numbers come from the specification of the models, computed there from the tensors' shapes.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph, name_of
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.traffic import by_component, node_cost, traffic
from rewright.ir.variant import Variant

# The first pattern that matches a weight's name names its component.
COMPONENTS = {
    "indexer compressor": r"layers\.\d+\.attn\.indexer\.compressor\..*",
    "indexer": r"layers\.\d+\.attn\.indexer\..*",
    "compressor": r"layers\.\d+\.attn\.compressor\..*",
    "wq_a": r"layers\.\d+\.attn\.wq_a\..*",
    "wq_b": r"layers\.\d+\.attn\.wq_b\..*",
    "wkv": r"layers\.\d+\.attn\.wkv\..*",
    "wo_a": r"layers\.\d+\.attn\.wo_a\..*",
    "wo_b": r"layers\.\d+\.attn\.wo_b\..*",
    "norms, sinks": r"layers\.\d+\.(attn_norm|ffn_norm|attn\.(q_norm|kv_norm))\.weight|.*\.attn_sink",
    "shared expert": r"layers\.\d+\.ffn\.shared_experts\..*",
    "routed experts": r"layers\.\d+\.ffn\.experts\..*",
    "gate": r"layers\.\d+\.ffn\.gate\..*",
    "hyper-connections": r"layers\.\d+\.hc_.*",
    "head, final norm, HC head": r"head\.weight|norm\.weight|hc_head_.*",
    "embedding": r"embed\.weight",
}

# V4-Flash, per token at batch 1. A step reads one row of each position bias `ape`.
APE_CSA, APE_HCA, APE_INDEX = 4 * 4096, 128 * 2048, 4 * 1024
READ = {
    "wq_a": 43 * 4_194_560,
    "wq_b": 43 * 33_556_480,
    "wkv": 43 * 2_097_280,
    "wo_a": 43 * 33_556_480,
    "wo_b": 43 * 33_556_480,
    "norms, sinks": 847_616,
    "compressor": 525_722_624 - 21 * APE_CSA * 3 // 4 - 20 * APE_HCA * 127 // 128,
    "indexer": 187_181_568,
    "indexer compressor": 88_171_776 - 21 * APE_INDEX * 3 // 4,
    "shared expert": 1_082_196_480,
    "routed experts": 3_449_290_752,
    "gate": 90_218_640,
    "hyper-connections": 135_275_592,
    "head, final norm, HC head": 1_059_332_116,
    "embedding": 8_192,
}
TABLE = 129_280 * 6 * 8  # bytes of a hash layer's table of experts
RESIDENT = READ | {
    "compressor": 525_722_624,
    "indexer compressor": 88_171_776,
    "routed experts": 43 * 256 * 13_369_344,
    "gate": 43 * 2_097_152 + 40 * 1_024 + 3 * TABLE,
    "embedding": 129_280 * 4_096 * 2,
}


def component(weight: str) -> str:
    return next(name for name, pattern in COMPONENTS.items() if re.fullmatch(pattern, weight))


@pytest.fixture(scope="module")
def flash(repo_root: Path) -> Graph:
    source = ModelSource.open(repo_root / "examples" / "configs" / "v4-flash.json", Numerics.FAITHFUL)
    return source.graph(Variant(1, 1, 4096))


@pytest.fixture(scope="module")
def flash_long(repo_root: Path) -> Graph:
    config = repo_root / "examples" / "configs" / "v4-flash.json"
    source = ModelSource.open(config, Numerics.FAITHFUL, max_context=32_768)
    return source.graph(Variant(1, 1, 32_768))


def test_flash_weights_read(flash: Graph) -> None:
    reads = traffic(flash).weight_reads
    assert sum(reads.values()) == pytest.approx(11_212_120_428, rel=1e-3)
    found = by_component(reads, component)
    assert found.keys() == READ.keys()
    for name, wanted in READ.items():
        # Bytes of experts are an expectation over 6 of 256, rounded for each tensor.
        assert found[name] == pytest.approx(wanted, abs=1000 if name == "routed experts" else 0), name
    assert found["compressor"] == 520_262_656
    assert sum(found[n] for n in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")) == 4_599_335_040


def test_flash_weights_resident(flash: Graph) -> None:
    resident = traffic(flash).resident
    assert sum(resident.values()) == 156_015_698_140
    assert by_component(resident, component) == RESIDENT


def test_pro_weights(repo_root: Path) -> None:
    """The published total counts every row of `ape`; a step reads one of each."""
    config = repo_root / "examples" / "configs" / "v4-pro.json"
    graph = ModelSource.open(config, Numerics.FAITHFUL, max_context=8192).graph(Variant(1, 1, 8192))
    found = traffic(graph)
    assert sum(found.weight_reads.values()) == pytest.approx(39_666_618_460, rel=1e-3)
    unread = sum(found.resident[n] - r for n, r in found.weight_reads.items() if n.endswith(".ape"))
    assert unread == 31 * 127 * 2048 + 30 * (3 * 4096 + 3 * 1024)
    assert sum(found.weight_reads.values()) + unread == pytest.approx(39_666_618_460, abs=1000)
    assert sum(found.resident.values()) == 850_748_205_004


def state_reads(graph: Graph, context: int) -> Counter[str]:
    """Bytes of attention state read in one step; the token's own key counts as part of the window."""
    reads: Counter[str] = Counter()
    for node in graph.ops:
        cost = node_cost(node, context).reads
        if op_of(node.target).name == "sparse_attention":
            reads["window"] += cost["window"] + cost["kv"]
            reads[f"entries {node.kwargs['ratio']}"] += cost.get("compressed", 0)
        elif op_of(node.target).name == "index_score":
            reads["index keys"] += cost["keys"]
    return reads


def test_flash_state_read_at_1024(flash: Graph) -> None:
    found = state_reads(flash, 1024)
    wanted = {"window": 43 * 128, "entries 4": 21 * 256, "entries 128": 20 * 8}
    assert found == {n: v * 1024 for n, v in wanted.items()} | {"entries 0": 0, "index keys": 21 * 256 * 256}
    assert found.total() == pytest.approx(12.68e6, rel=1e-3)


def test_flash_state_read_at_32768(flash_long: Graph) -> None:
    found = state_reads(flash_long, 32_768)
    wanted = {"window": 43 * 128, "entries 4": 21 * 512, "entries 128": 20 * 256}
    assert found == {n: v * 1024 for n, v in wanted.items()} | {"entries 0": 0, "index keys": 21 * 8192 * 256}
    assert found.total() == pytest.approx(65.93e6, rel=1e-3)
    shorter = state_reads(flash_long, 16_384)
    assert shorter["index keys"] * 2 == found["index keys"]
    assert shorter["entries 4"] == found["entries 4"], "top-k binds at both"


def test_reads_of_state_count_as_state(flash: Graph) -> None:
    """Caches that the same step wrote to are state too; besides them the compressors read their rings."""
    attention = state_reads(flash, 1024)
    own = 43 * 1024
    rings = sum(
        node_cost(n, 1024).reads["kv_ring"] * 2 for n in flash.ops if op_of(n.target).name == "compress"
    )
    assert rings > 0
    assert traffic(flash, 1024).reads["state"] == attention.total() - own + rings


def test_the_whole_graph_prints_and_parses(flash: Graph) -> None:
    layers = {name_of(n).split(".")[1] for n in flash.ops if n.meta["module"].startswith("layers.")}
    assert layers == {str(i) for i in range(43)}
    assert parse(print_graph(flash)) == flash
