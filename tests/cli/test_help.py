"""Every command explains itself with an example that it takes, and shells complete all of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from rewright.cli.main import app, compile_app

ROOT: Any = typer.main.get_command(app)
ALONE: Any = typer.main.get_command(compile_app)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all beneath it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(ROOT))
NAMED = pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "rewright")


def examples(text: str) -> list[list[str]]:
    """Words of the commands behind `Example:`, without what a shell takes."""
    _, found, behind = text.partition("Example")
    lines = re.findall(r"(?:^|: )[ ]*((?:rewright|compile-model) .*)$", behind, re.M) if found else []
    return [shlex.split(re.split(r" [|>] ", line)[0]) for line in lines]


def test_all_commands_are_walked() -> None:
    assert {(), ("graph",), ("graph", "dump"), ("passes", "show"), ("bench",), ("doctor",)} < set(COMMANDS)
    assert len(COMMANDS) >= 21


@NAMED
def test_help_has_an_example(cli: Callable, path: tuple[str, ...]) -> None:
    done = cli(*path, "--help")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: {' '.join(('rewright', *path))} ")
    assert re.search(r"Examples?:\s+(rewright|compile-model) ", done.stdout)


@NAMED
def test_examples_are_of_the_command_and_can_be_given(path: tuple[str, ...]) -> None:
    found = examples(COMMANDS[path].help)
    assert found
    for program, *words in found:
        command, at = (ROOT, 0) if program == "rewright" else (ALONE, 0)
        while hasattr(command, "commands"):
            command, at = command.commands[words[at]], at + 1
        command.make_context(" ".join(words[:at]), words[at:])  # parses, and runs nothing
        said = ("compile-model",) if program == "compile-model" else tuple(words[:at])
        assert said[: len(path)] == path


def test_an_example_that_cannot_be_given_is_found() -> None:
    """So that the test above means something."""
    ((_, name, *words),) = examples("Example: rewright doctor --no-such-option | head")
    assert words == ["--no-such-option"]
    with pytest.raises(Exception, match="No such option"):
        ROOT.commands[name].make_context(name, words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rewright gra", {"graph"}),
        ("rewright graph ", {"dump", "diff", "traffic"}),
        ("rewright bench --fail", {"--fail-slower"}),
        ("rewright --show", {"--show-completion"}),
    ],
)
def test_bash_completes(run_cli: Callable, line: str, expected: set[str]) -> None:
    words = line.split(" ")
    env = {
        "_REWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = run_cli(env=env)
    assert done.code == 0, done.stderr
    assert set(done.stdout.split()) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    """From a shell, since that is how the shell is recognised; what it loads defines the completion."""
    python = shlex.quote(sys.executable)
    script = f"""
{python} -m rewright --show-completion || exit 1
{python} -m rewright --install-completion > {shlex.quote(str(tmp_path / "said"))} || exit 2
. "$HOME/.bashrc" || exit 3
complete -p rewright
"""
    env = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "_REWRIGHT_COMPLETE=complete_bash" in done.stdout
    assert done.stdout.rstrip().endswith("-F _rewright_completion rewright")
    assert "bash completion installed" in (tmp_path / "said").read_text()


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_completion_is_documented(repo_root: Path, name: str) -> None:
    assert "--install-completion" in (repo_root / name).read_text()


def test_the_readme_lists_every_command_and_the_options_of_bench(repo_root: Path) -> None:
    text = (repo_root / "README.md").read_text()
    block = text.partition("```\ncompile-model CKPT")[2].partition("\n```")[0]
    listed = {"compile-model"}
    for line in re.findall(r"^rewright (.*)$", block, re.M):
        group, *rest = line.split(" | ") if line.split()[0] in ("passes", "ops", "kernels") else [line]
        first = group.split()
        listed |= {" ".join(first[:2]), first[0], *(f"{first[0]} {other.split()[0]}" for other in rest)}
    leaves = {" ".join(path) for path, command in COMMANDS.items() if not hasattr(command, "commands")}
    assert leaves - listed == set()
    given = {option for parameter in COMMANDS["bench",].params for option in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", block))
    spelled = {"--prompt", "--new", "--batch", "--repeats", "--json", "out"}  # long forms, and an alias
    assert given - named - spelled == set()
