"""Fixtures shared by all tests; the tests themselves are no package and import nothing relative."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import checkpoints  # noqa: E402  (found through the line above)

# The matrices of the tests are small: a second thread costs more than it brings.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if item.get_closest_marker("browser"):
        for program in ("chromium", "chromedriver"):
            if shutil.which(program) is None:
                pytest.skip(f"there is no {program}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--artifacts", metavar="DIR", help="folder for pictures that tests take of pages")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tiny_v4(repo_root: Path) -> Path:
    """The small trained checkpoint of the repository."""
    return repo_root / "examples" / "tiny-v4"


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Path]:
    """`helpers/checkpoints.py: make_checkpoint`."""
    return checkpoints.make_checkpoint


@pytest.fixture(scope="session")
def write_shard() -> Callable[..., Path]:
    """`helpers/checkpoints.py: write_shard`."""
    return checkpoints.write_shard


@pytest.fixture(scope="session")
def write_raw_shard() -> Callable[..., Path]:
    """`helpers/checkpoints.py: write_raw_shard`."""
    return checkpoints.write_raw_shard


@pytest.fixture(scope="session")
def compiled_tiny(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-v4, compiled for four sequences of 1024 tokens. Read only: all tests share it."""
    from rewright.compiler import CompileOptions, compile_model

    out = tmp_path_factory.mktemp("compiled") / "tiny-v4"
    compile_model(tiny_v4, out, CompileOptions(max_context=1024, max_batch=4, target="host"))
    return out


class Outcome(NamedTuple):
    """What a command did; bytes of stdout that are no UTF-8 are escaped as surrogates."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., Outcome]:
    """Run a command in a process of its own: `run_cli("doctor", env={...})`."""

    def run(*args: object, program: str = "rewright", env: Mapping[str, str] | None = None) -> Outcome:
        starts = {
            "rewright": ["-m", "rewright"],
            "compile-model": ["-c", "from rewright.cli.main import compile_model_main; compile_model_main()"],
        }
        done = subprocess.run(
            [sys.executable, *starts[program], *map(str, args)],
            capture_output=True,
            env={**os.environ, **(env or {})},
            check=False,
        )
        return Outcome(done.returncode, _text(done.stdout), _text(done.stderr))

    return run


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., Outcome]:
    """Run a command within this process, which is much faster than `run_cli`."""
    from rewright.cli import main

    def run(*args: object, program: str = "rewright") -> Outcome:
        entry = {"rewright": main.main, "compile-model": main.compile_model_main}[program]
        capsysbinary.readouterr()
        monkeypatch.setattr(sys, "argv", [program, *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            entry()
        stdout, stderr = capsysbinary.readouterr()
        assert isinstance(exit_.value.code, int)
        return Outcome(exit_.value.code, _text(stdout), _text(stderr))

    return run


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
