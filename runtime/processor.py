"""The processor's name."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str | None:
    """As the kernel calls it, `AMD EPYC 7763 64-Core Processor` for example; None where it does not say."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), None)
