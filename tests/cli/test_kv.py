"""The command line's `--kv`, and graph specs with `kv=`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]


class TestCompile:
    def test_the_choice_is_kept_in_its_shortest_form(self, cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        options = ("--max-context", 128, "--target", "host", "--kv", "packed,csa=packed,hca=fp4")
        code, _, stderr = cli(tiny_v4, "-o", out, *options, program="compile-model")
        assert code == 0, stderr
        assert json.loads((out / "manifest.json").read_text())["options"]["kv"] == "packed,hca=fp4"
        code, text, _ = cli("graph", "dump", out, "--module", "layers.3.attn")
        assert code == 0
        assert 'kv="packed,hca=fp4"' in text.splitlines()[0]
        assert 'window_rows="e4m3:64:64"' in text
        assert 'compressed_rows="e2m1:32:64"' in text
        code, _, stderr = cli("graph", "dump", f"{out}?kv=packed")
        assert code == 2
        assert "kv cannot change in a compiled model" in stderr
        code, _, stderr = cli("bench", out, "--kv", "packed")
        assert code == 2
        assert "--kv cannot change in a compiled model" in stderr

    @pytest.mark.parametrize(
        ("options", "code", "what"),
        [
            (("--kv", "packed,csa=fp8"), 2, "--kv packed,csa=fp8: there is no format 'fp8'"),
            (("--kv", "packed", "--numerics", "fp32"), 2, "numerics fp32 have none"),
            (("--kv", "packed", "--target", "sm80"), 5, "holds packed keys (e4m3:64:64)"),
        ],
    )
    def test_refusals(
        self, cli: Cli, tiny_v4: Path, tmp_path: Path, options: tuple[str, ...], code: int, what: str
    ) -> None:
        got, stdout, stderr = cli(tiny_v4, "-o", tmp_path / "out", *options, program="compile-model")
        assert (got, stdout) == (code, "")
        assert what in stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_dry_run_says_what_keys_take(self, cli: Cli, tiny_v4: Path) -> None:
        def lines(*options: object) -> list[str]:
            fixed = ("--dry-run", "--target", "host", "--max-context", 1024)
            code, stdout, stderr = cli(tiny_v4, *fixed, *options, program="compile-model")
            assert code == 0, stderr
            found = stdout.splitlines()
            at = next(i for i, line in enumerate(found) if line.startswith("keys of 1,024 tokens"))
            return found[at : at + 2]

        # Rows of 128 dims, 256 bytes or 193; index keys 256 or 68: 6 windows, 2 caches of each kind.
        plain = 6 * 128 * 256 + 2 * 256 * 256 + 2 * 8 * 256 + 2 * 256 * 256
        packed = 6 * 128 * 193 + 2 * 256 * 193 + 2 * 8 * 193 + 2 * 256 * 68
        assert f"{plain:,} bytes, a decode step reads" in lines()[0]
        both = lines("--kv", "packed")
        assert f"{packed:,} bytes ({plain:,} in bf16)" in both[0]
        assert "the bytes of 1,024 tokens in bf16 hold 2," in both[1]


class TestGraphs:
    def test_a_diff_shows_the_bytes(self, cli: Cli, tiny_v4: Path) -> None:
        code, text, _ = cli("graph", "diff", f"{tiny_v4}@layout", f"{tiny_v4}@layout?kv=packed")
        assert code == 0
        assert '~ attrs.kv: null -> "packed"' in text
        assert "~ state bytes of a step at context 4,096: 785,408 -> 342,930 (-442,478)" in text
        assert "%layers.0.attn.window : bf16[1,128,128] -> byte[1,128,193] (alike in layers 1-5)" in text

    @pytest.mark.parametrize("form", ["json", "dot", "onnx", "html"])
    def test_every_form_of_a_packed_graph(self, cli: Cli, tiny_v4: Path, tmp_path: Path, form: str) -> None:
        if form == "onnx":
            pytest.importorskip("onnx")
        out = tmp_path / f"graph.{form}"
        spec = f"{tiny_v4}@layout?kv=packed,csa=fp4"
        code, _, stderr = cli("graph", "dump", spec, "--format", form, "-o", out)
        assert code == 0, stderr
        data = out.read_bytes()
        assert b"e2m1:32:64" in data
        assert b"byte[1,128,193]" in data or form == "onnx"

    def test_an_unknown_format(self, cli: Cli, tiny_v4: Path) -> None:
        code, _, stderr = cli("graph", "dump", f"{tiny_v4}?kv=fp8")
        assert code == 2
        assert "there is no format 'fp8'" in stderr
