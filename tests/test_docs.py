"""docs/add-a-kernel.md and the plan in docs/artifact.md say what is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from rewright.cli.main import app
from rewright.codegen.plan import make_plan
from rewright.codegen.plan_text import print_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.plan import Plan
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite

NEW = {"csrc/host/scale_rows.cpp", "csrc/host/vector_NAME.cpp"}
"""Files that the page tells to add."""


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs/add-a-kernel.md").read_text()


@pytest.fixture(scope="module")
def plan_of(tiny_v4: Path) -> Callable[[str, str, int], Plan]:
    """The plan of the largest variant of tiny-v4 of a kind."""

    def get(target: str, kind: str, max_context: int) -> Plan:
        source = ModelSource.open(tiny_v4, Numerics.FAITHFUL, max_context=max_context)
        variant = max((v for v in source.variants() if v.kind == kind), key=lambda v: v.capacity)
        return make_plan(rewrite(source, variant, PassOptions()).graph, variant, TARGETS[target])

    return get


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_every_file_exists(page: str, repo_root: Path) -> None:
    named = re.findall(r"`((?:codegen|csrc|ir|tests)/[\w/.]*)`", page)
    linked = re.findall(r"\]\(([\w./-]+\.\w+)[#)]", page)
    assert len(named) > 15
    assert {f for f in named if not (repo_root / f).exists()} == NEW
    assert [f for f in linked if not (repo_root / "docs" / f).exists()] == []
    headers = re.findall(r"^\| (`\w+\.h`(?:, `\w+\.h`)*) \|", page, re.MULTILINE)
    assert len(headers) > 5
    for header in re.findall(r"\w+\.h", " ".join(headers)):
        assert (repo_root / "csrc/host" / header).exists()


def test_every_symbol_exists(page: str) -> None:
    symbols = {symbol for t in TARGETS.values() for k in t.kernels for symbol in k.symbols}
    named = set(re.findall(r"\b((?:host|sm80)\.[a-z]\w+)", page)) - {"host.scale_rows", "host.py", "sm80.py"}
    assert len(named) > 4
    assert named - symbols == set()


def test_every_command_exists(page: str) -> None:
    commands = re.findall(r"^rewright ([a-z]+) ?([a-z]*)", page, re.MULTILINE)
    assert len(commands) > 4
    for name, inner in commands:
        command = typer.main.get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        assert not hasattr(command, "commands") or inner in command.commands


def test_the_quoted_definition_is_that_of_sm80(page: str, repo_root: Path) -> None:
    (definition,) = blocks(page, "python")
    assert definition in (repo_root / "codegen/kernels/sm80.py").read_text()


def test_the_example_fits_into_the_tree(page: str, repo_root: Path) -> None:
    """What the diff stands beside is there, and no text but the example's is missing."""
    (diff,) = blocks(page, "diff")
    files = ("csrc/host/families.h", "csrc/host/registry.cpp", "tests/helpers/one_launch.py")
    lines = [line for file in files for line in (repo_root / file).read_text().splitlines()]
    assert [line for line in diff.splitlines() if line[0] == " " and line[1:] not in lines] == []


def test_the_example_compiles(page: str, repo_root: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile with")
    (text,) = blocks(page, "cpp")
    (tmp_path / "scale_rows.cpp").write_text(text)
    options = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{repo_root}/csrc/host"]
    command = [compiler, *options, str(tmp_path / "scale_rows.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_signature_of_the_example(page: str, repo_root: Path) -> None:
    """In a process of its own: an op, once defined, stays."""
    (signature,) = re.findall(r'registry\["host.scale_rows"\] = \{"(.*?)", ', page)
    op = blocks((repo_root / "docs/add-an-op.md").read_text(), "python")[0]
    code = f"{op}\nfrom rewright.codegen.kernel import signature\nprint(signature(scale_rows))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{signature}\n"
    assert f"signature  {signature}\n" in page


def test_plans_of_sm80_in_the_page(page: str, plan_of: Callable[[str, str, int], Plan]) -> None:
    shown = print_plan(plan_of("sm80", "decode", 4096), module="layers.2.attn.wo_b")
    (excerpt,) = re.findall(r"```\n(phases:\n.*?)```", page, re.DOTALL)
    assert excerpt in shown
    (refusal,) = re.findall(r"```\n(.*tokens of a step are more than.*)\n```", page)
    chunk = print_plan(plan_of("sm80", "chunk", 4096))
    assert f"  {refusal}\n" in chunk
    (lacked,) = re.findall(r"`(there is no \w+ to go with it)`", page)
    assert f": {lacked}\n" in chunk


def test_the_plan_in_artifact_md(repo_root: Path, plan_of: Callable[[str, str, int], Plan]) -> None:
    text = (repo_root / "docs/artifact.md").read_text()
    (excerpt,) = re.findall(r'```\n(\{\n"format": 2.*?)```', text, re.DOTALL)
    lines = [line.strip().rstrip(",") for line in excerpt.splitlines()]
    plan = [line.strip().rstrip(",") for line in plan_of("host", "decode", 1024).to_text().splitlines()]
    assert len(lines) > 15
    assert [x for x in lines if x not in plan and x != "..." and not x.startswith('"abi"')] == []
