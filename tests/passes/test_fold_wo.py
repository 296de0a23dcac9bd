"""wo_b . wo_a as one matrix: the right product, checked each time, and only where it pays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphs import SMALL, Net, op_names, small_model, traced
from stepper import Stepper
from torch import Tensor

from rewright.frontend.numerics import parse_numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import Refused
from rewright.ir.graph import Graph
from rewright.ir.types import type_of
from rewright.passes import fold_wo
from rewright.passes.facts import Facts
from rewright.passes.fold_wo import check_fold, fold
from rewright.passes.manager import PassOptions, Rewritten, run_passes
from rewright.passes.report import RuleReport
from rewright.rewriting import facts_of

ONLY = PassOptions.of(only="canonicalize,eliminate_quant,fold_wo")
SHAPES = [(1, 4, 8, 16), (2, 4, 8, 16), (3, 8, 2, 5), (8, 1, 1, 7)]  # groups, rank, width, outputs


def matrices(groups: int, rank: int, width: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (groups * rank, width), (outputs, groups * rank)
    wo_a, wo_b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return wo_a, wo_b


def two_steps(x: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    """[N,G,K] through each group's rows of wo_a, then wo_b, without the functions under test."""
    rank = wo_a.shape[0] // groups
    parts = [x[:, g] @ wo_a[g * rank : (g + 1) * rank].T for g in range(groups)]
    return torch.cat(parts, dim=1) @ wo_b.T


@pytest.mark.parametrize(("groups", "rank", "width", "outputs"), SHAPES)
def test_the_fold_is_the_two_products(groups: int, rank: int, width: int, outputs: int) -> None:
    wo_a, wo_b = matrices(groups, rank, width, outputs)
    folded = fold(wo_a, wo_b, groups)
    assert folded.shape == (outputs, groups * width)
    x = torch.randn(5, groups, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(x.flatten(1) @ folded.T, two_steps(x, wo_a, wo_b, groups), rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16):
        check_fold(folded.to(dtype), wo_a, wo_b, groups, "wo")


def interleaved(wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    """Rows of wo_a taken as [R,G] instead of [G,R]."""
    rank = wo_a.shape[0] // groups
    return fold(wo_a.unflatten(0, (rank, groups)).transpose(0, 1).flatten(0, 1), wo_b, groups)


def swapped(wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    """Two groups of the result exchanged."""
    blocks = list(fold(wo_a, wo_b, groups).chunk(groups, dim=1))
    return torch.cat([*blocks[1:], blocks[0]], dim=1)


def wrong_columns(wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    rank = wo_a.shape[0] // groups
    return fold(wo_a, wo_b.unflatten(1, (rank, groups)).transpose(1, 2).flatten(1), groups)


def one_element(wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    folded = fold(wo_a, wo_b, groups)
    folded[1, 1] += 20.0
    return folded


@pytest.mark.parametrize("wrong", [interleaved, swapped, wrong_columns, one_element])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_in_another_order_are_caught(
    wrong: Callable[[Tensor, Tensor, int], Tensor], dtype: torch.dtype
) -> None:
    """Far beyond rounding, also where the matrix is rounded to bf16."""
    wo_a, wo_b = matrices(4, 8, 16, 32)
    with pytest.raises(Refused, match="is not the product of its parts") as caught:
        check_fold(wrong(wo_a, wo_b, 4).to(dtype), wo_a, wo_b, 4, "layers.0.attn.wo.weight")
    assert caught.value.where == "layers.0.attn.wo.weight"
    assert "compile with --fold-wo never" in str(caught.value)


@pytest.fixture
def checkpoint(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Path:
    layers = {"num_hidden_layers": 2, "compress_ratios": [0, 4]}
    return make_checkpoint(tmp_path / "model", {**SMALL, **layers})


def test_every_fold_is_checked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is computed from the stored tensors, and refused if the fold is wrong."""
    source = ModelSource.open(checkpoint, parse_numerics("bf16"), max_context=128)
    done = run_passes(traced(source), facts_of(source, "always"), ONLY)
    assert sorted(done.derived) == ["layers.0.attn.wo.weight", "layers.1.attn.wo.weight"]
    weights = source.weights()
    for name, derived in done.derived.items():
        stem = name.removesuffix(".wo.weight")
        assert derived.sources == tuple(
            f"{stem}.{m}.{t}" for m in ("wo_a", "wo_b") for t in ("weight", "scale")
        )
        stored = [weights.load(source_name) for source_name in derived.sources]
        assert type_of(derived.compute(*stored)) == derived.type
    monkeypatch.setattr(fold_wo, "fold", interleaved)
    with pytest.raises(Refused, match="is not the product of its parts"):
        derived.compute(*stored)


def the_rule(done: Rewritten) -> RuleReport:
    return next(r for p in done.report.passes for r in p.rules if r.name == "fold_wo")


def flash(repo_root: Path, folder: Path, numerics: str) -> ModelSource:
    """V4-Flash, two of its layers, from its published configuration."""
    config = json.loads((repo_root / "examples/configs/v4-flash.json").read_text())
    assert (config["hidden_size"], config["o_lora_rank"], config["o_groups"]) == (4096, 1024, 8)
    path = folder / "config.json"
    fewer = {"num_hidden_layers": 2, "compress_ratios": [0, 4], "num_hash_layers": 1}
    path.write_text(json.dumps({**config, **fewer}))
    return ModelSource.open(path, parse_numerics(numerics), max_context=4096)


@pytest.mark.parametrize("numerics", ["faithful", "bf16"])
def test_v4_flash_is_refused(repo_root: Path, tmp_path: Path, numerics: str) -> None:
    """268 MB against 67 MB a layer; in faithful numerics it would change the numbers besides."""
    source = flash(repo_root, tmp_path, numerics)
    graph = traced(source)
    done = run_passes(graph, facts_of(source), ONLY)
    sizes = "268,435,456 bytes folded against 67,112,960 as stored"
    numbers = "faithful numerics keep the rounding and the quantisation between the two; "
    reason = numbers + sizes if numerics == "faithful" else sizes
    assert the_rule(done).matches == the_rule(done).expected == 0
    assert [(m.anchor, m.reason, m.node) for m in the_rule(done).near] == [
        (f"layers.{i}.attn.wo_a", reason, f"layers.{i}.attn.wo_b") for i in range(2)
    ]
    assert done.derived == {}
    forced = run_passes(graph, facts_of(source, "always"), ONLY)
    assert the_rule(forced).matches == the_rule(forced).expected == 2
    assert {str(d.type) for d in forced.derived.values()} == {"bf16[4096,32768]"}


@pytest.mark.parametrize(("rank", "pays"), [(128, False), (256, True)])
def test_it_applies_from_the_rank_on_where_it_pays(tmp_path: Path, rank: int, pays: bool) -> None:
    """n = 128 outputs, k = 256 inputs of a group, one byte an element against two: 170 rows."""
    assert (rank > 128 * 256 * 2 / (128 + 256)) == pays
    source = small_model(tmp_path, "bf16", o_lora_rank=rank)
    done = run_passes(traced(source), facts_of(source))
    assert the_rule(done).matches == the_rule(done).expected == (3 if pays else 0)
    assert (["bf16[128,512]"] * 3 if pays else []) == [str(d.type) for d in done.derived.values()]
    assert ("grouped_linear" in op_names(done.graph)) != pays


@pytest.mark.parametrize("numerics", ["faithful", "bf16", "fp32"])
@pytest.mark.parametrize(("choice", "folds"), [("always", 3), ("never", 0)])
def test_the_choice_may_be_made_by_hand(tmp_path: Path, numerics: str, choice: str, folds: int) -> None:
    source = small_model(tmp_path, numerics, o_lora_rank=256)
    done = run_passes(traced(source, "chunk"), facts_of(source, choice))  # type: ignore[arg-type]
    assert the_rule(done).matches == the_rule(done).expected == folds
    if choice == "never":
        assert {m.reason for m in the_rule(done).near} == {"it is switched off"}


def output(flat: tuple[list[int], int], groups: tuple[list[int], int]) -> Graph:
    net = Net()
    o = net.input("o", "bf16[1,1,2,64]")
    shaped = net.reshape("groups", o, tail=groups[0], keep=groups[1])
    first = net.grouped_linear("wo_a", shaped, net.weight("a.wo_a.weight", "bf16[32,64]"))
    z = net.reshape("z", first, tail=flat[0], keep=flat[1])
    return net.graph(y=net.linear("wo_b", z, None, net.weight("a.wo_b.weight", "bf16[16,32]"), out="bf16"))


@pytest.mark.parametrize(
    ("flat", "groups"),
    [(([32], 1), ([2, 64], 2)), (([1, 32], 2), ([2, 64], 2)), (([32], 2), ([1, 2, 64], 1))],
)
def test_another_layout_of_the_groups_is_left_alone(
    flat: tuple[list[int], int], groups: tuple[list[int], int]
) -> None:
    graph = output(flat, groups)
    done = run_passes(graph, Facts({}, "bf16", {}, "always"), PassOptions.of(only="fold_wo"))
    assert op_names(done.graph) == op_names(graph)
    assert {m.reason for m in the_rule(done).near} == {"the groups are not laid side by side"}


def test_logits_of_the_folded_model(checkpoint: Path) -> None:
    """In fp32 the fold is exact but for the order of sums: a prompt in chunks, then decode steps."""
    source = ModelSource.open(checkpoint, parse_numerics("fp32"), max_context=128, chunk=8)
    plain = Stepper(source)
    folded = Stepper(source, weights=plain.weights, passes=PassOptions(), fold_wo="always")
    ids = [3 + 7 * i % 60 for i in range(14)]
    for step in (lambda s: s.prefill(ids[:11]), *(lambda s, t=t: s.decode(t) for t in ids[11:])):
        want, got = step(plain), step(folded)
        assert (got - want).abs().max() <= 1e-4 * want.std()
        assert not torch.equal(got, want)
