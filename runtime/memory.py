"""Memory of this machine."""

from __future__ import annotations

import os

from rewright.ir.errors import MachineError


def total_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(needed: int, what: str) -> None:
    """Refuse what this machine cannot hold; `MachineError` has both numbers."""
    if needed > total_bytes():
        raise MachineError(
            f"{what} need {needed:,} bytes, this machine has {total_bytes():,}",
            where="memory",
            fix="choose a smaller --max-context, --max-batch or --chunk",
        )
