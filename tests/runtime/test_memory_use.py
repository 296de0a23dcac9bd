"""What a process that runs a model holds in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rewright.runtime.load import Artifact

ALLOWANCE = 32 << 20
"""Bytes beyond weights, arena and state: Python objects, plans as text, a block for each thread."""

PROBE = """
import sys
import torch, rewright, rewright.runtime.engine

def kilobytes(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

before = kilobytes("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew: importing has one of its own
engine = rewright.load(sys.argv[1])
logits = engine.prefill(0, [i % 1000 for i in range(256)])
for _ in range(32):
    logits = engine.decode({0: int(logits.argmax())})[0]
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be reset here")
def test_a_run_takes_what_was_planned(compiled_tiny: Path) -> None:
    manifest = Artifact.open(compiled_tiny).manifest
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(compiled_tiny)], capture_output=True, text=True, check=True
    )
    weights = sum(f.bytes for name, f in manifest.files.items() if name.endswith(".safetensors"))
    planned = weights + manifest.memory.arena_bytes + manifest.memory.state_bytes
    assert int(done.stdout) <= planned + ALLOWANCE
