"""Whole models through the passes: after each single one, and after all of them, nothing has changed.

Passes that keep the order of roundings leave every logit bit for bit as it was. Those that change
the numerics on purpose (`bf16`, folding) are compared within the gates of docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from configs import CONFIGS, STORAGE
from stepper import Stepper
from torch import Tensor

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph
from rewright.ir.op import op_of
from rewright.passes.facts import FoldWo
from rewright.passes.manager import PassOptions
from rewright.passes.pipelines import pass_names
from rewright.passes.report import PassReport
from rewright.rewriting import rewrite

NUMERICS = ("faithful", "bf16", "fp32")
SHORT, LONG = 70, 260
"""Prompt lengths: the short one has more entries than an index of 16 keeps."""


@dataclass
class Model:
    """One checkpoint in one numerics, and what its traced graphs give."""

    folder: Path
    numerics: str
    length: int

    @cached_property
    def traced(self) -> Stepper:
        return Stepper.open(self.folder, self.numerics, chunk=64)

    @cached_property
    def ids(self) -> list[int]:
        generator = torch.Generator().manual_seed(3)
        vocab = self.traced.source.config.vocab_size
        return torch.randint(2, vocab, (self.length + 4,), generator=generator).tolist()

    def run(self, passes: PassOptions | None = None, fold_wo: FoldWo = "auto") -> Tensor:
        """Logits after a prompt in chunks and after each of four decode steps."""
        stepper = self.traced.fresh(passes=passes, fold_wo=fold_wo)
        prompt, rest = self.ids[: self.length], self.ids[self.length :]
        return torch.stack([stepper.prefill(prompt), *(stepper.decode(token) for token in rest)])

    @cached_property
    def want(self) -> Tensor:
        return self.run()


@pytest.fixture(scope="module")
def models(
    tiny_v4: Path, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Model]:
    made: dict[tuple[str, str, int], Model] = {}
    folders: dict[str, Path] = {"tiny": tiny_v4}

    def get(name: str, numerics: str, length: int = SHORT) -> Model:
        if name not in folders:
            folder = tmp_path_factory.mktemp("models") / name
            folders[name] = make_checkpoint(folder, CONFIGS[name], **STORAGE[name])
        key = name, numerics, length
        return made.setdefault(key, Model(folders[name], numerics, length))

    return get


def upto(name: str) -> PassOptions:
    """The pipeline up to and with a pass."""
    return PassOptions(pass_names()[: pass_names().index(name) + 1])


def check(model: Model, options: PassOptions) -> None:
    """Bit for bit as traced; in bf16 as after the pass that drops the quantisation."""
    want = model.want
    if model.numerics == "bf16" and "eliminate_quant" in options.passes:
        want = model.run(PassOptions(("eliminate_quant",)))
    assert torch.equal(model.run(options), want)


SHORT_CASES = [("tiny", "faithful"), ("tiny", "fp32"), ("pro", "faithful"), ("pro", "fp32")]
ALL_CASES = [(name, numerics) for name in ("tiny", *CONFIGS) for numerics in NUMERICS]
everywhere = pytest.mark.parametrize(
    ("name", "numerics"),
    [pytest.param(*c, marks=[] if c in SHORT_CASES else pytest.mark.full) for c in ALL_CASES],
)
every_pass = pytest.mark.parametrize("last", pass_names())


@every_pass
@everywhere
def test_the_pipeline_up_to_each_pass(
    models: Callable[..., Model], name: str, numerics: str, last: str
) -> None:
    check(models(name, numerics), upto(last))


@everywhere
def test_each_pass_alone(models: Callable[..., Model], name: str, numerics: str) -> None:
    for single in pass_names():
        check(models(name, numerics), PassOptions((single,)))


@pytest.mark.full
@everywhere
def test_the_pipeline_without_each_pass(models: Callable[..., Model], name: str, numerics: str) -> None:
    for left_out in pass_names():
        check(models(name, numerics), PassOptions.of(without=(left_out,)))


@pytest.mark.full
@pytest.mark.parametrize(("name", "numerics"), ALL_CASES)
def test_long_prompts(models: Callable[..., Model], name: str, numerics: str) -> None:
    check(models(name, numerics, LONG), PassOptions())


@everywhere
def test_every_rewrite_is_verified(models: Callable[..., Model], name: str, numerics: str) -> None:
    """Regions cut at their boundaries, on generated values, for every kind of variant."""
    source = models(name, numerics).traced.source
    largest = {v.kind: v for v in source.variants()}
    for variant in largest.values():
        rewrite(source, variant, PassOptions(verify=True))


@everywhere
def test_scoring(models: Callable[..., Model], name: str, numerics: str) -> None:
    model = models(name, numerics)
    base = PassOptions(("eliminate_quant",)) if numerics == "bf16" else None
    want = model.traced.fresh(passes=base).scores(model.ids[:40])
    assert torch.equal(model.traced.fresh(passes=PassOptions()).scores(model.ids[:40]), want)


@pytest.mark.parametrize("name", ["tiny", "pro"])
def test_folding_keeps_fp32_results(models: Callable[..., Model], name: str) -> None:
    """Whatever folding does to sums, 1e-4 of the logits' deviation holds it."""
    model = models(name, "fp32")
    got = model.run(PassOptions(), "always")
    assert float((got - model.want).abs().max()) < 1e-4 * float(model.want.std())
    assert not torch.equal(got, model.want), "nothing was folded"


# -- V4-Flash without weights -----------------------------------------------------------------

FORBIDDEN = {"quantize", "dequantize", "reshape"}
MOST_NODES = {0: 14, 4: 18, 128: 14}


@pytest.fixture(scope="module")
def flash(repo_root: Path) -> ModelSource:
    path = repo_root / "examples/configs/v4-flash.json"
    return ModelSource.open(path, Numerics.FAITHFUL, max_context=8192)


def nodes_of_layers(graph: Graph, layers: int) -> list[int]:
    counts = [0] * layers
    for node in graph.ops:
        parts = node.meta["module"].split(".")
        if parts[0] == "layers":
            counts[int(parts[1])] += 1
    return counts


@pytest.mark.parametrize("kind", ["decode", "chunk", "score"])
def test_flash(flash: ModelSource, kind: str) -> None:
    """Every expected match (a missing one raises), and few nodes a layer."""
    variant = max(v for v in flash.variants() if v.kind == kind)
    result = rewrite(flash, variant, PassOptions())
    expected = [r for p in result.report.passes for r in p.rules if r.expected]
    assert len(expected) >= 15
    assert all(rule.matches == rule.expected for rule in expected)
    kinds = {op_of(node.target).name for node in result.graph.ops}
    assert not kinds & FORBIDDEN
    counts = nodes_of_layers(result.graph, flash.config.num_hidden_layers)
    for ratio, count in zip(flash.config.compress_ratios, counts, strict=False):
        assert count <= MOST_NODES[ratio] + (kind != "decode"), ratio


def merged(report: PassReport) -> int:
    return next(rule.matches for rule in report.rules if rule.name == "merge_quant")


def test_flash_loses_its_duplicate_quantisation(flash: ModelSource) -> None:
    """One for each linear in the released code: x twice, the query of ratio-4 layers twice, the experts'
    input four times."""
    variant = max(v for v in flash.variants() if v.kind == "decode")
    report = rewrite(flash, variant, PassOptions()).report
    ratios = flash.config.compress_ratios[:43]
    assert merged(report.passes[1]) == 43 * (1 + 3) + list(ratios).count(4)
