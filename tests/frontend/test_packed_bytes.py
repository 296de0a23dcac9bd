"""Bytes of keys that V4-Flash stores and reads, packed and in bf16, against the model's specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewright.frontend.kv_formats import parse_kv
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph
from rewright.ir.kv_memory import key_memory, render
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite

LONGEST = 1 << 20
# Megabytes by context: read by a decode step, and stored, as the specification rounds them.
READ = {
    "bf16": {1_024: "12.68", 32_768: "65.93", 131_072: "213.78", LONGEST: "1593.70"},
    "packed": {1_024: "6.80", 32_768: "24.16", 131_072: "68.21", LONGEST: "479.34"},
}
STORED = {
    "bf16": {1_024: "12.7", 32_768: "231.1", 131_072: "907.4", LONGEST: "7220"},
    "packed": {1_024: "6.8", 32_768: "118.2", 131_072: "463.1", LONGEST: "3680"},
}


@pytest.fixture(scope="module")
def graphs(repo_root: Path) -> dict[str, Graph]:
    """The largest decode step at the last stage."""
    config, found = repo_root / "examples" / "configs" / "v4-flash.json", {}
    for kv in READ:
        source = ModelSource.open(config, Numerics.FAITHFUL, max_context=LONGEST, kv=parse_kv(kv))
        variant = max(v for v in source.variants() if v.kind == "decode")
        found[kv] = rewrite(source, variant, PassOptions()).graph
    return found


@pytest.mark.parametrize("kv", list(READ))
@pytest.mark.parametrize("context", list(READ["bf16"]))
def test_flash(graphs: dict[str, Graph], kv: str, context: int) -> None:
    memory = key_memory(graphs[kv], context)
    assert f"{memory.read / 1e6:.2f}" == READ[kv][context]
    assert f"{memory.plain_read / 1e6:.2f}" == READ["bf16"][context]
    for nbytes, form in ((memory.stored, kv), (memory.plain_stored, "bf16")):
        wanted = STORED[form][context]
        shown = f"{nbytes / 1e6:.1f}" if "." in wanted else f"{nbytes / 1e7:.0f}0"
        assert shown == wanted


def test_the_same_bytes_hold_twice_the_context(graphs: dict[str, Graph]) -> None:
    memory = key_memory(graphs["packed"], 131_072)
    assert memory.gained_context == 257_692
    held = key_memory(graphs["packed"], memory.gained_context)
    more = key_memory(graphs["packed"], memory.gained_context + 1)
    assert held.stored <= memory.plain_stored < more.stored
    assert key_memory(graphs["bf16"], 131_072).gained_context == 131_072
    assert "257,692 tokens" in render(memory)
    assert render(key_memory(graphs["bf16"], 1_024)).count("\n") == 1


def test_a_lossy_format_saves_more(repo_root: Path) -> None:
    config = repo_root / "examples" / "configs" / "v4-flash.json"
    kv = parse_kv("packed,window=fp4,csa=fp4,hca=fp4")
    source = ModelSource.open(config, Numerics.FAITHFUL, max_context=LONGEST, kv=kv)
    graph = source.graph(max(v for v in source.variants() if v.kind == "decode"))
    memory = key_memory(graph, 131_072)
    assert memory.stored == 43 * 128 * 366 + 21 * 32_768 * (366 + 68) + 20 * 1_024 * 366
