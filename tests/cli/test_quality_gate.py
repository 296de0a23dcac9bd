"""compile-model --max-nll-loss: what passes, what is refused and what is said about it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rewright import quality_gate
from rewright.codegen.pack import PackedWeights

Cli = Callable[..., Any]
TEXTS = (
    "And it came to pass in the days of the judges, that there was a famine in the land.",
    "import os\nimport sys\n\ndef main():\n    return os.path.join(sys.argv)\n",
    "What is 12 + 30?",
)
SMALL = ("--max-context", 128, "--chunk", 8, "--target", "host")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    return path


@pytest.fixture
def gated(cli: Cli, tiny_v4: Path, tmp_path: Path, text: Path) -> Cli:
    """compile-model of tiny-v4 into tmp_path/out with a limit."""

    def run(limit: object, *options: object, file: Path = text) -> Any:
        quality = ("--max-nll-loss", limit, "--text", file)
        return cli(tiny_v4, "-o", tmp_path / "out", *SMALL, *quality, *options, program="compile-model")

    return run


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Turns the sign of a weight on its way into the compiled model; the reference reads the checkpoint."""

    def arm(weight: str) -> None:
        parts = PackedWeights.parts
        seen = []

        def damaged(self: PackedWeights, name: str) -> Iterator[Tensor]:
            for part in parts(self, name):
                seen.append(name)
                yield -part if name == weight else part

        monkeypatch.setattr(PackedWeights, "parts", damaged)

    return arm


def figures(stderr: str) -> tuple[float, float, int]:
    """NLL of the model and of the reference, and the tokens, as the message says them."""
    found = re.search(r"\((\d+\.\d+) instead of (\d+\.\d+) over ([\d,]+) tokens\)", stderr)
    assert found is not None, stderr
    return float(found[1]), float(found[2]), int(found[3].replace(",", ""))


def scored(cli: Cli, out: Path, text: Path) -> dict[str, Any]:
    return json.loads(cli("score", out, "--text", text, "--json", "--reference").stdout)["all"]


def test_without_rounding_nothing_is_lost(gated: Cli, cli: Cli, tmp_path: Path, text: Path) -> None:
    """Limit 0: the compiled graphs, passes and packed weights give the very numbers of the traced ones."""
    done = gated(0, "--numerics", "fp32")
    assert (done.code, done.stdout) == (0, f"{tmp_path / 'out'}\n"), done.stderr
    assert "quality: 0 nats a token lost, 0 are allowed" in done.stderr
    nll, reference, tokens = figures(done.stderr)
    found = scored(cli, tmp_path / "out", text)
    assert nll == reference == pytest.approx(found["nll"], abs=1e-4)
    assert tokens == found["tokens"]


@pytest.mark.parametrize(
    ("numerics", "target"), [("faithful", "host"), ("bf16", "host"), ("faithful", "sm80")]
)
def test_the_figures_are_those_of_score(
    gated: Cli, cli: Cli, tiny_v4: Path, tmp_path: Path, text: Path, numerics: str, target: str
) -> None:
    done = gated(1, "--numerics", numerics, "--target", target)
    assert done.code == 0, done.stderr
    nll, reference, tokens = figures(done.stderr)
    ours = scored(cli, tmp_path / "out", text)
    exact = tmp_path / "exact"
    assert cli(tiny_v4, "-o", exact, *SMALL, "--numerics", "fp32", program="compile-model").code == 0
    theirs = scored(cli, exact, text)
    assert nll == pytest.approx(ours["nll"], abs=1e-4)
    assert reference == pytest.approx(theirs["nll"], abs=1e-4)
    assert tokens == ours["tokens"] == theirs["tokens"]
    assert nll != reference
    lost = re.search(r"quality: (-?[\d.e-]+) nats", done.stderr)
    assert lost is not None
    assert float(lost[1]) == pytest.approx(ours["nll"] - theirs["nll"], rel=1e-2, abs=1e-6)


@pytest.mark.parametrize(
    ("weight", "module"),
    [("layers.2.attn.wo_b.weight", "layers.2.attn"), ("layers.1.ffn_norm.weight", "layers.1.ffn")],
)
def test_a_damaged_model_is_refused_and_the_module_named(
    gated: Cli, damage: Callable[[str], None], tmp_path: Path, text: Path, weight: str, module: str
) -> None:
    damage(weight)
    done = gated(0.05, "--numerics", "fp32")
    assert (done.code, done.stdout) == (5, "")
    assert list(tmp_path.iterdir()) == [text]
    nll, reference, _ = figures(done.stderr)
    assert nll - reference > 0.05
    texts = re.findall(rf"^  {re.escape(str(text))}, line (\d): (\S+) \(", done.stderr, re.MULTILINE)
    assert sorted(line for line, _ in texts) == ["1", "2", "3"]
    losses = [float(loss) for _, loss in texts]
    assert losses == sorted(losses, reverse=True)
    modules = re.findall(r"^  (\S+): (\S+) % -> (\S+) %$", done.stderr, re.MULTILINE)
    assert 1 <= len(modules) <= quality_gate.SHOWN_MODULES
    added = [float(behind) - float(before) for _, before, behind in modules]
    assert added == sorted(added, reverse=True)
    assert added[-1] > 0
    assert modules[0][:2] == (module, "0")
    assert float(modules[0][2]) > 1


def test_a_refused_model_leaves_the_old_one(
    gated: Cli, damage: Callable[[str], None], tmp_path: Path, text: Path
) -> None:
    assert gated(1).code == 0
    manifest = (tmp_path / "out" / "manifest.json").read_bytes()
    damage("norm.weight")
    done = gated(0.5, "--numerics", "fp32", "--force")
    assert done.code == 5
    assert "\n  head: 0 % -> " in done.stderr
    assert (tmp_path / "out" / "manifest.json").read_bytes() == manifest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", text.name]


@pytest.mark.parametrize("limit", [-0.1, "nan", "inf"])
def test_a_limit_that_is_none_is_2(gated: Cli, limit: object) -> None:
    done = gated(limit)
    assert done.code == 2
    assert "--max-nll-loss" in done.stderr


def test_options_that_go_together(cli: Cli, tiny_v4: Path, tmp_path: Path, text: Path) -> None:
    both = ("--max-nll-loss", 1, "--text", text)
    for options in (("-o", tmp_path / "out", *both[:2]), ("-o", tmp_path / "out", *both[2:])):
        done = cli(tiny_v4, *options, program="compile-model")
        assert (done.code, "go together" in done.stderr) == (2, True)
    assert cli(tiny_v4, "--dry-run", *both, program="compile-model").code == 2


@pytest.mark.parametrize(
    ("content", "says"), [("", "holds no text"), ('{"text": 5}', "no text"), ('{"text": "%s"}', "do not fit")]
)
def test_texts_are_looked_at_before_anything_is_compiled(
    gated: Cli, monkeypatch: pytest.MonkeyPatch, text: Path, tmp_path: Path, content: str, says: str
) -> None:
    monkeypatch.setattr("rewright.compiler.rewrite_all", lambda *a, **k: pytest.fail("compiled"))
    text.write_text(content.replace("%s", "word " * 200))
    done = gated(1)
    assert (done.code, done.stdout) == (3, "")
    assert says in done.stderr
    assert str(text) in done.stderr
    assert list(tmp_path.iterdir()) == [text]


def test_a_checkpoint_without_a_tokenizer_is_3(
    cli: Cli, make_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    options = (*SMALL, "--max-nll-loss", 1, "--text", text)
    done = cli(make_checkpoint(tmp_path / "c"), "-o", tmp_path / "o", *options, program="compile-model")
    assert done.code == 3
    assert "has no tokenizer.json, so no text can be scored" in done.stderr


def test_a_reference_beyond_the_memory_is_4(gated: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_gate, "total_bytes", lambda: 1000)
    done = gated(1)
    assert done.code == 4
    assert "--max-nll-loss: the reference has" in done.stderr
