"""What a process that runs a model holds in memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ALLOWANCE = 32 << 20
"""Bytes beyond weights, arena and state: Python objects, plans as text, a block for each thread."""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be reset here")
def test_a_run_takes_what_was_planned(compiled_tiny: Path, repo_root: Path) -> None:
    """Measured by the benchmark that reports it."""
    spec = importlib.util.spec_from_file_location("host_benchmark", repo_root / "benchmarks" / "host.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    held = benchmark.memory(compiled_tiny)
    assert held["weights"] > 15_000_000
    assert 0 < held["peak_beyond_imports"] <= held["weights"] + held["arena"] + held["state"] + ALLOWANCE
