"""Models with a low and a high variant of every shape: what they share, and what a switch does."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.numerics import Numerics
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.plan import parse_plan
from rewright.ir.variant import Variant
from rewright.passes.facts import Facts
from rewright.passes.high_precision import high_of
from rewright.passes.manager import PassOptions
from rewright.runtime.engine import Engine
from rewright.runtime.generate import GenerateOptions, generate
from rewright.runtime.host import HostModel
from rewright.runtime.load import Artifact
from rewright.runtime.model import Row
from rewright.runtime.reference import ReferenceModel
from rewright.runtime.sampling import SamplingOptions
from rewright.runtime.score import load_texts, score_texts

LIMITS: dict[str, Any] = {"max_context": 1024, "max_batch": 4}
PROMPT, TOKENS, EVERY = 9, 300, 7
MOST_GROWTH = 0.03
GREEDY = GenerateOptions(SamplingOptions(temperature=0), max_new_tokens=16)
SAMPLED = GenerateOptions(SamplingOptions(temperature=1.2, top_p=0.9, seed=5), max_new_tokens=16)


@pytest.fixture(scope="module")
def compiled(tiny_v4: Path, compiled_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tiny-v4 in both precisions (`both`), in the low one alone, and in that of the high one alone."""
    folder = tmp_path_factory.mktemp("precisions")
    found = {"both": folder / "both", "low": compiled_tiny, "high": folder / "high"}
    options = CompileOptions(target="host", precisions=("low", "high"), **LIMITS)
    compile_model(tiny_v4, found["both"], options)
    compile_model(tiny_v4, found["high"], CompileOptions(Numerics.BF16, target="host", **LIMITS))
    return found


def engine(folder: Path, precision: str = "low", *, reference: bool = False) -> Engine:
    return Engine(Artifact.open(folder), threads=1, precision=precision, reference=reference)


def random_ids(count: int, seed: int = 3) -> list[int]:
    return torch.randint(2, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def state_of(model: object) -> dict[str, Tensor]:
    assert isinstance(model, HostModel | ReferenceModel)
    return {"": model.state} if isinstance(model, HostModel) else dict(model.state)


def copy_state(source: Engine, target: Engine) -> None:
    theirs = state_of(target.model)
    for name, tensor in state_of(source.model).items():
        theirs[name].copy_(tensor)


def alternate(run: Engine, pure: dict[str, Engine], ids: list[int], every: int) -> Counter[str]:
    """Feed one token after the other, in the other precision after each `every`: each segment gives the
    logits of a model that never switches and goes on from the state at the switch. Segments by precision."""
    run.prefill(0, ids[:PROMPT])
    segments: Counter[str] = Counter()
    for begin in range(PROMPT, len(ids), every):
        run.precision = "high" if segments.total() % 2 == 0 else "low"
        segments[run.precision] += 1
        ours, other = pure[run.precision], pure["low" if run.precision == "high" else "high"]
        copy_state(run, ours)
        copy_state(run, other)
        for pos in range(begin, min(begin + every, len(ids))):
            row = Row((ids[pos],), pos, 0)
            logits = run.decode({0: ids[pos]})[0]
            # The same kernels over the same numbers in the same order: nothing is left to differ.
            assert torch.equal(logits, ours.model.step([row])[0])
            assert not torch.equal(logits, other.model.step([row])[0])
        for name, tensor in state_of(run.model).items():
            assert torch.equal(tensor, state_of(ours.model)[name])
    return segments


def test_each_segment_is_that_of_a_model_that_never_switches(compiled: dict[str, Path]) -> None:
    """300 tokens, a switch every 7, over a boundary of capacities, beside models of one precision."""
    pure = {precision: engine(compiled[precision]) for precision in ("low", "high")}
    segments = alternate(engine(compiled["both"]), pure, random_ids(PROMPT + TOKENS), EVERY)
    assert segments == {"high": 22, "low": 21}


def test_the_interpreter_switches_too(compiled: dict[str, Path]) -> None:
    pure = {precision: engine(compiled[precision], reference=True) for precision in ("low", "high")}
    run = engine(compiled["both"], reference=True)
    assert alternate(run, pure, random_ids(PROMPT + 9), 3) == {"high": 2, "low": 1}


def test_prompts_are_read_in_the_precision_of_the_moment(compiled: dict[str, Path]) -> None:
    ids = random_ids(300)
    for precision in ("low", "high"):
        run, pure = engine(compiled["both"], precision), engine(compiled[precision])
        assert torch.equal(run.prefill(1, ids), pure.prefill(1, ids))
        assert torch.equal(run.score(0, ids), pure.score(0, ids))


def test_a_plan_is_bound_once(compiled: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch back and forth reads nothing again: weights are mapped once, each plan is read once."""
    read: Counter[str] = Counter()
    plan_text, weights = Artifact.plan_text, Artifact.weights

    def counted(artifact: Artifact, variant: Variant) -> str:
        read[variant.name] += 1
        return plan_text(artifact, variant)

    def mapped(artifact: Artifact) -> dict[str, Tensor]:
        read["weights"] += 1
        return weights(artifact)

    monkeypatch.setattr(Artifact, "plan_text", counted)
    monkeypatch.setattr(Artifact, "weights", mapped)
    run = engine(compiled["both"])
    ids = random_ids(150)
    for at, token in enumerate(ids):
        run.precision = ("low", "high")[at // 2 % 2]
        run.decode({0: token})
    shapes = ("decode-b1-c128", "decode-b1-c1024")
    assert read == Counter(["weights", *shapes, *(f"{shape}-high" for shape in shapes)])


def test_scores_are_those_of_bf16_numerics(compiled: dict[str, Path], tiny_v4: Path) -> None:
    texts = load_texts(tiny_v4 / "text" / "evaluation.jsonl")[::6]
    high = score_texts(engine(compiled["both"], "high"), texts, lambda count: None)
    assert high == score_texts(engine(compiled["high"]), texts, lambda count: None)
    low = score_texts(engine(compiled["both"]), texts, lambda count: None)
    assert low == score_texts(engine(compiled["low"]), texts, lambda count: None)
    assert low != high


class TestGeneration:
    PRECISIONS = ("low", "high", "high", "low", "high", "low")

    @pytest.fixture
    def prompts(self) -> list[list[int]]:
        """Six for four slots, so that some wait."""
        return [random_ids(count, seed=count) for count in (3, 130, 9, 40, 5, 1)]

    @staticmethod
    def completions(
        run: Engine, prompts: list[list[int]], options: GenerateOptions, precisions: tuple[str, ...] = ()
    ) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for event in generate(run, prompts, options, precisions):
            if event.token is not None:
                found[event.request].append(event.token)
        return found

    @pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_each_prompt_of_a_batch_has_its_own(
        self, compiled: dict[str, Path], prompts: list[list[int]], options: GenerateOptions
    ) -> None:
        run = engine(compiled["both"])
        together = self.completions(run, prompts, options, self.PRECISIONS)
        assert run.precision == "low"
        pure = {precision: engine(compiled[precision]) for precision in ("low", "high")}
        for precision, ids, found in zip(self.PRECISIONS, prompts, together, strict=True):
            assert [found] == self.completions(pure[precision], [ids], options)
        assert together != self.completions(pure["low"], prompts, options)

    def test_without_choices_it_is_that_of_the_engine(
        self, compiled: dict[str, Path], prompts: list[list[int]]
    ) -> None:
        found = self.completions(engine(compiled["both"], "high"), prompts, GREEDY)
        assert found == self.completions(engine(compiled["high"]), prompts, GREEDY)

    def test_steps_are_of_one_precision(self, compiled: dict[str, Path]) -> None:
        run = engine(compiled["both"])
        steps: list[tuple[str, set[int]]] = []
        decode = run.decode

        def watched(tokens: dict[int, int]) -> dict[int, Tensor]:
            steps.append((run.precision, set(tokens)))
            return decode(tokens)

        run.decode = watched  # type: ignore[method-assign]
        self.completions(run, [[5]] * 4, GREEDY, ("low", "high", "low", "high"))
        assert steps == [("low", {0, 2}), ("high", {1, 3})] * 15

    def test_given_up_it_leaves_the_engine_as_it_was(self, compiled: dict[str, Path]) -> None:
        run = engine(compiled["both"])
        stream = generate(run, [[5]], GREEDY, ("high",))
        next(stream)
        assert run.precision == "high"
        stream.close()  # type: ignore[attr-defined]
        assert run.precision == "low"

    def test_a_precision_that_is_not_there(self, compiled: dict[str, Path]) -> None:
        with pytest.raises(UsageError, match="without high variants"):
            list(generate(engine(compiled["low"]), [[5]], GREEDY, ("high",)))


def test_a_model_without_high_variants_says_so(compiled: dict[str, Path]) -> None:
    run = engine(compiled["low"])
    for attempt in (lambda: setattr(run, "precision", "high"), lambda: engine(compiled["low"], "high")):
        with pytest.raises(
            UsageError, match=r"compiled without high variants\n.*--variants low,high"
        ) as caught:
            attempt()
        assert caught.value.where == str(compiled["low"])
    assert run.precision == "low"
    with pytest.raises(UsageError, match="there is no precision 'medium'"):
        run.precision = "medium"


class TestArtifact:
    def test_it_holds_the_low_one_and_edits(self, compiled: dict[str, Path]) -> None:
        """All files of the model with low variants alone are there with the same bytes."""
        both, low = compiled["both"], compiled["low"]
        names = {str(p.relative_to(low)) for p in low.rglob("*") if p.is_file()}
        more = {str(p.relative_to(both)) for p in both.rglob("*") if p.is_file()} - names
        changed = {name for name in names if (both / name).read_bytes() != (low / name).read_bytes()}
        assert changed == {"manifest.json", "passes.json"}
        shapes = [v.name for v in Artifact.open(low).manifest.variants]
        edits = (f"plan-{s}-high.json.ed" for s in shapes), (f"graphs/layout/{s}-high.txt.ed" for s in shapes)
        assert more == {*edits[0], *edits[1]}
        report = json.loads((low / "passes.json").read_text())
        assert json.loads((both / "passes.json").read_text()).items() >= report.items()

    def test_high_plans_and_graphs_are_those_of_bf16_numerics(self, compiled: dict[str, Path]) -> None:
        both, high = Artifact.open(compiled["both"]), Artifact.open(compiled["high"])
        assert both.manifest.precisions == ("low", "high")
        assert high.manifest.precisions == ("low",)
        for variant in high.manifest.variants:
            named = variant.at("high").name
            text = high.plan_text(variant).replace('"tokens":', '"precision": "high", "tokens":', 1)
            assert both.plan_text(variant.at("high")) == text
            graph = both.graph(variant.at("high"))
            assert (graph.name, graph.attrs["numerics"]) == (named, "bf16")
            graph.name = variant.name
            del graph.attrs["precision"]
            assert graph == high.graph(variant)

    @pytest.mark.parametrize("target", ["host", "sm80"])
    def test_it_is_hardly_larger(self, tiny_v4: Path, tmp_path: Path, target: str) -> None:
        """With the default limits, and of the weights alone, so also of all files and of what a run holds."""
        sizes, stored = {}, {}
        for precisions in (("low",), ("low", "high")):
            out = tmp_path / "-".join(precisions)
            compile_model(tiny_v4, out, CompileOptions(target=target, precisions=precisions))
            sizes[precisions] = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
            stored[precisions] = Artifact.open(out).weight_bytes
        more = sizes["low", "high"] - sizes[("low",)]
        assert stored["low", "high"] == stored[("low",)]
        assert 0 < more <= MOST_GROWTH * stored[("low",)]

    def test_the_state_is_the_same(self, compiled: dict[str, Path]) -> None:
        """Every tensor of it lies in the same place: nothing is converted at a switch."""
        artifact = Artifact.open(compiled["both"])
        states = []
        for variant in artifact.manifest.variants:
            plan = parse_plan(artifact.plan_text(variant))
            states.append({n: p for n, p in plan.values.items() if p.space == "state"})
        leaves = [{n: p for n, p in s.items() if not n.endswith(".next")} for s in states]
        assert all(leaf == leaves[0] for leaf in leaves)

    def test_other_stages_of_a_high_variant_are_not_kept(self, compiled: dict[str, Path]) -> None:
        artifact = Artifact.open(compiled["both"])
        variant = min(v for v in artifact.manifest.variants if v.is_high)
        with pytest.raises(UsageError, match=f"of {variant.name} only the graph at stage layout is kept"):
            artifact.graph(variant, "fused")
        with pytest.raises(UsageError, match="compiled without stage painted"):
            artifact.graph(variant, "painted")
        assert artifact.graph(variant, "layout") == artifact.graph(variant)

    @pytest.mark.parametrize("name", ["plan-decode-b1-c1024-high.json.ed", "plan-decode-b1-c1024.json"])
    def test_edits_of_another_file_are_refused_in_words(
        self, compiled: dict[str, Path], tmp_path: Path, name: str
    ) -> None:
        copy = Path(shutil.copytree(compiled["both"], tmp_path / "copy"))
        data = b"9999d\n" if name.endswith(".ed") else b"{}\n"
        (copy / name).write_bytes(data)
        manifest = json.loads((copy / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (copy / "manifest.json").write_text(json.dumps(manifest))
        run = engine(copy, "high")
        run.prefill(0, random_ids(200))
        with pytest.raises(BadInput, match=r"no edits of plan-decode-b1-c1024\.json .*not within") as caught:
            run.decode({0: 1})
        assert caught.value.where == str(copy / "plan-decode-b1-c1024-high.json.ed")

    def test_two_compilations_give_the_same_bytes(
        self, make_checkpoint: Callable[..., Path], tmp_path: Path
    ) -> None:
        """Also where wo_a and wo_b are folded, in both precisions then."""
        checkpoint = make_checkpoint(tmp_path / "ckpt")
        options = CompileOptions(max_context=128, target="host", fold_wo="always", precisions=("low", "high"))
        for name in ("a", "b"):
            compile_model(checkpoint, tmp_path / name, options)
        files = [sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("a", "b")]
        assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
        assert Artifact.open(tmp_path / "a").manifest.fold_wo


class TestOptions:
    def test_of_the_high_one(self) -> None:
        facts = Facts({"a": 1}, "faithful", {}, "auto")
        assert high_of(facts) == Facts({"a": 1}, "bf16", {}, "never")
        assert high_of(Facts({}, "faithful", {}, "always")) == Facts({}, "bf16", {}, "always")

    @pytest.mark.parametrize("numerics", [Numerics.BF16, Numerics.FP32])
    def test_nothing_is_left_to_be_higher(self, numerics: Numerics) -> None:
        with pytest.raises(UsageError, match=f"nothing is left to be higher: in {numerics.value} numerics"):
            CompileOptions(numerics, precisions=("low", "high"))

    @pytest.mark.parametrize(
        "passes", [PassOptions.of(to="traced"), PassOptions.of(None, ("eliminate_quant",))]
    )
    def test_the_pass_that_makes_it_must_run(self, passes: PassOptions) -> None:
        with pytest.raises(UsageError, match="pass eliminate_quant makes the high one, and it does not run"):
            CompileOptions(passes=passes, precisions=("low", "high"))

    def test_an_earlier_last_stage(self, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
        options = CompileOptions(
            max_context=128,
            target="host",
            passes=PassOptions.of(to="canonical"),
            precisions=("low", "high"),
        )
        compile_model(make_checkpoint(tmp_path / "ckpt"), tmp_path / "out", options)
        run = engine(tmp_path / "out", "high")
        assert run.artifact.manifest.stages[-1] == "canonical"
        assert run.prefill(0, [1, 2, 3]).isfinite().all()

    def test_a_model_without_scales_has_nothing_to_choose(
        self, make_checkpoint: Callable[..., Path], tmp_path: Path
    ) -> None:
        checkpoint = make_checkpoint(tmp_path / "ckpt", dense="bf16", experts="bf16")
        options = CompileOptions(max_context=128, target="host", precisions=("low", "high"))
        done = compile_model(checkpoint, tmp_path / "out", options)
        assert any("high variants compute what low ones do" in note for note in done.notes)
