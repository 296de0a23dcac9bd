"""The command line: results on stdout, all else on stderr, and the exit codes of docs/errors.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from safetensors.torch import load_file

from rewright import __version__
from rewright.cli import output
from rewright.codegen import artifact
from rewright.ir.errors import CompilerBug, Refused
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.passes.pipelines import REACHABLE, pass_names
from rewright.runtime import load, machine, memory

BOS = "<｜begin▁of▁sentence｜>"
SUM = "What is 17 + 25?"
SUM_PROMPT = f"{BOS}<｜User｜>{SUM}<｜Assistant｜></think>"

Cli = Callable[..., Any]


@pytest.fixture
def greedy(cli: Cli, compiled_tiny: Path) -> Cli:
    """`rewright generate` with the most likely tokens."""
    return lambda *args: cli("generate", compiled_tiny, "--temperature", 0, *args)


def written(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


class TestUse:
    def test_help_of_compile_model_alone(self, cli: Cli) -> None:
        done = cli("--help", program="compile-model")
        assert done.code == 0
        assert done.stdout.startswith("Usage: compile-model ")
        assert "Example" in done.stdout

    def test_version(self, cli: Cli) -> None:
        assert cli("--version") == (0, f"rewright {__version__}\n", "")

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("no-such-command",),
            ("--no-such-option",),
            ("graph",),
            ("graph", "no-such-command"),
            ("graph", "dump"),
            ("graph", "dump", "x", "--format", "svg"),
            ("graph", "dump", "x", "--variant", "train"),
            ("graph", "dump", "x", "--chunk", "many"),
            ("graph", "diff", "x"),
            ("graph", "diff", "x", "y", "--format", "yaml"),
            ("compile-model",),
            ("compile-model", "x"),
            ("compile-model", "x", "-o", "y", "--max-batch", "1.5"),
            ("generate",),
            ("generate", "x"),
            ("generate", "x", "-p", "a", "--chat", "b"),
            ("generate", "x", "--chat", "a", "--effort", "high"),
            ("generate", "x", "--chat", "a", "--thinking", "--effort", "low"),
            ("generate", "x", "-p", "a", "--thinking"),
            ("generate", "x", "-p", "a", "--max-new-tokens", "-1"),
            ("score", "x"),
            ("score", "x", "--text", "a", "--ids", "b"),
            ("score", "x", "--ids", "b"),
            ("score", "x", "--text", "a", "--logits", "b"),
            ("doctor", "surplus"),
        ],
        ids=" ".join,
    )
    def test_wrong_use_is_2(self, cli: Cli, arguments: tuple[str, ...]) -> None:
        code, stdout, stderr = cli(*arguments)
        assert (code, stdout) == (2, "")
        assert stderr

    @pytest.mark.parametrize(
        ("option", "value"), [("--temperature", "-1"), ("--top-p", "0"), ("--top-p", "2"), ("--seed", "-1")]
    )
    def test_sampling_options_out_of_range_are_2(
        self, cli: Cli, compiled_tiny: Path, option: str, value: str
    ) -> None:
        done = cli("generate", compiled_tiny, "-p", "a", option, value)
        assert done.code == 2
        assert option in done.stderr


class TestErrors:
    """Every other exit code, provoked where a command begins its work."""

    def fail(self, monkeypatch: pytest.MonkeyPatch, cli: Cli, error: BaseException, *options: str) -> Any:
        def examine(folder: Path) -> None:
            raise error

        monkeypatch.setattr(machine, "examine", examine)
        return cli("doctor", *options)

    def test_bad_input_is_3(self, cli: Cli, tmp_path: Path) -> None:
        for arguments in (
            ("generate", tmp_path, "-p", "x"),
            ("score", tmp_path, "--text", "x"),
            ("graph", "dump", tmp_path / "none"),
            ("compile-model", tmp_path / "none", "-o", tmp_path / "out"),
        ):
            code, stdout, stderr = cli(*arguments)
            assert (code, stdout) == (3, "")
            assert stderr.startswith(f"error: {tmp_path}")
            assert "\n  -> " in stderr
            assert "Traceback" not in stderr

    def test_a_full_disk_is_4(
        self, cli: Cli, tiny_v4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(artifact.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        done = cli("compile-model", tiny_v4, "-o", tmp_path / "out", "--max-context", 128)
        assert done.code == 4
        assert "the disk has 0 free" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_refusal_is_5(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        done = self.fail(monkeypatch, cli, Refused("no", where="here", fix="do that"))
        assert done == (5, "", "error: here: no\n  -> do that\n")

    @pytest.mark.parametrize("error", [RuntimeError("boom"), CompilerBug("boom"), MemoryError("boom")])
    def test_a_bug_is_70_and_asks_for_a_report(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        code, stdout, stderr = self.fail(monkeypatch, cli, error)
        assert (code, stdout) == (70, "")
        assert "Traceback" in stderr
        assert "this is a bug in Rewright" in stderr
        assert "boom\n  -> report it" in stderr

    def test_ctrl_c_is_130(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.fail(monkeypatch, cli, KeyboardInterrupt()) == (130, "", "error: interrupted\n")

    def test_a_traceback_on_request(self, cli: Cli, tmp_path: Path) -> None:
        for arguments in (("--traceback", "graph", "dump"), ("graph", "dump", "--traceback")):
            done = cli(*arguments, tmp_path / "none")
            assert done.code == 3
            assert done.stderr.startswith("Traceback")
            assert "no such file or folder" in done.stderr

    def test_a_reader_that_leaves_is_no_error(self, repo_root: Path) -> None:
        """As in `rewright graph dump ... | head -1`: nothing is wrong, and nothing is said."""
        command = [sys.executable, "-m", "rewright", "graph", "dump", "examples/configs/v4-flash.json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=repo_root
        ) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            running.stdout.close()
            stderr = running.stderr.read()
        assert (running.returncode, stderr) == (0, b"")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
    def test_a_full_device_is_4(self) -> None:
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "rewright", "doctor"]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 4
        assert "cannot write" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_state_beyond_the_memory_is_4(
        self, cli: Cli, compiled_tiny: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory.os, "sysconf", lambda name: 1)
        for extra in ((), ("--reference",)):
            done = cli("generate", compiled_tiny, "-p", "a", *extra)
            assert (done.code, done.stdout) == (4, "")
            assert "the state" in done.stderr or "state and activations" in done.stderr
            assert "--max-batch" in done.stderr

    def test_a_model_that_this_machine_cannot_hold_is_4_and_not_written(
        self, cli: Cli, tiny_v4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory.os, "sysconf", lambda name: 1)
        done = cli("compile-model", tiny_v4, "-o", tmp_path / "out", "--max-context", 128)
        assert (done.code, done.stdout) == (4, "")
        assert "bytes, this machine has 1" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_target_that_cannot_run_here_is_4(
        self, cli: Cli, tiny_v4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Any machine compiles for a card; only running the model needs one."""
        monkeypatch.delenv("REWRIGHT_EMULATE", raising=False)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        out = tmp_path / "out"
        done = cli("compile-model", tiny_v4, "-o", out, "--target", "sm80", "--max-context", 128)
        assert (done.code, done.stdout) == (0, f"{out}\n"), done.stderr
        done = cli("generate", out, "-p", "a")
        assert (done.code, done.stdout) == (4, "")
        assert "sm80" in done.stderr

    def test_an_unknown_target_is_2(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        done = cli("compile-model", tiny_v4, "-o", tmp_path / "out", "--target", "tpu")
        assert done.code == 2
        assert "auto, host, sm80" in done.stderr

    def test_the_process_itself_exits_with_the_code(self, run_cli: Cli, tmp_path: Path) -> None:
        done = run_cli("graph", "dump", tmp_path / "none")
        assert (done.code, done.stdout) == (3, "")
        assert done.stderr == f"error: {tmp_path / 'none'}: no such file or folder\n  -> check the path\n"


class TestCompile:
    def test_compiles(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        options = ("--max-context", 200, "--max-batch", 2, "--chunk", 32, "--numerics", "fp32")
        code, stdout, stderr = cli(tiny_v4, "-o", out, *options, program="compile-model")
        assert (code, stdout) == (0, f"{out}\n"), stderr
        assert "compiled for target host in" in stderr
        manifest = json.loads((out / "manifest.json").read_text())
        expected = {"max_context": 256, "max_batch": 2, "chunk": 32, "numerics": "fp32"}
        expected |= {"fold_wo": False, "passes": list(pass_names())}
        expected |= {"kv": "bf16", "static_scales": ""}
        expected |= {"precision": {"activations_bf16": [], "keys_bf16": [], "weights_fp4": []}}
        assert manifest["options"] == expected

        again = cli("compile-model", tiny_v4, "-o", out)
        assert (again.code, again.stdout) == (2, "")
        assert "--force" in again.stderr
        assert json.loads((out / "manifest.json").read_text())["options"] == expected
        assert cli("compile-model", tiny_v4, "-o", out, "--force", "--max-context", 128).code == 0
        assert json.loads((out / "manifest.json").read_text())["options"]["max_context"] == 128

    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("--numerics", "fp7", "faithful"),
            ("--max-context", "0", "--max-context 0 is not from 1 to 2147483647"),
            ("--max-context", "65537", "choose at most 65536"),
            ("--max-batch", "0", "--max-batch 0 is not from 1 to 2147483647"),
            ("--chunk", "-5", "--chunk -5 is not from 1 to 2147483647"),
        ],
    )
    def test_options_out_of_range(
        self, cli: Cli, tiny_v4: Path, tmp_path: Path, option: str, value: str, says: str
    ) -> None:
        done = cli("compile-model", tiny_v4, "-o", tmp_path / "out", option, value)
        assert done.code == 2
        assert says in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_name_that_is_no_utf8(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        out = tmp_path / os.fsdecode(b"out\xff")
        done = cli("compile-model", tiny_v4, "-o", out, "--max-context", 128)
        assert done.code == 0
        assert done.stdout.endswith("out\\udcff\n")
        assert (out / "manifest.json").is_file()


class TestDump:
    @pytest.mark.parametrize("variant", ["decode", "chunk", "score"])
    def test_a_checkpoint_and_its_compiled_model_have_the_same_graph(
        self, cli: Cli, tiny_v4: Path, compiled_tiny: Path, variant: str
    ) -> None:
        last = cli("graph", "dump", compiled_tiny, "--variant", variant)
        for stage in REACHABLE:
            options = ("--variant", variant, "--stage", stage)
            from_model = cli("graph", "dump", compiled_tiny, *options)
            limits = ("--max-context", 1024, "--max-batch", 4)
            from_checkpoint = cli("graph", "dump", tiny_v4, *options, *limits)
            assert from_model.code == from_checkpoint.code == 0
            assert from_model.stdout == from_checkpoint.stdout
            assert from_model.stdout.startswith(f"graph {variant}")
            assert f"\nstage {stage}\n" in from_model.stdout
            assert print_graph(parse(from_model.stdout)) == from_model.stdout
        assert from_model.stdout == last.stdout

    def test_a_bare_configuration(self, cli: Cli, repo_root: Path) -> None:
        done = cli("graph", "dump", repo_root / "examples/configs/v4-flash.json", "--chunk", 64)
        assert done.code == 0
        assert parse(done.stdout).attrs["max_context"] == 4096

    def test_text_is_the_default(self, cli: Cli, tiny_v4: Path) -> None:
        assert (
            cli("graph", "dump", tiny_v4).stdout == cli("graph", "dump", tiny_v4, "--format", "text").stdout
        )

    def test_json(self, cli: Cli, tiny_v4: Path) -> None:
        done = cli("graph", "dump", tiny_v4, "--format", "json")
        assert json.loads(done.stdout)["stage"] == "traced"

    def test_dot(self, cli: Cli, tiny_v4: Path) -> None:
        done = cli("graph", "dump", tiny_v4, "--format", "dot", "--module", "layers.2.attn")
        assert done.stdout.startswith("digraph")
        assert done.stdout.rstrip().endswith("}")

    def test_onnx(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        file = tmp_path / "graph.onnx"
        to_file = cli("graph", "dump", tiny_v4, "--format", "onnx", "-o", file)
        assert (to_file.code, to_file.stdout) == (0, "")
        assert len(onnx.load(file).graph.node) > 100
        to_stdout = cli("graph", "dump", tiny_v4, "--format", "onnx")
        assert to_stdout.stdout.encode("utf-8", "surrogateescape") == file.read_bytes()

    def test_onnx_is_not_written_to_a_terminal(
        self, cli: Cli, tiny_v4: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        done = cli("graph", "dump", tiny_v4, "--format", "onnx")
        assert (done.code, done.stdout) == (2, "")
        assert "-o FILE" in done.stderr

    @pytest.mark.parametrize("format", ["text", "json", "dot", "onnx"])
    def test_every_format_to_a_file(self, cli: Cli, tiny_v4: Path, tmp_path: Path, format: str) -> None:
        file = tmp_path / "graph"
        arguments = ("graph", "dump", tiny_v4, "--module", "layers.2.attn", "--format", format)
        assert cli(*arguments, "-o", file) == (0, "", "")
        shown = cli(*arguments).stdout.encode("utf-8", "surrogateescape")
        assert file.read_bytes() == shown != b""

    def test_a_module(self, cli: Cli, tiny_v4: Path) -> None:
        part = cli("graph", "dump", tiny_v4, "--module", "layers.2.attn").stdout
        whole = cli("graph", "dump", tiny_v4).stdout
        assert "wq_a.weight" in part
        assert "layers.3" not in part
        assert len(part) < len(whole) / 4

    @pytest.mark.parametrize("format", ["text", "json", "dot", "onnx"])
    def test_a_module_that_does_not_exist(self, cli: Cli, tiny_v4: Path, format: str) -> None:
        done = cli("graph", "dump", tiny_v4, "--module", "layers.99", "--format", format)
        assert done.code in (2, 3)
        assert done.stdout == ""
        assert "layers.99" in done.stderr

    def test_stages(self, cli: Cli, tiny_v4: Path, compiled_tiny: Path) -> None:
        for path in (tiny_v4, compiled_tiny):
            assert cli("graph", "dump", path, "--stage", "traced").code == 0
            done = cli("graph", "dump", path, "--stage", "molten")
            assert done.code == 2
            assert "there is no stage" in done.stderr
            assert "traced" in done.stderr

    def test_plans(self, cli: Cli, tiny_v4: Path, compiled_tiny: Path) -> None:
        """At the last two stages there is a plan: phases, nodes and refusals, or the plan's JSON."""
        texts = []
        for path in (f"{tiny_v4}@planned?max-context=1024&max-batch=4", f"{compiled_tiny}@planned"):
            done = cli("graph", "dump", path)
            assert done.code == 0, done.stderr
            texts.append(done.stdout)
            assert "layers.4.attn.o.groups = host.attention\n" in done.stdout
            plan = json.loads(cli("graph", "dump", path, "--format", "json").stdout)
            assert plan["target"] == "host"
            assert f"launches {len(plan['launches'])}\n" in done.stdout
        assert texts[0] == texts[1]
        part = cli("graph", "dump", compiled_tiny, "--stage", "planned", "--module", "layers.4.attn")
        assert part.code == 0
        assert "layers.4.attn.o.groups -> layers.4.attn.o.groups" in part.stdout
        assert "layers.3." not in part.stdout
        sm80 = cli("graph", "dump", f"{tiny_v4}@planned", "--target", "sm80")
        assert "sm80.attention_split + sm80.attention_combine" in sm80.stdout

    def test_what_a_plan_is_not(self, cli: Cli, tiny_v4: Path, compiled_tiny: Path) -> None:
        for arguments, says in (
            (("dump", tiny_v4, "--target", "host"), "belongs to a plan"),
            (("dump", f"{tiny_v4}@planned", "--format", "dot"), "no form dot"),
            (("dump", f"{tiny_v4}@planned", "--target", "tpu"), "no target"),
            (("dump", f"{compiled_tiny}@planned", "--target", "sm80"), "compiled for target host"),
            (("dump", f"{compiled_tiny}@planned", "--module", "layers.99"), "no node lies in"),
            (("diff", f"{tiny_v4}@planned", f"{tiny_v4}@traced"), "a plan, no graph"),
        ):
            done = cli("graph", *arguments)
            assert (done.code, done.stdout) == (2, ""), done
            assert says in done.stderr

    def test_options_of_a_compiled_model_are_fixed(self, cli: Cli, compiled_tiny: Path) -> None:
        for option in (("--numerics", "fp32"), ("--max-context", 128), ("--max-batch", 1), ("--chunk", 8)):
            done = cli("graph", "dump", compiled_tiny, *option)
            assert done.code == 2
            assert f"{option[0][2:]} cannot change in a compiled model" in done.stderr

    def test_a_file_that_cannot_be_written_is_4(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        done = cli("graph", "dump", tiny_v4, "-o", tmp_path / "none" / "file")
        assert (done.code, done.stdout) == (4, "")

    def test_notes_go_to_stderr(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        config = json.loads((tiny_v4 / "config.json").read_text())
        file = written(tmp_path / "config.json", config | {"an_unknown_key": 1})
        done = cli("graph", "dump", file)
        assert done.code == 0
        assert done.stdout.startswith("graph ")
        assert "an_unknown_key" in done.stderr

    def test_damage_is_told_like_in_generate(self, cli: Cli, compiled_tiny: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(compiled_tiny, tmp_path / "copy"))
        (copy / "tokenizer.json").unlink()
        for arguments in (("graph", "dump", copy), ("generate", copy, "-p", "x")):
            done = cli(*arguments)
            assert done.code == 3
            assert "tokenizer.json is missing" in done.stderr


class TestDiff:
    def test_equal(self, cli: Cli, tiny_v4: Path, compiled_tiny: Path) -> None:
        same = f"{tiny_v4}@layout?max-context=1024&max-batch=4"
        done = cli("graph", "diff", same, compiled_tiny, "--exit-code")
        assert done.code == 0, done.stdout

    def test_different(self, cli: Cli, tiny_v4: Path) -> None:
        specs = (f"{tiny_v4}@traced?numerics=faithful", f"{tiny_v4}@traced?numerics=fp32")
        plain = cli("graph", "diff", *specs)
        assert plain.code == 0
        assert "quantize" in plain.stdout
        assert cli("graph", "diff", *specs, "--exit-code") == (1, plain.stdout, plain.stderr)

    def test_stat(self, cli: Cli, tiny_v4: Path) -> None:
        done = cli("graph", "diff", f"{tiny_v4}?numerics=faithful", f"{tiny_v4}?numerics=fp32", "--stat")
        rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
        assert rows["dequantize"][1] == "0"
        assert int(rows["dequantize"][0]) > 0

    def test_json(self, cli: Cli, tiny_v4: Path) -> None:
        done = cli("graph", "diff", tiny_v4, f"{tiny_v4}?numerics=fp32", "--format", "json")
        value = json.loads(done.stdout)
        assert value["empty"] is False
        assert value["before"]["attrs"]["numerics"] == "faithful"
        assert value["after"]["attrs"]["numerics"] == "fp32"

    def test_every_option_of_a_spec(self, cli: Cli, tiny_v4: Path) -> None:
        spec = f"{tiny_v4}?variant=decode&batch=2&max-batch=2&max-context=256&chunk=16&numerics=fp32"
        done = cli("graph", "diff", spec, spec, "--format", "json")
        assert json.loads(done.stdout)["empty"] is True
        assert json.loads(done.stdout)["before"]["name"] == "decode-b2-c256"

    def test_a_path_with_the_separators_in_its_name(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        odd = tmp_path / "config@v1?x=y.json"
        shutil.copy(tiny_v4 / "config.json", odd)
        assert cli("graph", "diff", odd, odd, "--exit-code").code == 0

    @pytest.mark.parametrize(
        ("tail", "says"),
        [
            ("@molten", "stages: traced"),
            ("?colour=red", "unknown option 'colour=red'"),
            ("?numerics", "unknown option 'numerics'"),
            ("?chunk=many", "chunk is not a number: 'many'"),
            ("?variant=train", "variants: decode, chunk, score"),
            ("?batch=3", "there is no decode variant for batch 3"),
            ("?batch=2&max-batch=4&variant=chunk", "batches: 1"),
            ("?numerics=fp7", "fp32"),
        ],
    )
    def test_a_spec_that_means_nothing_is_2(self, cli: Cli, tiny_v4: Path, tail: str, says: str) -> None:
        done = cli("graph", "diff", tiny_v4, f"{tiny_v4}{tail}")
        assert (done.code, done.stdout) == (2, "")
        assert says in done.stderr

    def test_a_spec_of_nothing_is_3(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        assert cli("graph", "diff", tiny_v4, tmp_path / "none").code == 3


class TestGenerate:
    def test_chat(self, greedy: Cli) -> None:
        code, stdout, stderr = greedy("--chat", SUM)
        assert (code, stdout) == (0, "17 + 25 = 42\n")
        assert "finish: eos; 12 prompt and 7 new tokens" in stderr

    def test_json(self, greedy: Cli) -> None:
        done = greedy("--chat", SUM, "--json", "--seed", 5)
        record = json.loads(done.stdout)
        tokens = record.pop("tokens")
        assert len(tokens) == 7
        assert all(type(token) is int for token in tokens)
        assert record == {
            "text": "17 + 25 = 42",
            "finish": "eos",
            "prompt_tokens": 12,
            "seed": 5,
            "repetition": None,
            "precision": "low",
            "sensitive": None,
            "message": {"role": "assistant", "content": "17 + 25 = 42"},
        }

    def test_json_of_a_plain_prompt_has_no_message(self, greedy: Cli) -> None:
        record = json.loads(greedy("-p", "In", "--json", "--max-new-tokens", 2).stdout)
        told = {"finish", "prompt_tokens", "seed", "repetition", "precision", "sensitive"}
        assert set(record) == {"text", "tokens"} | told
        assert record["finish"] == "length"

    def test_a_completion_that_is_no_message_is_told(
        self, cli: Cli, compiled_tiny: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from rewright.runtime.tokenizer import TextStream

        monkeypatch.setattr(TextStream, "push", lambda self, token: "\n\n<｜DSML｜tool_calls>")
        monkeypatch.setattr(TextStream, "flush", lambda self: "")
        done = cli("generate", compiled_tiny, "--chat", "x", "--json", "--max-new-tokens", 1)
        record = json.loads(done.stdout)
        assert done.code == 0
        assert record["message"] is None
        assert "malformed tool calls" in record["message_error"]

    def test_ignoring_the_end_token(self, greedy: Cli) -> None:
        done = greedy("--chat", SUM, "--ignore-eos", "--max-new-tokens", 9)
        assert done.stdout.startswith("17 + 25 = 42<｜end▁of▁sentence｜>")
        assert "finish: length; 12 prompt and 9 new tokens" in done.stderr

    def test_a_text_that_repeats_itself(self, greedy: Cli) -> None:
        """The small model ends in one phrase over and over, which each way of printing tells once."""
        prompt = ("-p", "In the beginning God created", "--max-new-tokens", 320)
        done = greedy(*prompt)
        warning = "warning: prompt 1: the text repeats every 6 tokens from position 247 on"
        assert done.stderr.count("warning") == 1
        assert f"{warning}; --stop-on-repetition ends it there\nfinish: length" in done.stderr
        record = json.loads(greedy(*prompt, "--json").stdout)
        assert (record["finish"], record["repetition"]) == ("length", {"position": 247, "unit": 6})
        begin = 247 - record["prompt_tokens"]
        looped = record["tokens"][begin : begin + 32]
        assert looped[6:] == looped[:-6]
        stopped = greedy(*prompt, "--stop-on-repetition")
        assert f"{warning}\nfinish: repetition; 6 prompt and {begin + 32} new tokens" in stopped.stderr
        assert done.stdout.startswith(stopped.stdout.rstrip("\n"))

    def test_no_new_tokens(self, greedy: Cli) -> None:
        done = greedy("-p", "In", "--max-new-tokens", 0)
        assert (done.code, done.stdout) == (0, "\n")
        assert "finish: length" in done.stderr

    @pytest.mark.parametrize("text", ["", " ", "   \n  ", BOS])
    def test_prompts_of_nothing_much(self, greedy: Cli, text: str) -> None:
        done = greedy("-p", text, "--max-new-tokens", 1)
        assert done.code == 0, done.stderr

    def test_several_prompts(self, greedy: Cli) -> None:
        prompts = ("-p", "In the beginning", "-p", "def f(")
        shown = greedy(*prompts, "--max-new-tokens", 3)
        records = [
            json.loads(r) for r in greedy(*prompts, "--max-new-tokens", 3, "--json").stdout.splitlines()
        ]
        assert len(records) == 2
        assert shown.stdout == "".join(f"--- {i}\n{r['text']}\n" for i, r in enumerate(records, start=1))
        assert "finish: length, length" in shown.stderr
        single = greedy("-p", "def f(", "--max-new-tokens", 3)
        assert single.stdout == records[1]["text"] + "\n"

    def test_a_seed_repeats_a_text(self, cli: Cli, compiled_tiny: Path) -> None:
        arguments = ("generate", compiled_tiny, "-p", "In", "--max-new-tokens", 6, "--temperature", 2)
        first = cli(*arguments, "--seed", 11).stdout
        assert cli(*arguments, "--seed", 11).stdout == first
        assert cli(*arguments, "--seed", 12).stdout != first

    def test_a_seed_that_was_drawn_is_told(self, cli: Cli, compiled_tiny: Path) -> None:
        arguments = ("generate", compiled_tiny, "-p", "In", "--max-new-tokens", 4, "--temperature", 2)
        drawn = cli(*arguments)
        seed = drawn.stderr.rsplit("seed ", 1)[1].strip()
        assert cli(*arguments, "--seed", seed).stdout == drawn.stdout

    def test_messages(self, greedy: Cli, tmp_path: Path) -> None:
        turns = [{"role": "user", "content": SUM}]
        for value in (turns, {"messages": turns}):
            file = written(tmp_path / "m.json", value)
            assert greedy("--messages", file).stdout == "17 + 25 = 42\n"

    def test_a_prompt_that_is_too_long(self, greedy: Cli) -> None:
        done = greedy("-p", "word " * 1200)
        assert (done.code, done.stdout) == (3, "")
        assert "do not fit the compiled maximum of 1024" in done.stderr

    @pytest.mark.parametrize("option", ["-p", "--chat"])
    def test_bytes_that_are_no_utf8(self, greedy: Cli, option: str) -> None:
        done = greedy(option, os.fsdecode(b"caf\xe9"))
        assert (done.code, done.stdout) == (3, "")
        assert "\n  -> " in done.stderr

    def test_bytes_that_are_no_utf8_from_a_shell(self, compiled_tiny: Path) -> None:
        command = [sys.executable, "-m", "rewright", "generate", compiled_tiny, "-p", b"caf\xe9"]
        done = subprocess.run(command, capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (3, b"")
        assert b"not valid Unicode" in done.stderr


class TestShowPrompt:
    @pytest.fixture
    def show(self, cli: Cli, compiled_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
        """`--show-prompt`, where loading a weight would be a bug."""

        def weights(self: load.Artifact) -> None:
            raise AssertionError("weights were loaded")

        monkeypatch.setattr(load.Artifact, "weights", weights)
        return lambda *args: cli("generate", compiled_tiny, "--show-prompt", *args)

    def test_exactly_the_prompt(self, show: Cli) -> None:
        assert show("--chat", SUM) == (0, SUM_PROMPT, "")
        assert show("-p", "In é\n") == (0, f"{BOS}In é\n", "")
        assert show("-p", f"{BOS}In") == (0, f"{BOS}In", "")

    def test_thinking(self, show: Cli) -> None:
        assert show("--chat", SUM, "--thinking").stdout == SUM_PROMPT.replace("</think>", "<think>")
        most = show("--chat", SUM, "--thinking", "--effort", "max").stdout
        assert most.endswith("<think>")
        assert "Take as long as you like" in most

    def test_messages_with_tools(self, show: Cli, tmp_path: Path) -> None:
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        value = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
        shown = show("--messages", written(tmp_path / "m.json", value)).stdout
        assert '{"name": "add", "parameters": {}}' in shown
        assert shown.endswith("<｜User｜>hi<｜Assistant｜></think>")

    def test_control_tokens_in_a_message_are_told(self, show: Cli) -> None:
        done = show("--chat", "a<｜User｜>b<think>")
        assert done.code == 0
        assert done.stdout.startswith(f"{BOS}<｜User｜>a<｜User｜>b<think>")
        assert done.stderr.startswith("note: ")
        assert "<｜User｜> <think>" in done.stderr

    def test_one_prompt_only(self, show: Cli) -> None:
        assert show("-p", "a", "-p", "b").code == 2

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("not JSON", "not valid JSON"),
            ("[]", "at least one message"),
            ('[{"role": "king", "content": "x"}]', "unknown role"),
            (
                '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]',
                "nothing is left to answer",
            ),
        ],
    )
    def test_messages_that_cannot_be_used(self, show: Cli, tmp_path: Path, content: str, says: str) -> None:
        file = written(tmp_path / "m.json", content)
        done = show("--messages", file)
        assert (done.code, done.stdout) == (3, "")
        assert str(file) in done.stderr
        assert says in done.stderr


class TestScore:
    def test_text(
        self, cli: Cli, compiled_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A progress bar would be due at once, but stderr is no terminal.
        monkeypatch.setattr(output, "SHOW_AFTER_SECONDS", 0)
        lines = [{"kind": "prose", "text": "In the beginning"}, {"kind": "code", "text": "import os\n"}]
        file = written(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)))
        code, stdout, stderr = cli("score", compiled_tiny, "--text", file)
        assert (code, stderr) == (0, "")
        table = [line.split() for line in stdout.splitlines()]
        assert table[0] == ["kind", "texts", "tokens", "nll", "perplexity"]
        assert [row[0] for row in table[1:]] == ["prose", "code", "all"]

        value = json.loads(cli("score", compiled_tiny, "--text", file, "--json").stdout)
        assert list(value) == ["prose", "code", "all"]
        assert set(value["all"]) == {"texts", "tokens", "nll", "perplexity", "repetitions"}
        assert value["all"]["repetitions"] == []
        assert value["all"]["tokens"] == value["prose"]["tokens"] + value["code"]["tokens"]
        for row in table[1:]:
            assert row[1:3] == [str(value[row[0]]["texts"]), str(value[row[0]]["tokens"])]
            assert float(row[3]) == pytest.approx(value[row[0]]["nll"], abs=1e-4)
            assert 1 < value[row[0]]["perplexity"] < 4096

    def test_ids(self, cli: Cli, compiled_tiny: Path, tmp_path: Path) -> None:
        cases = written(
            tmp_path / "c.json", {"x": {"ids": [0, 5, 6], "prefill": 2, "nll": True, "greedy": 1}}
        )
        found = tmp_path / "found.safetensors"
        assert cli("score", compiled_tiny, "--ids", cases, "--logits", found) == (0, f"{found}\n", "")
        shapes = {name: list(t.shape) for name, t in load_file(found).items()}
        assert shapes == {"x.ids": [3], "x.logits": [2, 4096], "x.nll": [2], "x.greedy": [1]}

    def test_bad_cases_name_the_case(self, cli: Cli, compiled_tiny: Path, tmp_path: Path) -> None:
        cases = written(tmp_path / "c.json", {"fine": {"ids": [0], "greedy": 1}, "odd": {"ids": []}})
        done = cli("score", compiled_tiny, "--ids", cases, "--logits", tmp_path / "found")
        assert (done.code, done.stdout) == (3, "")
        assert f"{cases}, case odd" in done.stderr
        assert not (tmp_path / "found").exists()

    def test_a_file_that_cannot_be_written_is_4(self, cli: Cli, compiled_tiny: Path, tmp_path: Path) -> None:
        cases = written(tmp_path / "c.json", {"x": {"ids": [0], "prefill": 1}})
        (tmp_path / "folder").mkdir()
        for target in (tmp_path / "folder", tmp_path / "none" / "file", cases / "file"):
            done = cli("score", compiled_tiny, "--ids", cases, "--logits", target)
            assert (done.code, done.stdout) == (4, "")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "folder"]
