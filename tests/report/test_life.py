"""`rewright explain`: where a value came from, what became of it, and why not more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewright.graph_spec import parse_spec
from rewright.report.life import Life, life_of
from rewright.report.study import Study, study

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def tiny(tiny_v4: Path) -> Study:
    return study(parse_spec(str(tiny_v4)).with_options(target="sm80"))


@pytest.fixture(scope="module")
def life(tiny: Study) -> Callable[[str], Life]:
    return lambda value: life_of(tiny, value)


def test_a_value_that_was_fused_away(life: Callable[[str], Life]) -> None:
    found = life("layers.2.attn.q_norm")
    assert (found.born, found.heir) == ("traced", "layers.2.attn.wq_b.x")
    assert found.first.startswith("%q_norm : bf16[1,1,")
    assert found.events[0].label == "fuse_norm_quant"
    assert found.events[0].title.startswith("rule norm_quant: 2 nodes -> 1, saves ")
    assert [line.partition(" = ")[2].partition("(")[0] for line in found.events[0].removed] == [
        "rms_norm",
        "quantize",
    ]
    assert found.alike == (4,)
    assert found.calls


def test_why_wo_was_not_folded(life: Callable[[str], Life]) -> None:
    (miss, *_) = life("layers.3.attn.wo_a").whys
    assert miss.startswith("fold_wo/fold_wo at layers.3.attn.wo_a: faithful numerics keep the rounding")


def test_the_kernel_and_its_border(life: Callable[[str], Life]) -> None:
    found = life("layers.4.attn.o.groups")
    assert [c.symbol for c in found.calls] == ["sm80.attention_split", "sm80.attention_combine"]
    assert any("no kernel of sm80 computes attention and then" in why for why in found.whys)
    assert any(
        reader.startswith("grouped_linear_quant layers.4.attn.wo_b.x reads") for reader in found.readers
    )


def test_bytes_are_those_of_the_node(tiny: Study, life: Callable[[str], Life]) -> None:
    assert life("embed").moved.by_kind["weight"] > 0
    state = life("layers.2.attn.window.next")
    assert any(reader == "next value of state layers.2.attn.window" for reader in state.readers)


def test_every_value_of_every_stage_has_a_life(tiny: Study) -> None:
    for snapshot in (tiny.snapshots[0], tiny.snapshots[-1]):
        for node in snapshot.graph.ops[::17]:
            found = life_of(tiny, node.meta["names"][-1])
            assert found.last is None or found.heir


def test_the_command(cli: Cli, compiled_tiny: Path) -> None:
    done = cli("explain", compiled_tiny, "layers.2.attn.o.groups")
    assert done.code == 0
    for heading in ("traced:", "fused: rule attention", "bytes of a step:", "kernel of host: host.attention"):
        assert f"\n{heading}" in done.stdout
    assert "\x1b[" not in done.stdout
    value = json.loads(cli("explain", compiled_tiny, "%layers.2.attn.o.groups", "--format", "json").stdout)
    assert value["format"] == "rewright.life"
    assert value["target"] == "host"


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("wo_b", "did you mean layers.0.attn.wo_b"),
        ("layers.2.attn.q_nrom", "did you mean layers.2.attn.q_norm"),
        ("embed.weight", "embed.weight is a weight: nothing computes it"),
    ],
)
def test_what_has_no_life(cli: Cli, tiny_v4: Path, node: str, said: str) -> None:
    done = cli("explain", tiny_v4, node)
    assert done.code == 2
    assert said in done.stderr
    assert done.stdout == ""
