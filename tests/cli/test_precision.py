"""The commands with a choice of precision: --variants, --precision, --rules, and graph specs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PROMPTS = ("-p", "In the beginning God created", "-p", "def f(x):\n    return x\n", "-p", "12 + 7 = ?")
SHORT = ("--max-new-tokens", 8, "--temperature", 0)


@pytest.fixture(scope="module")
def both(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-v4 with high variants, for two sequences of 1024 tokens."""
    from rewright.compiler import CompileOptions, compile_model

    out = tmp_path_factory.mktemp("both") / "out"
    options = CompileOptions(max_context=1024, max_batch=2, target="host", precisions=("low", "high"))
    compile_model(tiny_v4, out, options)
    return out


@pytest.fixture(scope="module")
def bf16(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rewright.compiler import CompileOptions, compile_model
    from rewright.frontend.numerics import Numerics

    out = tmp_path_factory.mktemp("bf16") / "out"
    compile_model(tiny_v4, out, CompileOptions(Numerics.BF16, max_context=1024, max_batch=2, target="host"))
    return out


class TestCompileModel:
    def test_explain_and_sizes_name_both(self, cli: Callable, tiny_v4: Path) -> None:
        """The whole table is printed of low variants, a line of each other."""
        limits = ("--max-context", 1024, "--target", "host", "--dry-run", "--explain")
        done = cli("compile-model", tiny_v4, "--variants", "low,high", *limits)
        assert done.code == 0, done.stderr
        alone = cli("compile-model", tiny_v4, *limits)
        assert done.stdout.count("eliminate_quant") == alone.stdout.count("eliminate_quant")
        for name in ("decode-b1-c128", "decode-b1-c1024", "score128-b1-c1024"):
            assert done.stdout.count(f"{name}-high") == 2  # what the passes did, and sizes
        assert "-high" not in alone.stdout

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--variants", "medium"), "--variants: there is no variant 'medium'\n  -> low, or low,high"),
            (("--variants", "high"), "--variants: the high one comes beside the low one"),
            (("--variants", ""), "--variants: there is no variant ''"),
            (
                ("--variants", "low,high", "--numerics", "bf16"),
                "--variants low,high: nothing is left to be higher",
            ),
            (("--variants", "low,high", "--numerics", "fp32"), "in fp32 numerics no activation is quantised"),
            (
                ("--variants", "low,high", "--no-pass", "eliminate_quant"),
                "pass eliminate_quant makes the high one",
            ),
        ],
    )
    def test_what_is_refused(
        self, cli: Callable, tiny_v4: Path, tmp_path: Path, options: tuple[str, ...], message: str
    ) -> None:
        done = cli(tiny_v4, "-o", tmp_path / "out", *options, program="compile-model")
        assert done.code == 2
        assert message in done.stderr
        assert not (tmp_path / "out").exists()


class TestGenerate:
    def test_auto_decides_for_each_prompt(self, cli: Callable, both: Path) -> None:
        done = cli("generate", both, *PROMPTS, *SHORT, "--precision", "auto", "--json")
        assert done.code == 0, done.stderr
        assert done.stderr.splitlines()[:3] == [
            "precision: prompt 1: low (no rule applies)",
            "precision: prompt 2: high (code: 2 of 2 lines)",
            "precision: prompt 3: high (calculation: 1 of 1 line)",
        ]
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert [r["precision"] for r in found] == ["low", "high", "high"]
        assert [r["sensitive"] for r in found] == [[], ["code: 2 of 2 lines"], ["calculation: 1 of 1 line"]]
        for at, record in enumerate(found):
            alone = cli(
                "generate",
                both,
                *PROMPTS[2 * at : 2 * at + 2],
                *SHORT,
                "--precision",
                record["precision"],
                "--json",
            )
            assert json.loads(alone.stdout)["tokens"] == record["tokens"]
            assert json.loads(alone.stdout)["sensitive"] is None

    def test_one_prompt_is_not_numbered(self, cli: Callable, both: Path) -> None:
        done = cli("generate", both, "--chat", "What is 17 + 25?", *SHORT, "--precision", "auto")
        assert done.code == 0
        assert done.stderr.startswith("precision: high (calculation: 1 of 1 line)\n")

    @pytest.mark.parametrize("reference", [(), ("--reference",)])
    def test_high_is_bf16_numerics(
        self, cli: Callable, both: Path, bf16: Path, reference: tuple[str, ...]
    ) -> None:
        high = cli("generate", both, *PROMPTS[:2], *SHORT, "--precision", "high", *reference)
        assert high.code == 0, high.stderr
        assert high.stdout == cli("generate", bf16, *PROMPTS[:2], *SHORT, *reference).stdout

    def test_rules_of_ones_own(self, cli: Callable, both: Path, tmp_path: Path) -> None:
        rules = tmp_path / "rules.toml"
        rules.write_text("format = 1\n[[rule]]\nname = 'names'\npatterns = ['God']\n")
        done = cli("generate", both, *PROMPTS, *SHORT, "--precision", "auto", "--rules", rules)
        assert "prompt 1: high (names: 1 of 1 line)\nprecision: prompt 2: low" in done.stderr
        rules.write_text("format = 1\n[[rule]]\nname = 'names'\npatterns = ['(a+)+']\n")
        done = cli("generate", both, *PROMPTS, *SHORT, "--precision", "auto", "--rules", rules)
        assert done.code == 3
        assert f"{rules}, rule 1 (names): pattern '(a+)+' cannot be used: it repeats a group" in done.stderr

    def test_rules_go_with_auto(self, cli: Callable, both: Path) -> None:
        done = cli("generate", both, *PROMPTS, "--rules", "rules.toml")
        assert done.code == 2
        assert "--rules rules.toml: goes with --precision auto" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "-p", "x", "--precision", "high"),
        ("generate", "-p", "x", "--precision", "auto"),
        ("score", "--text", "examples/tiny-v4/text/evaluation.jsonl", "--precision", "high"),
        ("bench", "--precision", "high"),
    ],
)
def test_a_model_without_high_variants(cli: Callable, compiled_tiny: Path, command: tuple[str, ...]) -> None:
    done = cli(command[0], compiled_tiny, *command[1:])
    assert done.code == 2
    assert f"{compiled_tiny}: it was compiled without high variants" in done.stderr
    assert "--variants low,high" in done.stderr


def test_scores_are_those_of_bf16_numerics(cli: Callable, both: Path, bf16: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = [
        {"kind": "prose", "text": "In the beginning God created the heaven. " * 8},
        {"text": "def f(): pass"},
    ]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    high = cli("score", both, "--text", texts, "--json", "--precision", "high")
    assert high.code == 0, high.stderr
    assert high.stdout == cli("score", bf16, "--text", texts, "--json").stdout
    assert high.stdout != cli("score", both, "--text", texts, "--json").stdout


def test_a_benchmark_says_which(cli: Callable, both: Path) -> None:
    run = ("bench", both, "-p", 8, "-n", 2, "-r", 1, "--precision", "high")
    record = json.loads(cli(*run, "--json", "--stages").stdout)
    assert record["precision"] == "high"
    assert record["stages"][0]["variant"] == "decode-b1-c128-high"
    assert "faithful, high" in cli(*run).stdout
    done = cli("bench", "--random-weights", "examples/configs/v4-flash.json", "--precision", "high")
    assert done.code == 2
    assert "a random model has low variants only" in done.stderr


class TestGraph:
    def test_a_high_variant_is_named(self, cli: Callable, both: Path, tiny_v4: Path) -> None:
        """That of the artifact is that of the checkpoint with the same limits."""
        done = cli("graph", "dump", f"{both}@layout?precision=high")
        assert done.stdout.startswith("graph decode-b1-c1024-high {")
        same = cli("graph", "dump", f"{tiny_v4}@layout?precision=high&max-context=1024&max-batch=2")
        assert done.stdout == same.stdout
        plan = cli("graph", "dump", f"{both}@planned?precision=high&variant=chunk")
        assert plan.stdout.startswith("plan chunk128-b1-c1024-high\n")
        options = "precision=high&variant=chunk&max-context=1024&max-batch=2&target=host"
        assert plan.stdout == cli("graph", "dump", f"{tiny_v4}@planned?{options}").stdout

    def test_all_its_stages_are_made_of_a_checkpoint(self, cli: Callable, tiny_v4: Path) -> None:
        traced, high = (
            cli("graph", "dump", f"{tiny_v4}@traced?{p}").stdout for p in ("precision=low", "precision=high")
        )
        assert traced.partition("\n")[2] == high.partition("\n")[2]
        assert 'numerics="bf16"' in high.partition("\n")[0]
        bf16, fused = (
            cli("graph", "dump", f"{tiny_v4}@fused?{p}").stdout for p in ("numerics=bf16", "precision=high")
        )
        assert bf16.partition("\n")[2] == fused.partition("\n")[2]

    def test_both_compare_and_explain(self, cli: Callable, both: Path, tmp_path: Path) -> None:
        done = cli("graph", "diff", both, f"{both}?precision=high", "--stat", "--exit-code")
        assert done.code == 1
        assert "grouped_linear_quant" in done.stdout
        done = cli("explain", f"{both}?precision=high", "layers.2.attn.wq_b")
        assert "kernel of host: host.multi_linear" in done.stdout
        page = tmp_path / "page.html"
        assert cli("graph", "dump", f"{both}?precision=high", "--format", "html", "-o", page).code == 0
        assert "decode-b1-c1024-high" in page.read_text()

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("{both}?precision=medium", "there is no precision 'medium'\n  -> one of low, high"),
            ("{both}@fused?precision=high", "only the graph at stage layout is kept"),
            ("{ckpt}@fused?precision=high&numerics=bf16", "nothing is left to be higher"),
            ("{ckpt}@planned?precision=high&no-pass=eliminate_quant", "it does not run"),
            ("{low}?precision=high", "it was compiled without high variants"),
        ],
    )
    def test_what_is_refused(
        self, cli: Callable, both: Path, tiny_v4: Path, compiled_tiny: Path, spec: str, message: str
    ) -> None:
        done = cli("graph", "dump", spec.format(both=both, ckpt=tiny_v4, low=compiled_tiny))
        assert done.code == 2
        assert message in done.stderr
