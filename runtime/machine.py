"""What this machine and this install can do."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from rewright.runtime import _native
from rewright.runtime.memory import total_bytes
from rewright.runtime.threads import thread_count


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `ok` True works, False does not, None is merely told."""

    name: str
    ok: bool | None
    text: str


def examine(folder: Path) -> list[Check]:
    """Look at Python, torch, processor, memory, the disk of `folder`, GPUs and targets."""
    features = _native.cpu_features()
    return [
        Check("python", None, platform.python_version()),
        Check("torch", None, torch.__version__),
        Check(
            "processor",
            None,
            f"{platform.machine()}, {os.cpu_count()} cores, {' '.join(features) or 'no vector units'}",
        ),
        Check("memory", None, f"{total_bytes() / 1e9:.1f} GB"),
        Check("disk", None, f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free"),
        *_cards(),
        Check(
            "target host",
            True,
            f"runs here: {len(_native.kernels())} kernels, {_native.vector_name()}, "
            f"{thread_count(None)} threads",
        ),
        Check("target sm80", None, "its kernels come with a later version; plans can be looked at"),
        Check("reference", True, "runs here: the interpreter over op references (--reference)"),
    ]


def _cards() -> list[Check]:
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "no usable driver or card"
        return [Check("gpu", None, f"none ({why})")]
    cards = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        cards.append(
            Check(f"gpu {i}", None, f"{p.name}, SM{p.major}{p.minor}, {p.total_memory / 1e9:.1f} GB")
        )
    return cards
