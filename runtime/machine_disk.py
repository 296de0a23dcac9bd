"""Room and speed of the disk that compiled models are written to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rewright.runtime.check import Check

PROBE_BYTES = 32 << 20
_BLOCK = 4 << 20


def disk_checks(folder: Path, size: int = PROBE_BYTES) -> list[Check]:
    """Free bytes of a folder's disk, and how fast a temporary file of `size` bytes is written and read there;
    the file is gone afterwards. What cannot be found out is said."""
    elsewhere = "write compiled models to another folder"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as e:
        return [Check("disk", None, f"cannot be looked at ({e.strerror})", elsewhere)]
    found = Check("disk", None, f"{free / 1e9:.1f} GB free", data={"free_bytes": free})
    if free < 4 * size:
        return [found, Check("disk speed", None, "not measured: too little is free", elsewhere)]
    try:
        write, read = disk_speed(folder, size)
    except OSError as e:
        return [found, Check("disk speed", False, f"no file can be written here ({e.strerror})", elsewhere)]
    text = f"{write / 1e6:,.0f} MB/s written, {read / 1e6:,.0f} MB/s read, by a file of {size >> 20} MiB"
    data = {"write_bytes_per_second": write, "read_bytes_per_second": read, "probe_bytes": size}
    return [found, Check("disk speed", None, text, data=data)]


def disk_speed(
    folder: Path, size: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Bytes per second that are written until the disk has them, and that are read back.

    The system is asked to forget the file before it is read. Where it does not (a folder in memory), what
    is measured is the system's copy.

    Args:
        folder: where the file is made.
        size: its bytes.
        clock: seconds.

    Raises:
        OSError: the file cannot be written or read.
    """
    block = os.urandom(min(_BLOCK, size))  # no file system can make it smaller
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin = clock()
        for at in range(0, size, len(block)):
            _write(file.fileno(), block[: size - at])
        os.fsync(file.fileno())
        written = clock() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        begin = clock()
        left = size
        while left and (count := len(os.read(file.fileno(), _BLOCK))):
            left -= count
        seconds = clock() - begin
    if left:
        raise OSError(0, f"{left} bytes are missing when read back")
    return size / written, size / seconds


def _write(file: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(file, view) :]
