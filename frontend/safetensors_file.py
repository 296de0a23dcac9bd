"""One safetensors shard: its header, checked as a whole before any tensor data is touched.

Layout of a shard: 8 bytes little endian with the header's length, the header (JSON), then the
tensors without gaps. Data is read with seek and read, never mapped: reading past the end of a
truncated file through a map kills the process, and mapped pages count as memory of ours.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

from rewright.ir.errors import BadInput

# Name in the file -> bits of an element, torch dtype that holds it. Bytes are codes, never numbers:
# I8, U8 and F4 all carry packed e2m1.
_DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "BF16": (16, torch.bfloat16),
    "F16": (16, torch.float16),
    "F32": (32, torch.float32),
    "F4": (4, torch.uint8),
    "F64": (64, torch.float64),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "I32": (32, torch.int32),
    "I64": (64, torch.int64),
    "I8": (8, torch.uint8),
    "U8": (8, torch.uint8),
}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_DOWNLOAD_AGAIN = "download the file again"


@dataclass(slots=True)
class ReadStats:
    """What has been read from a checkpoint so far."""

    headers_read: int = 0
    data_reads: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is stored.

    Attributes:
        dtype: name in the file, e.g. "F8_E4M3".
        shape: shape in the file; elements for F4, bytes for e2m1 packed into I8 or U8.
        begin: first byte, counted from the start of the file.
        end: byte after the last one.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The header of one shard.

    Attributes:
        tensors: by name, in the order of the data.
        metadata: the free-form strings of the header.
        digest: SHA-256 of the header's bytes.
    """

    file: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    digest: str


def read_header(path: Path, stats: ReadStats | None = None) -> ShardHeader:
    """Read and check the header of a shard; no tensor data is read.

    Raises:
        BadInput: not a safetensors file, invalid header, unknown dtype, offsets that do not fit the
            shapes or leave gaps, a truncated file or trailing bytes.
    """
    try:
        with path.open("rb", buffering=0) as f:  # a buffer would read into the data
            size = os.fstat(f.fileno()).st_size
            raw = _read_raw(f, path, size)
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the file") from e
    if stats is not None:
        stats.headers_read += 1
    base = _LENGTH_BYTES + len(raw)
    entries, metadata = _parse(raw, path)
    tensors = [_tensor(name, entry, path, base) for name, entry in entries.items()]
    tensors.sort(key=lambda t: (t.begin, t.end))
    _check_extent(tensors, path, base, size)
    return ShardHeader(path, {t.name: t for t in tensors}, metadata, hashlib.sha256(raw).hexdigest())


def read_bytes(info: TensorInfo, stats: ReadStats | None = None) -> bytearray:
    """The bytes of one tensor; `BadInput` if the file cannot be read or has shrunk meanwhile."""
    try:
        with info.file.open("rb", buffering=0) as f:
            f.seek(info.begin)
            data = _read_upto(f, info.nbytes)
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(info.file), fix="check the file") from e
    if (missing := info.nbytes - len(data)) > 0:
        what = f"truncated while {info.name} was read, {missing} bytes missing"
        raise BadInput(what, where=str(info.file), fix=_DOWNLOAD_AGAIN)
    if stats is not None:
        stats.data_reads += 1
        stats.data_bytes += len(data)
    return data


def read_tensor(info: TensorInfo, stats: ReadStats | None = None) -> torch.Tensor:
    """One tensor in its stored dtype; packed e2m1 (I8, U8, F4) as uint8 with two codes a byte."""
    bits, dtype = _DTYPES[info.dtype]
    shape = info.shape if bits >= 8 else (*info.shape[:-1], info.shape[-1] * bits // 8)
    data = read_bytes(info, stats)
    if not data:  # torch.frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def _read_upto(f: FileIO, count: int) -> bytearray:
    """`count` bytes, fewer at the end of the file."""
    data, done = bytearray(count), 0
    with memoryview(data) as view:
        # One read returns at most 2 GiB on Linux.
        while done < count and (got := f.readinto(view[done:])):
            done += got
    del data[done:]
    return data


def _read_raw(f: FileIO, path: Path, size: int) -> bytearray:
    """The header's bytes."""
    if size < _LENGTH_BYTES:
        _not_safetensors(path, f"it has {size} bytes")
    length = int.from_bytes(_read_upto(f, _LENGTH_BYTES), "little")
    if not 2 <= length <= _MAX_HEADER_BYTES:
        _not_safetensors(path, f"it would have a header of {length} bytes")
    raw = _read_upto(f, length)
    if not raw.startswith(b"{"):
        _not_safetensors(path, "its header does not start with '{'")
    if len(raw) < length:
        what = f"truncated inside the header, {length - len(raw)} bytes of the header and all data missing"
        raise BadInput(what, where=str(path), fix=_DOWNLOAD_AGAIN)
    return raw


def _not_safetensors(path: Path, why: str) -> NoReturn:
    fix = f"{_DOWNLOAD_AGAIN}; what is there may be a Git LFS pointer or an error page"
    raise BadInput(f"not a safetensors file ({why})", where=str(path), fix=fix)


def _invalid(path: Path, why: str) -> NoReturn:
    raise BadInput(f"invalid header ({why})", where=str(path), fix=_DOWNLOAD_AGAIN)


def _parse(raw: bytearray, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The header's tensor entries and its metadata."""
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as e:
        _invalid(path, f"not JSON: {e}")
    metadata = entries.pop("__metadata__", {})  # raw starts with '{', so it is an object
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _invalid(path, "__metadata__ is not an object of strings")
    return entries, metadata


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _tensor(name: str, entry: Any, path: Path, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        _invalid(path, f"the entry of {name} is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        _invalid(path, f"the entry of {name} needs dtype, shape and two data_offsets")
    if dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        fix = f"known dtypes: {known}"
        raise BadInput(f"tensor {name} has dtype {dtype}, unknown to this reader", where=str(path), fix=fix)
    bits = _DTYPES[dtype][0]
    begin, end = offsets
    if bits < 8 and (not shape or shape[-1] * bits % 8):
        _invalid(path, f"tensor {name} is {dtype}{shape}, rows that do not fill whole bytes")
    need = math.prod(shape) * bits // 8
    if end - begin != need:
        _invalid(path, f"tensor {name} spans {end - begin} bytes, {dtype}{shape} needs {need}")
    return TensorInfo(name, path, dtype, tuple(shape), base + begin, base + end)


def _check_extent(tensors: list[TensorInfo], path: Path, base: int, size: int) -> None:
    """Tensors, in order of their data, must tile the rest of the file."""
    position = base
    for t in tensors:
        if t.begin != position:
            kind, by = ("gap", t.begin - position) if t.begin > position else ("overlap", position - t.begin)
            _invalid(path, f"{kind} of {by} bytes before tensor {t.name}")
        position = t.end
    if size < position:
        raise BadInput(f"truncated, {position - size} bytes missing", where=str(path), fix=_DOWNLOAD_AGAIN)
    if size > position:
        what = f"{size - position} trailing bytes after the last tensor"
        raise BadInput(what, where=str(path), fix=_DOWNLOAD_AGAIN)
