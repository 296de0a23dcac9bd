"""Models of random weights in the place of compiled ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.config import load_config
from rewright.ir.errors import BadInput, MachineError, UsageError
from rewright.ir.plan import parse_plan
from rewright.ir.types import DType, ValueType
from rewright.ir.variant import Limits, Variant
from rewright.random_artifact import (
    RandomArtifact,
    compile_random,
    layers_that_fit,
    needed_variants,
    read_config,
    require_room,
)
from rewright.runtime import card
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact

CPU = torch.device("cpu")


def compiled(config: Path, target: str, layers: int | None = 4) -> RandomArtifact:
    options = CompileOptions(max_context=256, max_batch=2, target=target)
    return compile_random(config, options, CPU, layers=layers, batches=(1, 2), context=40)


@pytest.mark.parametrize("target", ["host", "sm80"])
def test_it_runs(tiny_v4: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(card.EMULATE, "1")
    artifact = compiled(tiny_v4 / "config.json", target)
    engine = Engine(artifact, threads=1)
    first = engine.prefill(0, [5, 6, 7])
    assert first.isfinite().all()
    assert first.std() > 0.5
    again = Engine(artifact, threads=1).prefill(1, [5, 6, 7])
    assert torch.equal(first, again)  # the weights are the same whenever they are drawn


def test_plans_and_weights_are_those_of_a_checkpoint(tiny_v4: Path, tmp_path: Path) -> None:
    options = CompileOptions(max_context=256, max_batch=2, target="sm80")
    compile_model(tiny_v4, tmp_path / "out", options)
    real = Artifact.open(tmp_path / "out")
    random = compiled(tiny_v4, "sm80", layers=None)
    for variant, plan in random.plans.items():
        expected = parse_plan(real.plan_text(variant))
        assert [launch.symbol for launch in plan.launches] == [e.symbol for e in expected.launches]
        assert plan.arena_bytes == expected.arena_bytes
        assert plan.state_bytes == expected.state_bytes
    stored = {name: (t.dtype, t.numel()) for name, t in real.each_weight()}
    drawn = {name: (t.dtype, t.numel()) for name, t in random.each_weight()}
    assert drawn.keys() <= stored.keys()  # a step without index scores does not read their weights
    assert all(stored[name][1] == size for name, (_, size) in drawn.items())


def test_only_what_is_measured_is_planned() -> None:
    limits = Limits(max_context=4096, max_batch=6, chunk=8)
    variants = limits.variants(index_topk=512)
    found = needed_variants(variants, limits, [1, 3], 1000)
    assert found == [Variant(1, 1, 2048), Variant(1, 4, 2048), Variant(8, 1, 2048)]
    assert {v.capacity for v in needed_variants(variants, limits, [1], 2049)} == {2048, 4096}
    assert Variant(1, 6, 4096) in needed_variants(variants, limits, [7], 9999)


def test_the_first_layers_are_those_of_the_model(tiny_v4: Path) -> None:
    whole = load_config(tiny_v4)[0]
    part = read_config(tiny_v4, 3)
    assert part.compress_ratios == whole.compress_ratios[:3]
    assert part.num_hash_layers == min(3, whole.num_hash_layers)
    assert read_config(tiny_v4 / "config.json").num_hidden_layers == whole.num_hidden_layers
    for layers in (0, whole.num_hidden_layers + 1):
        with pytest.raises(UsageError, match="layers"):
            read_config(tiny_v4, layers)
    with pytest.raises(BadInput, match="no such file"):
        read_config(tiny_v4 / "absent.json")


def test_layers_that_fit() -> None:
    types = {name: ValueType(DType.I32, (25,)) for name in ("embed.weight", "layers.0.a", "layers.1.a")}
    types["layers.10.a"] = ValueType(DType.I32, (50,))
    assert [layers_that_fit(types, room) for room in (50, 200, 299, 300, 499, 500)] == [0, 1, 1, 2, 2, 3]


def test_what_does_not_fit_is_refused_with_what_does(tiny_v4: Path) -> None:
    artifact = compiled(tiny_v4, "sm80")
    memory = artifact.manifest.memory
    needed = artifact.weight_bytes + memory.arena_bytes + memory.state_bytes
    assert artifact.weight_bytes == sum(t.nbytes for _, t in artifact.each_weight())
    require_room(artifact, needed, "a card")
    with pytest.raises(
        MachineError, match=rf"need {needed:,} bytes, a card has {needed - 1:,} free"
    ) as error:
        require_room(artifact, needed - 1, "a card")
    assert "at most --layers 3" in str(error.value)
