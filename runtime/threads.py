"""How many threads execute a model."""

from __future__ import annotations

import os

from rewright.ir.errors import UsageError


def thread_count(asked: int | None) -> int:
    """Threads to use: what was asked for, else REWRIGHT_THREADS, else the cores that this process may use."""
    given = str(asked) if asked is not None else os.environ.get("REWRIGHT_THREADS", "")
    if not given:
        return len(os.sched_getaffinity(0))
    if not given.isdecimal() or not 1 <= int(given) <= 1024:
        where = "--threads" if asked is not None else "REWRIGHT_THREADS"
        raise UsageError(f"{given!r} is not from 1 to 1024", where=where)
    return int(given)
