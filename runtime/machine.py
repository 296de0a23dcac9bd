"""What this machine and this install can do."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from rewright.runtime import _native
from rewright.runtime.card import EMULATE, card_refusal, emulating, kernel_files
from rewright.runtime.check import Check
from rewright.runtime.machine_cards import card_checks, driver_check
from rewright.runtime.machine_disk import disk_checks
from rewright.runtime.machine_kernels import kernel_checks, nvcc_check
from rewright.runtime.memory import available_bytes, total_bytes
from rewright.runtime.processor import processor_name
from rewright.runtime.threads import thread_count


def examine(folder: Path) -> list[Check]:
    """Look at Python, torch, processor, memory, disk of `folder`, driver, cards, kernels, nvcc and targets.

    Something that is missing is a finding, never an error.
    """
    cores = os.cpu_count() or 1
    features = _native.cpu_features()
    return [
        Check("python", None, platform.python_version()),
        Check("torch", None, torch.__version__),
        Check(
            "processor",
            None,
            f"{processor_name() or platform.machine()}, {platform.machine()}, {cores} cores, "
            f"{' '.join(features) or 'no vector units'}",
            data={"cores": cores, "features": list(features)},
        ),
        _memory(),
        *disk_checks(folder),
        driver_check(),
        *card_checks(),
        *kernel_checks(kernel_files()),
        nvcc_check(),
        Check(
            "target host",
            True,
            f"runs here: {len(_native.kernels())} kernels, {_native.vector_name()}, "
            f"{thread_count(None)} threads",
        ),
        _target_sm80(),
        Check("reference", True, "runs here: the interpreter over op references (--reference)"),
    ]


def _memory() -> Check:
    total, available = total_bytes(), available_bytes()
    text = f"{total / 1e9:.1f} GB" + (f", {available / 1e9:.1f} available" if available is not None else "")
    return Check("memory", None, text, data={"bytes": total, "available_bytes": available})


def _target_sm80() -> Check:
    """Whether models of the target run here, and what is refused where they do not."""
    if refusal := card_refusal():
        what = f"{refusal.what}; refused: generate, score and bench of its models, --reference apart"
        return Check("target sm80", False, what, refusal.fix)
    runs = f"runs here: {len(_native.device_kernels())} kernels"
    if emulating():
        runs += f", emulated on this CPU ({EMULATE} is set)"
    return Check("target sm80", True, runs)
