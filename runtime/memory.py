"""Memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from rewright.ir.errors import MachineError

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


def total_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int | None:
    """What the kernel says a new process may take without swapping; None where it does not say."""
    return _kilobytes(_MEMINFO, "MemAvailable")


def peak_bytes() -> int | None:
    """The most physical memory that this process held since it began, imports and mapped files included;
    None where the kernel does not say."""
    return _kilobytes(_STATUS, "VmHWM")


def _kilobytes(path: Path, key: str) -> int | None:
    """Bytes of the line `KEY: N kB` of a file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == key and len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            return int(words[0]) * 1024
    return None


def require_memory(needed: int, what: str) -> None:
    """Refuse what this machine cannot hold; `MachineError` has both numbers."""
    if needed > total_bytes():
        raise MachineError(
            f"{what} need {needed:,} bytes, this machine has {total_bytes():,}",
            where="memory",
            fix="choose a smaller --max-context, --max-batch or --chunk",
        )
