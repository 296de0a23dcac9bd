"""Compiled models that obey a precision plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.numerics import Numerics
from rewright.ir.precision_plan import PrecisionPlan, parse_plan_text
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.score import TOTAL

Cli = Callable[..., Any]
SAME_LIBRARY = torch.backends.cpu.get_cpu_capability() == "AVX2" and torch.backends.mkl.is_available()
"""Whether torch sums here in the order that host kernels have (docs/numerics.md)."""

CODE = "import os\nimport sys\n\ndef main():\n    return os.path.join(sys.argv)\n"
MIXED = """
[default]
activations = "bf16"

[kinds."attn.wo_b"]
activations = "fp8"

[kinds."ffn.experts.w1"]
activations = "fp8"

[kinds."ffn.shared_experts.w2"]
activations = "fp8"
weights = "fp4"

[kinds."attn.wo_a"]
weights = "fp4"

[kinds."attn.indexer"]
keys = "bf16"

[modules."layers.2.attn.wq_b"]
activations = "fp8"
weights = "fp4"

[modules."layers.3.attn"]
keys = "bf16"
"""


@pytest.fixture(scope="module")
def compiled(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny-v4 with a plan; kept for the module."""
    found: dict[tuple[str | None, str], Path] = {}

    def get(plan: str | None, numerics: str = "faithful") -> Path:
        if (plan, numerics) not in found:
            out = tmp_path_factory.mktemp("compiled") / "out"
            parsed: PrecisionPlan | None = None if plan is None else parse_plan_text(plan, "plan.toml")
            options = CompileOptions(
                Numerics(numerics), max_context=256, chunk=64, target="host", precision=parsed
            )
            compile_model(tiny_v4, out, options)
            found[plan, numerics] = out
        return found[plan, numerics]

    return get


def logits(out: Path, *, reference: bool = False) -> Tensor:
    """After a prompt of three chunks, which the indexers choose in, and five tokens more."""
    engine = Engine(Artifact.open(out), reference=reference, threads=1)
    ids = engine.artifact.tokenizer().encode(CODE * 12)[:155]
    rows = [engine.prefill(0, ids[:150])]
    rows += [engine.decode({0: token})[0] for token in ids[150:]]
    return torch.stack(rows)


def test_kernels_and_interpreter_agree(compiled: Callable[..., Path]) -> None:
    ours, theirs = logits(compiled(MIXED)), logits(compiled(MIXED), reference=True)
    assert torch.cosine_similarity(ours, theirs).min() >= 0.9985
    if SAME_LIBRARY:
        assert torch.equal(ours, theirs)
    assert not torch.equal(ours, logits(compiled(None)))


def test_everything_in_bf16_is_bf16_numerics(compiled: Callable[..., Path]) -> None:
    ours = logits(compiled('[default]\nactivations = "bf16"\n'))
    assert torch.equal(ours, logits(compiled(None, "bf16")))


def test_a_plan_that_says_what_holds_changes_nothing(compiled: Callable[..., Path]) -> None:
    """Not a byte: the manifest has what a plan came to, not what it says."""
    said = '[default]\nactivations = "fp8"\nkeys = "fp8"\n[kinds."attn.wq_a"]\nweights = "stored"\n'
    first, second = compiled(said), compiled(None)
    files = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    assert all((first / f).read_bytes() == (second / f).read_bytes() for f in files)


def test_fp4_matrices_are_smaller(compiled: Callable[..., Path]) -> None:
    """By half a byte an element, less the finer scales."""
    plain, planned = Artifact.open(compiled(None)), Artifact.open(compiled(MIXED))
    before, after = plain.weights(), planned.weights()
    changed = [name.removesuffix(".fp4.weight") for name in after if name.endswith(".fp4.weight")]
    assert len(changed) == 6 + 6 + 1
    assert not any(f"{path}.weight" in after or f"{path}.scale" in after for path in changed)
    elements = sum(before[f"{path}.weight"].numel() for path in changed)
    scales = sum(before[f"{path}.scale"].numel() for path in changed)
    saved = sum(t.nbytes for t in before.values()) - sum(t.nbytes for t in after.values())
    assert saved == elements + scales - elements // 2 - elements // 32


def test_the_manifest_has_the_plan(compiled: Callable[..., Path]) -> None:
    manifest = Artifact.open(compiled(MIXED)).manifest
    stored = json.loads((compiled(MIXED) / "manifest.json").read_text())
    planned = stored["options"]["precision"]
    assert planned == manifest.precision.to_json()
    assert planned["keys_bf16"] == ["layers.2.attn.indexer", "layers.3.attn", "layers.4.attn.indexer"]
    assert "layers.0.attn.wo_b" not in planned["activations_bf16"]
    assert "layers.0.attn.wq_b" in planned["activations_bf16"]
    assert manifest.fold_wo is False


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(MIXED)
    return path


def test_compile_and_score(cli: Cli, tiny_v4: Path, tmp_path: Path, plan_file: Path) -> None:
    small = ("--max-context", 128, "--chunk", 8, "--target", "host")
    out = tmp_path / "out"
    done = cli(tiny_v4, "-o", out, *small, "--precision-plan", plan_file, "--verify", program="compile-model")
    assert (done.code, done.stdout) == (0, f"{out}\n"), done.stderr
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "In the beginning God created the heaven and the earth."}))
    found = json.loads(cli("score", out, "--text", text, "--json").stdout)
    assert 0 < found[TOTAL]["nll"] < 6


def test_differences_are_shown_by_rule(cli: Cli, tiny_v4: Path, plan_file: Path) -> None:
    planned = f"{tiny_v4}?precision-plan={plan_file}&to=x"
    assert cli("graph", "dump", planned).code == 2
    planned = f"{tiny_v4}@canonical?precision-plan={plan_file}"
    done = cli("graph", "diff", f"{tiny_v4}@traced", planned, "--module", "layers.2.attn")
    assert done.code == 0, done.stderr
    for rule in ("fp4_weight", "unquantized_linear"):
        assert rule in done.stdout
    assert "%scores: reads %q.rotated instead of %q.rounded" in done.stdout
    done = cli("graph", "dump", planned, "--module", "layers.2.attn")
    assert "wq_b.fp4.weight" in done.stdout
    assert cli("graph", "dump", f"{tiny_v4}@traced?precision-plan={plan_file}").code == 2


@pytest.mark.parametrize(
    ("text", "options", "code", "what"),
    [
        ("[default]\nactivations = 'fp4'", (), 3, "activations cannot be 'fp4'"),
        ('[kinds."ffn.gate"]\nactivations = "fp8"', (), 3, "the router always stays in high precision"),
        (MIXED, ("--numerics", "fp32"), 2, "there is nothing to round in fp32"),
        (MIXED, ("--numerics", "bf16"), 2, "wants activations in fp8"),
        (MIXED, ("--no-pass", "lower_weights"), 2, "pass lower_weights, which obeys the plan, does not run"),
        (MIXED, ("--fold-wo", "always"), 2, "stores layers.0.attn.wo_a as FP4"),
    ],
)
def test_what_is_refused(
    cli: Cli, tiny_v4: Path, tmp_path: Path, text: str, options: tuple[str, ...], code: int, what: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    out = tmp_path / "out"
    done = cli(
        tiny_v4, "-o", out, "--target", "host", "--precision-plan", path, *options, program="compile-model"
    )
    assert done.code == code
    assert what in done.stderr
    assert not out.exists()
