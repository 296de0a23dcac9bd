"""Files that commands write: whole, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rewright.ir.errors import MachineError, UsageError


def check_place(path: Path, where: str) -> None:
    """Refuse, before anything is measured, what is no place for a file.

    Args:
        where: the option that names it.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError("is no place for a file", where=where, fix="choose another file")


def write_whole(path: Path, data: bytes, where: str) -> None:
    """Write all of a file, in place of what was there; interrupted, it leaves what was there. Pipes and
    devices are written to.

    Raises:
        MachineError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as e:
        raise MachineError(f"cannot be written ({e.strerror})", where=where, fix="choose another file") from e
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
