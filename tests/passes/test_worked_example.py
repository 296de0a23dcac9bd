"""The example of docs/add-a-pass.md: short, and, put into the tree as the page says, right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = '''\
"""Puts the files of the example, which lie beside this one, where the page says."""

import importlib.util
import sys
from pathlib import Path

import rewright.ir.ops
import rewright.passes


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    spec.loader.exec_module(module)
    return module


here = Path(__file__).parent
rewright.ir.ops.embed_streams = load("rewright.ir.ops.fused.embed", here / "embed.py").embed_streams
load("rewright.passes.fuse_embed_streams", here / "fuse_embed_streams.py")
load("rewright.passes.pipelines", here / "pipelines.py")
'''

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs/add-a-pass.md").read_text()


@pytest.fixture(scope="module")
def blocks(page: str) -> tuple[str, str, str]:
    """Files of the op, the pass and the test."""
    op, rule, test = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return op, rule, test


def patched(text: str, diff: str) -> str:
    """Text with the added lines of a diff behind the lines that they follow there."""
    lines, at = text.splitlines(), 0
    for line in diff.splitlines():
        if line.startswith("+"):
            lines.insert(at, line[1:])
            at += 1
        else:
            (found,) = (i for i, there in enumerate(lines) if there == line[1:])
            at = found + 1
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(
    page: str, blocks: tuple[str, str, str], repo_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    import rewright.passes.pipelines as pipelines

    path = tmp_path_factory.mktemp("example")
    names = ("embed.py", "fuse_embed_streams.py", "test_fuse_embed_streams.py")
    for name, text in zip(names, blocks, strict=True):
        (path / name).write_text(text)
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    (path / "pipelines.py").write_text(patched(Path(pipelines.__file__).read_text(), diff))
    (path / "worked_example.py").write_text(PLUGIN)
    tests = (repo_root / "tests/ir/test_ops.py").read_text()
    for after, entry in (
        ("SHARED = {", '"embed_streams": {"weight"},'),
        ("LOOSE = {", '("embed_streams", "tokens"), ("embed_streams", "weight"),'),
    ):
        assert tests.count(f"\n{after}") == 1
        tests = tests.replace(f"\n{after}", f"\n{after}{entry}")
    (path / "test_ops.py").write_text(tests)
    return path


@pytest.fixture(scope="module")
def run(folder: Path, repo_root: Path) -> Run:
    """Run Python in the repository with the example in its place."""

    def python(*args: object) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(folder), str(repo_root / "tests/helpers")])
        return subprocess.run(
            [sys.executable, *map(str, args)],
            cwd=repo_root,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )

    return python


def test_pass_and_test_are_short(blocks: tuple[str, str, str]) -> None:
    assert [len(text.splitlines()) <= 40 for text in blocks] == [True, True, True]
    assert max(len(line) for text in blocks for line in text.splitlines()) <= 110


def test_the_example_passes_its_own_test_and_those_of_every_rule(run: Run, folder: Path) -> None:
    generated = [f"tests/{n}.py" for n in ("passes/test_rules", "passes/test_mutations", "cli/test_passes")]
    own = (folder / "test_fuse_embed_streams.py", folder / "test_ops.py")
    done = run("-m", "pytest", "-p", "worked_example", "-k", "embed_streams", "-v", *own, *generated)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "test_the_result_is_the_same[True-left1]",
        "test_where_it_matches",
        "test_cost[embed_streams-1]",
        "test_a_rule_keeps_every_bit[fuse_embed_streams/embed_streams]",
        "test_every_form_of_a_pattern_is_shown[fuse_embed_streams/embed_streams]",
        "test_show[fuse_embed_streams]",
    ):
        assert f"::{name} PASSED" in done.stdout, name
    assert re.search(r"test_mutations.py::.*embed_streams.* PASSED", done.stdout)


def test_what_the_page_shows_is_what_is_printed(run: Run, page: str) -> None:
    (shown,) = re.findall(r"```\n(~ op nodes.*?)```", page, re.DOTALL)
    commands = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[-1].splitlines()
    (command,) = (line for line in commands if line.startswith("rewright graph diff "))
    arguments = [part.strip("'") for part in command.split()[1:]]
    program = "import worked_example; from rewright.cli.main import main; main()"
    done = run("-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown
