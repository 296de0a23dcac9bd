"""What this machine and this install can do."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from rewright.runtime import _native
from rewright.runtime.card import EMULATE, card_refusal, emulating, kernel_files
from rewright.runtime.memory import total_bytes
from rewright.runtime.threads import thread_count


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `ok` True works, False does not, None is merely told."""

    name: str
    ok: bool | None
    text: str


def examine(folder: Path) -> list[Check]:
    """Look at Python, torch, processor, memory, the disk of `folder`, driver, cards, kernels and targets."""
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
        _driver(),
        *_cards(),
        Check(
            "target host",
            True,
            f"runs here: {len(_native.kernels())} kernels, {_native.vector_name()}, "
            f"{thread_count(None)} threads",
        ),
        *_device(),
        Check("reference", True, "runs here: the interpreter over op references (--reference)"),
    ]


def _device() -> list[Check]:
    """The kernels that this build has for a card, and whether they run here."""
    files = kernel_files()
    names = ", ".join(path.stem for path in files)
    compiler = _first_line(files[0].with_name("nvcc.txt")) if files else None
    made = f" by nvcc {compiler}" if compiler else ""
    refusal = card_refusal()
    runs = f"runs here: {len(_native.device_kernels())} kernels"
    if emulating():
        runs += f", emulated on this CPU ({EMULATE} is set)"
    return [
        Check("kernels sm80", None, f"{len(files)} files{made}: {names}" if files else "none in this build"),
        Check("target sm80", refusal is None, refusal.what if refusal else runs),
    ]


def _first_line(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").split("\n")[0] if path.is_file() else None


def _driver() -> Check:
    text = _first_line(Path("/proc/driver/nvidia/version"))
    return Check("driver", None, "none" if text is None else text.removeprefix("NVRM version: "))


def _cards() -> list[Check]:
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "no usable driver or card"
        return [Check("gpu", None, f"none ({why})")]
    cards = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        cards.append(
            Check(
                f"gpu {i}",
                None,
                f"{p.name}, SM{p.major}{p.minor}, {p.multi_processor_count} multiprocessors, "
                f"{p.total_memory / 1e9:.1f} GB",
            )
        )
    return cards
