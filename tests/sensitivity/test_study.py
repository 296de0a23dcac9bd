"""Lowering modules one by one: what is measured, and the plan that follows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import MachineError, UsageError
from rewright.ir.precision_plan import Adjustable, Precision, parse_plan_text
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.score import Encoded, Text
from rewright.sensitivity import evaluator as evaluator_module
from rewright.sensitivity.evaluator import Evaluator
from rewright.sensitivity.experiments import (
    ASPECTS,
    Units,
    expanded,
    high,
    lowered,
    parse_aspects,
    plan_with,
)
from rewright.sensitivity.force_low import FORCED, parse_forced
from rewright.sensitivity.statistics import Divergence, TextResult
from rewright.sensitivity.study import StudyOptions, StudyRun, choose_texts, parse_split

Cli = Callable[..., Any]
TEXTS = (
    ("prose", "And it came to pass in the days of the judges, that there was a famine in the land. " * 3),
    ("code", "import os\nimport sys\n\ndef main():\n    return os.path.join(sys.argv)\n" * 2),
    ("manual", "The option sets the number of threads. By default there is one for each core."),
    ("chat", "What is 12 + 30?"),
)


@pytest.fixture(scope="module")
def source(tiny_v4: Path) -> ModelSource:
    return ModelSource.open(tiny_v4, Numerics.FAITHFUL, max_context=256, chunk=128)


@pytest.fixture(scope="module")
def model(source: ModelSource) -> Adjustable:
    return Adjustable.of(source.weight_types())


@pytest.fixture(scope="module")
def units(source: ModelSource, model: Adjustable) -> Units:
    return Units(model, source.config, 256, ASPECTS)


@pytest.fixture(scope="module")
def encoded(compiled_tiny: Path) -> list[Encoded]:
    tokenizer = Artifact.open(compiled_tiny).tokenizer()
    texts = [Text(kind, text, f"text {i}") for i, (kind, text) in enumerate(TEXTS)]
    return [Encoded(t, [0, *tokenizer.encode(t.text)]) for t in texts]


@pytest.fixture(scope="module")
def evaluator(
    source: ModelSource,
    model: Adjustable,
    units: Units,
    encoded: list[Encoded],
    tmp_path_factory: pytest.TempPathFactory,
) -> Evaluator:
    reference = high(model, ASPECTS)
    folder = tmp_path_factory.mktemp("weights")
    return Evaluator(source, encoded, folder, reference, [lowered(reference, units.modules)], threads=1)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"kind": k, "text": t}) for k, t in TEXTS))
    return path


# -- experiments ------------------------------------------------------------------------------


def test_every_module_is_lowered_once(units: Units, model: Adjustable) -> None:
    for aspect in ASPECTS:
        assert [u.name for u in units.modules if u.aspect == aspect] == list(model.modules[aspect])
    kinds = units.kinds()
    assert {m for k in kinds for m in units.of(k)} == set(units.modules)
    assert all(k.is_kind and k.kind == k.name for k in kinds)
    assert sum(k.saves for k in kinds) == sum(u.saves for u in units.modules)


def test_bytes_that_are_saved(units: Units) -> None:
    """tiny-v4: 256 wide, heads of 128 of which 64 are rounded, a window of 128."""
    found = {(u.aspect, u.name): u.saves for u in units.modules}
    assert found["activations", "layers.0.attn.wq_a"] == 256 - 2
    assert found["activations", "layers.0.ffn.experts.w2"] == 4 * (128 - 1)
    assert found["weights", "layers.0.attn.wq_a"] == 128 * 256 + 2 - 128 * 256 // 2 - 128 * 8
    assert found["keys", "layers.0.attn"] == 128 * (64 - 1)
    assert found["keys", "layers.2.attn"] == (128 + 32) * (64 - 1)
    assert found["keys", "layers.3.attn"] == (128 + 2) * (64 - 1)
    assert found["keys", "layers.2.attn.indexer"] == 64 * (128 * 3 // 2 - 4)


def test_lowering_one_leaves_the_others(units: Units, model: Adjustable) -> None:
    reference = high(model, ASPECTS)
    for unit in units.modules:
        found = lowered(reference, [unit])
        differs = [
            reference.high_activations ^ found.high_activations,
            reference.high_keys ^ found.high_keys,
            reference.fp4_weights ^ found.fp4_weights,
        ]
        assert [sorted(d) for d in differs] == [[unit.name] if a == unit.aspect else [] for a in ASPECTS]
    assert lowered(reference, units.modules) == Precision(fp4_weights=frozenset(model.modules["weights"]))


def test_aspects_that_are_not_looked_at_stay_as_released(model: Adjustable) -> None:
    assert high(model, ("keys",)) == Precision(high_keys=frozenset(model.modules["keys"]))


@pytest.mark.parametrize("aspects", [ASPECTS, ("activations",), ("weights", "keys")])
def test_a_plan_means_what_was_measured(
    model: Adjustable, units: Units, aspects: tuple[str, ...], source: ModelSource
) -> None:
    chosen = Units(model, source.config, 256, aspects)
    kinds = chosen.kinds()
    every = [u for k in kinds[::2] for u in chosen.of(k)] + list(kinds[1::2])
    for kept in ([], every, every[::3], every[1::2]):
        plan = plan_with(model, aspects, every, kept)
        low = [u for u in every if u not in kept]
        assert plan.resolve(model) == lowered(high(model, aspects), low)
        assert parse_plan_text(plan.to_text(), "here").resolve(model) == plan.resolve(model)


def test_the_most_sensitive_kinds_are_taken_apart(units: Units) -> None:
    kinds = units.kinds()
    found = [(kind, float(at)) for at, kind in enumerate(kinds)]
    assert expanded(found, units, None) == list(kinds[::-1])
    assert expanded(found, units, 0) == []
    few = expanded(found, units, 12)
    left = 12
    for kind in kinds[::-1]:  # whoever fits when it is looked at
        assert (kind in few) == (len(kind.modules) <= left)
        left -= len(kind.modules) if kind in few else 0


# -- measuring --------------------------------------------------------------------------------


def test_the_reference_is_at_no_distance_from_itself(evaluator: Evaluator, model: Adjustable) -> None:
    again = evaluator.measure(high(model, ASPECTS))
    assert again == evaluator.reference
    assert all(r.kl == 0 and r.agreements == r.tokens for r in again)


def test_the_figures_are_those_of_compiled_models(
    evaluator: Evaluator, encoded: list[Encoded], tiny_v4: Path, tmp_path: Path
) -> None:
    """The released precision, measured beside the reference, and both compiled and scored by themselves."""
    found = evaluator.measure(Precision())
    plan = parse_plan_text('[default]\nactivations = "bf16"\nkeys = "bf16"\n', "here")
    engines = []
    for name, precision in (("low", None), ("high", plan)):
        options = CompileOptions(max_context=256, chunk=128, target="host", precision=precision)
        compile_model(tiny_v4, tmp_path / name, options)
        artifact = Artifact.open(tmp_path / name)
        largest = {v: path for v, path in artifact.manifest.variants.items() if v.capacity == 256}
        manifest = replace(artifact.manifest, variants=largest)  # the one that is measured
        engines.append(Engine(replace(artifact, manifest=manifest), threads=1))
    for result, text in zip(found, encoded, strict=True):
        assert result.tokens == len(text.ids) - 1
        ours, theirs = (e.predict(0, text.ids) for e in engines)
        assert result.nll == pytest.approx(float(ours.nll.double().sum()), rel=1e-5)
        assert result.agreements == int((ours.predicted == theirs.predicted).sum())
        assert result.kl > 0
    assert Divergence.of(found).kl < 0.1


def test_divergence_is_kl_of_the_logits(evaluator: Evaluator, encoded: list[Encoded]) -> None:
    """Of two distributions that are written down here."""
    wanted = torch.log_softmax(torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)), -1)
    kept = evaluator._log_probs.read(0, 3).clone()
    try:
        evaluator._log_probs.write(0, wanted)
        logits = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))
        _, kl, same = evaluator._compare(encoded[0], 0, 0, logits)
    finally:
        evaluator._log_probs.write(0, kept)
    p, q = wanted.double().exp(), torch.softmax(logits.double(), -1)
    assert kl == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert same == int((p.argmax(-1) == q.argmax(-1)).sum())


@pytest.mark.parametrize("name", FORCED)
def test_forced_roundings_change_something(evaluator: Evaluator, model: Adjustable, name: str) -> None:
    found = Divergence.of(evaluator.measure_forced(high(model, ASPECTS), FORCED[name]))
    assert 1e-5 < found.kl < 0.1
    assert found.agreement < 1


def test_a_disk_that_is_too_small(
    source: ModelSource, encoded: list[Encoded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(evaluator_module.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(MachineError, match="1,000 are free"):
        Evaluator(source, encoded, tmp_path, Precision(), threads=1)


# -- the study --------------------------------------------------------------------------------


def test_texts_are_split_by_kind() -> None:
    made = [Encoded(Text(k, "x", f"{k}{i}"), [0, 1]) for i in range(3) for k in ("a", "b")]
    empty = Encoded(Text("a", "", "empty"), [0])
    halves = [[t.text.where for t in choose_texts([empty, *made], (i, 2))] for i in range(2)]
    assert halves == [["a0", "b0", "a2", "b2"], ["a1", "b1"]]
    assert choose_texts(made, (0, 1)) == made


def test_options_that_are_wrong() -> None:
    assert parse_split("1/2") == (1, 2)
    assert parse_aspects("weights, keys") == ("keys", "weights")
    assert parse_forced(["hc", "hc"]) == (FORCED["hc"],)
    for wrong in ("2/2", "1", "-1/2", "a/b", "0/0"):
        with pytest.raises(UsageError, match="--split"):
            parse_split(wrong)
    with pytest.raises(UsageError, match="there is no aspect 'bits'"):
        parse_aspects("keys,bits")
    with pytest.raises(UsageError, match="there is no 'norms'"):
        parse_forced(["norms"])
    for options in ({"budget": -1.0}, {"budget": float("nan")}, {"most_modules": -1}, {"aspects": ()}):
        with pytest.raises(UsageError):
            StudyOptions(**options)  # type: ignore[arg-type]


class Additive:
    """Stands in for an evaluator: every lowered module adds its own divergence to one text."""

    def __init__(self, costs: dict[tuple[str, str], float]):
        self.costs, self.calls = costs, 0
        self.reference = [TextResult("prose", 100, 200.0, 0.0, 100)]

    def measure(self, precision: Precision) -> list[TextResult]:
        self.calls += 1
        kept = {"activations": precision.high_activations, "keys": precision.high_keys}
        low = [
            cost
            for (aspect, path), cost in self.costs.items()
            if (path in precision.fp4_weights if aspect == "weights" else path not in kept[aspect])
        ]
        return [TextResult("prose", 100, 200.0, 100 * sum(low), 100)]


@pytest.mark.parametrize("options", [{}, {"kinds_only": True}, {"most_modules": 14}])
def test_a_plan_keeps_what_costs_most_for_its_bytes(
    units: Units, model: Adjustable, options: dict[str, Any]
) -> None:
    costs = {(u.aspect, u.name): 1e-6 * (1 + 7 * at % 31) for at, u in enumerate(units.modules)}
    total = sum(costs.values())
    for budget in (0.0, total / 10, total / 2, 2 * total):
        fake: Any = Additive(costs)
        run = StudyRun(
            fake, units, high(model, ASPECTS), StudyOptions(budget=budget, **options), lambda *_: None
        )
        findings = run.findings()
        planned = run.plan(model, ASPECTS)
        assert planned.lowest.kl == pytest.approx(total)
        assert planned.all.kl <= budget
        assert planned.saves <= planned.most == sum(u.saves for u in units.modules)
        ranked = sorted(run.ranked, key=lambda r: (-r[1] / r[0].saves, r[0].name))
        kept, rest = ranked[: planned.kept], ranked[planned.kept :]
        assert planned.plan.resolve(model) == lowered(high(model, ASPECTS), [u for u, _ in rest])
        assert planned.units == len(ranked)
        if kept:  # one fewer would not fit
            assert planned.all.kl + kept[-1][1] > budget
        assert fake.calls <= len(findings) + 9


def test_loss_of_likelihood_counts_too(units: Units, model: Adjustable) -> None:
    fake: Any = Additive({})
    fake.measure = lambda precision: [
        TextResult("prose", 100, 200.0 + 5 * bool(precision.fp4_weights), 0.0, 100)
    ]
    run = StudyRun(
        fake, units, high(model, ASPECTS), StudyOptions(kinds_only=True, budget=0.04), lambda *_: None
    )
    run.findings()
    assert run.plan(model, ASPECTS).plan.resolve(model).fp4_weights == frozenset()


# -- the command ------------------------------------------------------------------------------


def test_from_the_command_to_a_compiled_model(cli: Cli, tiny_v4: Path, tmp_path: Path, texts: Path) -> None:
    """The plan that is written is obeyed, and loses what was said."""
    plan = tmp_path / "plan.toml"
    some = ("--aspects", "keys", "--kinds-only", "--threads", 1, "--budget", 0.0005)
    done = cli("sensitivity", tiny_v4, "--text", texts, *some, "-o", plan, "--format", "json")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["format"] == "rewright.sensitivity"
    assert [e["scope"] for e in found["experiments"]] == ["kind", "kind"]
    assert set(found["experiments"][0]["kinds"]) == {k for k, _ in TEXTS}
    assert plan.read_text().startswith("# KL ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.toml", "texts.jsonl"]
    out = tmp_path / "out"
    small = ("--max-context", 256, "--target", "host", "--precision-plan", plan)
    assert cli(tiny_v4, "-o", out, *small, program="compile-model").code == 0
    scored = json.loads(cli("score", out, "--text", texts, "--json").stdout)
    # Short contexts run on a smaller variant, which sums in another order.
    assert scored["all"]["nll"] == pytest.approx(found["plan"]["all"]["nll"], abs=0.01)


def test_tables(cli: Cli, tiny_v4: Path, texts: Path) -> None:
    some = ("--aspects", "keys", "--threads", 1, "--modules", 2, "--force-low", "router")
    done = cli("sensitivity", tiny_v4, "--text", texts, *some)
    assert done.code == 0, done.stderr
    for heading in ("All modules of a kind lowered", "One module lowered", "Rounded to FP8 though"):
        assert heading in done.stdout
    assert "| everything low |" in done.stdout
    assert "layers.4.attn.indexer" in done.stdout
    assert "layers.0.attn " not in done.stdout
    done = cli("sensitivity", tiny_v4, "--text", texts, *some[:4], "--kinds-only", "--format", "csv")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("scope,name,aspect,modules,saves_bytes,text_kind,texts,tokens,nll")
    assert len(lines) == 1 + 3 * (1 + len(TEXTS))


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        (("--kinds-only", "--modules", 3), 2, "do not go together"),
        (("--aspects", "bits"), 2, "there is no aspect 'bits'"),
        (("--split", "3/2"), 2, "is not PART/PARTS"),
        (("--split", "1/2"), 3, "part 1 of 2 has no text"),
        (("--force-low", "head"), 2, "choose of router, attention, hc"),
        (("--budget", "-1"), 2, "not a number of nats"),
        (("-o", "nowhere/plan.toml"), 2, "is no place for a file"),
        (("--plot", "a.pdf"), 2, "neither .png nor .svg"),
    ],
)
def test_what_is_refused(
    cli: Cli, tiny_v4: Path, texts: Path, options: tuple[object, ...], code: int, what: str
) -> None:
    done = cli("sensitivity", tiny_v4, "--text", texts, *options)
    assert (done.code, done.stdout) == (code, "")
    assert what in done.stderr


def test_folders_that_are_no_checkpoint(cli: Cli, tmp_path: Path, texts: Path) -> None:
    assert cli("sensitivity", tmp_path / "none", "--text", texts).code == 3
    assert cli("sensitivity", tmp_path, "--text", texts).code == 3


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The second experiment is interrupted; the folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    measure = Evaluator.measure
    calls = []

    def stop(self: Evaluator, precision: Precision) -> Any:
        calls.append(precision)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, precision)

    monkeypatch.setattr(Evaluator, "measure", stop)
    return tmp_path


def test_an_interrupted_run_leaves_nothing(cli: Cli, tiny_v4: Path, interrupted: Path, texts: Path) -> None:
    plan = interrupted / "plan.toml"
    plan.write_text("# an older one\n")
    done = cli("sensitivity", tiny_v4, "--text", texts, "--threads", 1, "--aspects", "keys", "-o", plan)
    assert done.code == 130
    assert done.stdout == ""
    assert plan.read_text() == "# an older one\n"
    assert sorted(p.name for p in interrupted.iterdir()) == ["plan.toml", "texts.jsonl"]
