"""Writes a compiled model: a folder that appears only when it is complete. docs/artifact.md."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rewright.ir.errors import BadInput, MachineError, UsageError
from rewright.ir.manifest import MANIFEST_NAME, FileEntry

HEADROOM_BYTES = 64 << 20
"""Free space asked for beyond the weights: graphs, tokenizer, manifest."""


@contextmanager
def new_artifact(out: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out` when the block ends well.

    Work happens in `OUT.partial`; if the block fails or is interrupted nothing is left behind and
    an existing `out` is untouched.

    Raises:
        UsageError: `out` exists and `force` is not set, or is something else than a compiled model.
        MachineError: too little disk space, or a folder that cannot be written.
    """
    out = out.resolve()  # a link to a compiled model stays a link
    check_replaceable(out, force=force)
    partial, old = out.with_name(out.name + ".partial"), out.with_name(out.name + ".old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, old):  # of a run that was killed
            if leftover.exists():
                shutil.rmtree(leftover)
        free = shutil.disk_usage(out.parent).free
        if free < needed_bytes + HEADROOM_BYTES:
            raise MachineError(
                f"the compiled model needs {needed_bytes:,} bytes, the disk has {free:,} free",
                where=str(out.parent),
                fix="free some space or choose another folder",
            )
        partial.mkdir()
    except OSError as e:
        raise MachineError(
            f"cannot be written ({e.strerror})", where=str(out), fix="choose another folder"
        ) from e
    try:
        yield partial
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
    shutil.rmtree(old, ignore_errors=True)


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
