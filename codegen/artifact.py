"""Writes a compiled model: a folder that appears only when it is complete. docs/artifact.md."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rewright.ir.errors import BadInput, MachineError, UsageError
from rewright.ir.manifest import MANIFEST_NAME, FileEntry

_LOCK = ".lock"

HEADROOM_BYTES = 64 << 20
"""Free space asked for beyond the weights: graphs, tokenizer, manifest."""


@contextmanager
def new_artifact(out: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out` when the block ends well.

    Work happens in `OUT.partial`; if the block fails or is interrupted nothing is left behind and
    an existing `out` is untouched. What a killed run left is cleaned up by the next one.

    Raises:
        UsageError: `out` exists and `force` is not set, or is something else than a compiled model,
            or another compilation is writing it.
        MachineError: too little disk space, or a folder that cannot be written.
    """
    out = out.resolve()  # a link to a compiled model stays a link
    partial, old = out.with_name(out.name + ".partial"), out.with_name(f".{out.name}.replaced")
    if old.exists() and not out.exists():  # killed between the two renames below
        os.rename(old, out)
    check_replaceable(out, force=force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftover(partial)
        free = shutil.disk_usage(out.parent).free
        if free < needed_bytes + HEADROOM_BYTES:
            raise MachineError(
                f"the compiled model needs {needed_bytes:,} bytes, the disk has {free:,} free",
                where=str(out.parent),
                fix="free some space or choose another folder",
            )
        partial.mkdir()
        lock = (partial / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as e:
        raise MachineError(
            f"cannot be written ({e.strerror})", where=str(out), fix="choose another folder"
        ) from e
    try:
        yield partial
        (partial / _LOCK).unlink()
        if out.exists():
            os.rename(out, old)
        os.rename(partial, out)
    except BaseException as e:
        if old.exists() and not out.exists():
            os.rename(old, out)
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(e, OSError):
            raise
        raise MachineError(
            f"writing failed ({e.strerror})", where=str(e.filename or out), fix="check space and permissions"
        ) from e
    finally:
        lock.close()
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftover(partial: Path) -> None:
    """Remove the work of a run that was killed; refuse a running one's, and a folder not ours."""
    if not os.path.lexists(partial):
        return
    if not (partial / _LOCK).is_file():
        # Killed before the lock was made or after it was removed, otherwise no work of ours.
        if partial.is_dir() and ((partial / MANIFEST_NAME).is_file() or not any(partial.iterdir())):
            shutil.rmtree(partial)
            return
        raise UsageError(
            "is in the way and was not made by a compilation", where=str(partial), fix="move it elsewhere"
        )
    with (partial / _LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "another compilation is writing it",
                where=str(partial),
                fix="wait for it, or choose another OUT",
            ) from None
        shutil.rmtree(partial)


def check_replaceable(out: Path, *, force: bool) -> None:
    """Refuse an `out` that must not be overwritten."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise UsageError("exists and is not a compiled model", where=str(out), fix="choose another OUT")
    if not force:
        raise UsageError("exists", where=str(out), fix="choose another OUT, or replace it with --force")


def write_text(folder: Path, name: str, text: str) -> FileEntry:
    """Write a text file of the artifact."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(data)
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())


def copy_file(source: Path, folder: Path, name: str) -> FileEntry:
    """Copy a file of the checkpoint into the artifact."""
    try:
        data = source.read_bytes()
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(source)) from e
    (folder / name).write_bytes(data)
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())
