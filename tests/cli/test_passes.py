"""Options of `compile-model` that are about passes, and the commands `passes` and `reproduce`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewright.ir.parser import parse
from rewright.passes import manager
from rewright.passes.fuse_norm_quant import NormQuant
from rewright.passes.match import Match
from rewright.passes.pipelines import PIPELINE, pass_names
from rewright.passes.rule import Rewriter

Cli = Callable[..., Any]
SMALL = ("--max-context", 128)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def compile_(cli: Cli, *args: object) -> Any:
    return cli(*args, program="compile-model")


class TestPasses:
    def test_list(self, cli: Cli) -> None:
        lines = cli("passes", "list").stdout.splitlines()
        assert [line.split()[1] for line in lines] == list(pass_names())

    @pytest.mark.parametrize("name", pass_names())
    def test_show(self, cli: Cli, name: str) -> None:
        shown = cli("passes", "show", name)
        assert shown.code == 0
        pass_ = next(p for p in PIPELINE if p.name == name)
        assert pass_.summary in shown.stdout
        for rule in pass_.rules:
            assert f"  {rule.name}: " in shown.stdout
        assert ": \n" not in shown.stdout, "a rule without a docstring"

    def test_show_of_no_pass(self, cli: Cli) -> None:
        refused = cli("passes", "show", "fuse_everything")
        assert refused.code == 2
        assert "fuse_norm_quant" in refused.stderr


class TestCompileOptions:
    def test_explain(self, cli: Cli, tiny_v4: Path, out: Path) -> None:
        done = compile_(cli, tiny_v4, "-o", out, *SMALL, "--explain")
        assert done.code == 0
        assert done.stdout.endswith(f"{out}\n")
        for name in pass_names():
            assert name in done.stdout
        assert "near misses" in done.stdout
        assert "faithful numerics keep the rounding" in done.stdout
        report = json.loads((out / "passes.json").read_text())
        assert {p["name"] for p in report["decode-b1-c128"]["passes"]} == set(pass_names())
        assert "seconds" not in json.dumps(report)

    def test_a_pass_left_out(self, cli: Cli, tiny_v4: Path, out: Path) -> None:
        options = ("--no-pass", "fuse_moe", "--no-pass", "fold_wo")
        assert compile_(cli, tiny_v4, "-o", out, *SMALL, *options).code == 0
        manifest = json.loads((out / "manifest.json").read_text())
        assert set(pass_names()) - set(manifest["options"]["passes"]) == {"fuse_moe", "fold_wo"}
        text = (out / "graphs/layout/decode-b1-c128.txt").read_text()
        assert "= expert_linear(" in text
        assert "= moe(" not in text

    def test_only_some_passes_up_to_a_stage(self, cli: Cli, tiny_v4: Path, out: Path) -> None:
        options = ("--passes", "eliminate_quant, canonicalize", "--to", "canonical")
        assert compile_(cli, tiny_v4, "-o", out, *SMALL, *options).code == 0
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["options"]["passes"] == ["canonicalize", "eliminate_quant"]
        assert manifest["stages"] == ["traced", "canonical"]
        assert {p.name for p in (out / "graphs").iterdir()} == {"traced", "canonical"}
        assert cli("generate", out, "-p", "In the", "--max-new-tokens", 2).code == 0

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--no-pass", "fuse_all"), "there is no pass fuse_all"),
            (("--passes", "canonicalize,x"), "there is no pass x"),
            (("--to", "selected"), "passes make no stage selected"),
            (("--fold-wo", "maybe"), "always, auto, never"),
            ((), "-o"),
        ],
    )
    def test_wrong_options(self, cli: Cli, tiny_v4: Path, out: Path, options: tuple, says: str) -> None:
        given = ("-o", out, *options) if options else ()
        refused = compile_(cli, tiny_v4, *given)
        assert refused.code == 2
        assert says in refused.stderr
        assert not out.exists()

    def test_dump_dir(self, cli: Cli, tiny_v4: Path, out: Path, tmp_path: Path) -> None:
        dump = tmp_path / "dump"
        for _ in range(2):  # the second time the folder is there and ours
            done = compile_(cli, tiny_v4, "-o", out, *SMALL, "--dump-dir", dump, "--force")
            assert done.code == 0, done.stderr
        files = sorted(p.name for p in (dump / "decode-b1-c128").iterdir())
        assert files[0] == "00-traced.txt"
        assert any(f.endswith("-fused-fuse_moe.txt") for f in files)
        assert not any("fold_wo" in f for f in files), "it changes nothing here"
        texts = [parse((dump / "decode-b1-c128" / f).read_text()) for f in files]
        assert len(texts[0].ops) > len(texts[-1].ops)

        (dump / "mine.txt").write_text("keep me")
        refused = compile_(cli, tiny_v4, "-o", out, *SMALL, "--dump-dir", dump, "--force")
        assert refused.code == 2
        assert (dump / "mine.txt").read_text() == "keep me"

    def test_timings(self, cli: Cli, tiny_v4: Path, out: Path, tmp_path: Path) -> None:
        file = tmp_path / "times.json"
        assert compile_(cli, tiny_v4, "-o", out, *SMALL, "--timings", file).code == 0
        times = json.loads(file.read_text())
        assert {"open", "trace and passes", "plans", "weights", "total"} == set(times["seconds"])
        assert set(times["passes"]["decode-b1-c128"]) == set(pass_names())

    def test_verify(self, cli: Cli, tiny_v4: Path, out: Path) -> None:
        assert compile_(cli, tiny_v4, "-o", out, *SMALL, "--verify").code == 0

    def test_folding(self, cli: Cli, tiny_v4: Path, out: Path) -> None:
        options = ("--numerics", "bf16", "--fold-wo", "always")
        assert compile_(cli, tiny_v4, "-o", out, *SMALL, *options).code == 0
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["options"]["fold_wo"] is True
        assert "layers.0.attn.wo.weight" in manifest["tensors"]
        assert "layers.0.attn.wo_a.weight" not in manifest["tensors"], "nobody reads it any more"
        assert cli("generate", out, "-p", "In the", "--max-new-tokens", 2).code == 0


class TestDryRun:
    def test_a_configuration(self, cli: Cli, repo_root: Path, tmp_path: Path) -> None:
        done = compile_(cli, repo_root / "examples/configs/v4-flash.json", "--dry-run", "--max-context", 2048)
        assert done.code == 0
        assert "147,169,738,752" in done.stdout, "bytes of the routed experts"
        assert "decode-b1-c2048" in done.stdout
        assert list(tmp_path.iterdir()) == []

    def test_totals_are_those_of_the_compiled_model(self, cli: Cli, tiny_v4: Path, out: Path) -> None:
        done = compile_(cli, tiny_v4, "--dry-run", *SMALL)
        assert compile_(cli, tiny_v4, "-o", out, *SMALL).code == 0
        total = next(line for line in done.stdout.splitlines() if line.strip().startswith("total"))
        stated = int(total.split()[1].replace(",", ""))
        shards = sum(p.stat().st_size for p in out.glob("*.safetensors"))
        assert 0 <= shards - stated < 65536, "headers of the shards"

    def test_nothing_there(self, cli: Cli, tmp_path: Path) -> None:
        assert compile_(cli, tmp_path / "no", "--dry-run").code == 3


class TestSpecs:
    def test_stage_and_options(self, cli: Cli, tiny_v4: Path) -> None:
        spec = f"{tiny_v4}@layout?no-pass=fuse_norm_quant&no-pass=fuse_moe&max-context=128"
        text = cli("graph", "dump", spec).stdout
        assert "stage layout" in text
        assert "= rms_norm_quant(" not in text
        assert "= moe(" not in text

    def test_a_stage_that_was_not_made(self, cli: Cli, tiny_v4: Path, out: Path) -> None:
        assert compile_(cli, tiny_v4, "-o", out, *SMALL, "--to", "canonical").code == 0
        refused = cli("graph", "dump", f"{out}@fused")
        assert refused.code == 2
        assert "traced, canonical" in refused.stderr
        assert "= quantize(" in cli("graph", "dump", out).stdout

    def test_options_of_a_compiled_model_are_fixed(self, cli: Cli, compiled_tiny: Path) -> None:
        refused = cli("graph", "dump", f"{compiled_tiny}@fused?no-pass=fuse_moe")
        assert refused.code == 2
        assert "no-pass cannot change" in refused.stderr


class TestReproduce:
    def test_a_failed_pass_is_run_again(
        self, cli: Cli, tiny_v4: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rule that finds nothing: exit 5, a reproducer beside OUT, no OUT; again from the reproducer."""
        with monkeypatch.context() as broken:
            broken.setattr(NormQuant, "find", lambda self, graph: iter(()))
            failed = compile_(cli, tiny_v4, "-o", out, *SMALL)
            assert failed.code == 5
            assert "rule norm_quant matched 0 times, 18 were expected" in failed.stderr
            assert "--no-pass fuse_norm_quant" in failed.stderr
            file = out.with_name("out.reproducer.json")
            assert f"rewright reproduce {file}" in failed.stderr
            assert not out.exists()
            value = json.loads(file.read_text())
            assert value["passes"][0] == "fuse_norm_quant"
            assert parse("\n".join(value["graph"]) + "\n").stage == "fused"
            again = cli("reproduce", file)
            assert again.code == 5
            assert "matched 0 times" in again.stderr
        mended = cli("reproduce", file)
        assert mended.code == 0, mended.stderr
        assert "fuse_norm_quant" in mended.stdout

    def test_a_bug_in_a_pass_is_ours(
        self, cli: Cli, tiny_v4: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stumble(self: NormQuant, m: Match, new: Rewriter) -> None:
            raise ZeroDivisionError("stumbled")

        monkeypatch.setattr(NormQuant, "rewrite", stumble)
        failed = compile_(cli, tiny_v4, "-o", out, *SMALL)
        assert failed.code == 70
        assert "ZeroDivisionError" in failed.stderr
        assert out.with_name("out.reproducer.json").exists()

    def test_a_wrong_rewrite_is_found_by_verify(
        self, cli: Cli, tiny_v4: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = Match.attrs

        def wrong(self: Match, label: str) -> dict[str, Any]:
            attrs = right(self, label)
            return {**attrs, "eps": 0.1} if label == "norm" and "eps" in attrs else attrs

        monkeypatch.setattr(Match, "attrs", wrong)
        assert compile_(cli, tiny_v4, "-o", out, *SMALL).code == 0, "types alone cannot tell"
        found = compile_(cli, tiny_v4, "-o", out, *SMALL, "--force", "--verify")
        assert found.code == 5
        assert "rule norm_quant changes" in found.stderr

    @pytest.mark.parametrize(
        "text", ["", "{}", "[]", "[" * 100_000, '{"format": "rewright.reproducer"}', "null"]
    )
    def test_other_files(self, cli: Cli, tmp_path: Path, text: str) -> None:
        file = tmp_path / "x.json"
        file.write_text(text)
        refused = cli("reproduce", file)
        assert refused.code == 3
        assert "is no reproducer" in refused.stderr
        assert cli("reproduce", tmp_path / "missing.json").code == 3

    def test_rounds_have_an_end(
        self, cli: Cli, tiny_v4: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(manager, "MOST_ROUNDS", 1)
        failed = compile_(cli, tiny_v4, "-o", out, *SMALL)
        assert failed.code == 70
        assert "do not come to an end" in failed.stderr


class TestObeyedOrRefused:
    """What somebody asks for is done or refused, never dropped."""

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--dry-run", "--timings", "t.json"), "go with -o"),
            (("--dry-run", "--dump-dir", "d"), "go with -o"),
            (("--fold-wo", "always", "--to", "canonical", "-o", "x"), "fold_wo does not run"),
            (("--dump-dir", "x/dump", "-o", "x"), "lies in OUT"),
            (("--fold-wo", "always", "--no-pass", "fold_wo", "-o", "x"), "fold_wo does not run"),
            (("--passes", "fuse_moe", "--to", "canonical", "-o", "x"), "fuse_moe does not run before"),
        ],
    )
    def test_compile(
        self,
        cli: Cli,
        tiny_v4: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: tuple,
        says: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        refused = compile_(cli, tiny_v4, *options)
        assert refused.code == 2
        assert says in refused.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_configuration_cannot_be_compiled(self, cli: Cli, repo_root: Path, out: Path) -> None:
        refused = compile_(cli, repo_root / "examples/configs/v4-flash.json", "-o", out)
        assert refused.code == 2
        assert "--dry-run" in refused.stderr

    def test_explain_without_weights(self, cli: Cli, tiny_v4: Path) -> None:
        done = compile_(cli, tiny_v4, "--dry-run", "--explain", *SMALL)
        assert done.code == 0
        assert "bytes folded against" in done.stdout
        assert "state of 1 sequence" in done.stdout

    def test_specs(self, cli: Cli, tiny_v4: Path) -> None:
        refused = cli("graph", "dump", f"{tiny_v4}@traced?no-pass=fuse_moe")
        assert refused.code == 2
        assert "no-pass change nothing at stage traced" in refused.stderr
        refused = cli("graph", "dump", f"{tiny_v4}@fused", "--stage", "layout")
        assert refused.code == 2
        done = cli("graph", "dump", f"{tiny_v4}?no-pass=fuse_moe&max-context=128")
        assert "\nstage layout\n" in done.stdout, "options about passes mean the last stage"

    def test_the_pass_of_a_rule(self, cli: Cli) -> None:
        refused = cli("passes", "show", "kv_write")
        assert refused.code == 2
        assert "fuse_kv_write" in refused.stderr
