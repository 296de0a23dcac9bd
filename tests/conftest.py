"""Fixtures shared by all tests; the tests themselves are no package and import nothing relative."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import checkpoints  # noqa: E402  (found through the line above)


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
