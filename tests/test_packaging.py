"""What a user installs: version, commands, folders, and files that hold on any machine."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rewright

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
FOLDERS = ("frontend", "passes", "codegen", "csrc", "runtime", "ir", "cli", "src/rewright", "tests")
# The example's vocabulary and texts are data: they may spell any address.
DATA = ("examples/tiny-v4/text/", "examples/tiny-v4/tokenizer.json")
PERSONAL_PATH = re.compile(r"(?<![\w.~*)\]}>])/(?:home|root|work|Users)/\w")
REGISTRY_HOST = re.compile(r"(?:pypi|pythonhosted|npmjs|debian)\.org|download\.pytorch")


def direct_requirements() -> dict[str, Requirement]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    parsed = [Requirement(line) for group in groups for line in group]
    return {canonicalize_name(r.name): r for r in parsed}


def constraint_lines() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def repository_files() -> list[str]:
    """Files that are committed or about to be; links stand for themselves."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_one_version_everywhere():
    assert rewright.__version__ == PROJECT["version"] == importlib.metadata.version("rewright")


@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_command_points_to_a_callable(command):
    module, _, name = PROJECT["scripts"][command].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("folder", FOLDERS)
def test_required_folder_exists(folder):
    assert (ROOT / folder).is_dir()


@pytest.mark.parametrize("module", ["", ".ir", ".frontend", ".passes", ".codegen", ".runtime", ".cli"])
def test_every_mapped_folder_is_importable(module):
    assert importlib.import_module(f"rewright{module}").__name__ == f"rewright{module}"


def test_type_checkers_see_every_mapped_folder():
    mapped = PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    links = {f"rewright/{p.name}": p for p in (ROOT / ".typing" / "rewright").iterdir() if p.is_dir()}
    assert set(links) | {"rewright"} == set(mapped)
    for name, link in links.items():
        assert link.is_symlink()
        assert not os.path.isabs(os.readlink(link)), f"{link} would break in another clone"
        assert link.resolve() == ROOT / mapped[name]


def test_constraints_are_the_direct_dependencies_within_their_ranges():
    direct, pinned = direct_requirements(), constraint_lines()
    assert {canonicalize_name(r.name) for r in pinned} == set(direct)
    for requirement in pinned:
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        assert direct[canonicalize_name(requirement.name)].specifier.contains(pin.version), requirement


def test_readme_and_changelog_name_this_version():
    for name in ("README.md", "CHANGELOG.md"):
        assert PROJECT["version"] in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("pattern", [PERSONAL_PATH, REGISTRY_HOST], ids=["personal path", "registry host"])
def test_no_file_names_a(pattern):
    found = []
    for name in repository_files():
        if name.startswith(DATA):
            continue
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{i}: {text[:80]}" for i, text in enumerate(lines, 1) if pattern.search(text)]
    assert not found, "\n".join(found)
