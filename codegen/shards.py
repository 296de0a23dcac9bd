"""Streams weights into safetensors shards, one stored tensor in memory at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rewright.ir.errors import CompilerBug
from rewright.ir.manifest import FileEntry
from rewright.ir.types import DType, ValueType

SHARD_BYTES = 4 << 30
"""A shard is closed before it would grow beyond this (a larger tensor has one of its own)."""

ALIGN = 128
"""Weights begin at multiples of this, those of odd sizes excepted, which follow the others."""

_NAMES = {
    DType.F64: "F64",
    DType.F32: "F32",
    DType.BF16: "BF16",
    DType.F16: "F16",
    DType.F8E4M3: "F8_E4M3",
    DType.E8M0: "F8_E8M0",
    DType.E2M1: "U8",
    DType.I64: "I64",
    DType.I32: "I32",
}


class WeightReader(Protocol):
    """Source of weight data: tensors that one after the other in memory make up a weight."""

    def parts(self, name: str) -> Iterator[Tensor]: ...


def write_shards(
    folder: Path, types: Mapping[str, ValueType], weights: WeightReader, advance: Callable[[int], None]
) -> tuple[dict[str, str], dict[str, FileEntry]]:
    """Write every weight of `types` into `folder`.

    Args:
        advance: called with the number of bytes written since the last call.

    Returns:
        The shard of each weight, and size and hash of each shard.
    """
    groups = list(_groups(types))
    tensors: dict[str, str] = {}
    files: dict[str, FileEntry] = {}
    for number, names in enumerate(groups, start=1):
        shard = f"weights-{number:05d}-of-{len(groups):05d}.safetensors"
        # Wide elements first: behind whole ones of at least its own size a tensor is aligned to its elements.
        names.sort(key=lambda n: (types[n].nbytes % ALIGN != 0, -types[n].dtype.bits, n))
        files[shard] = _write_shard(folder / shard, {n: types[n] for n in names}, weights, advance)
        tensors |= dict.fromkeys(names, shard)
    return tensors, files


def _groups(types: Mapping[str, ValueType]) -> Iterator[list[str]]:
    """Weight names by shard, in name order."""
    group: list[str] = []
    size = 0
    for name in sorted(types):
        if group and size + types[name].nbytes > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += types[name].nbytes
    yield group


def _write_shard(
    path: Path, types: Mapping[str, ValueType], weights: WeightReader, advance: Callable[[int], None]
) -> FileEntry:
    digest, total = hashlib.sha256(), 0
    with path.open("wb") as file:
        for block in _blocks(types, weights):
            file.write(block)
            digest.update(block)
            total += len(block)
            advance(len(block))
            del block  # the next part is read when this one is gone
    return FileEntry(total, digest.hexdigest())


def _blocks(types: Mapping[str, ValueType], weights: WeightReader) -> Iterator[bytes | memoryview]:
    """The bytes of a shard in order."""
    yield _header(types)
    for name, type in types.items():
        yield from _data(name, type, weights)


def _header(types: Mapping[str, ValueType]) -> bytes:
    entries, at = {}, 0
    for name, type in types.items():
        end = at + type.nbytes
        entries[name] = {
            "dtype": _NAMES[type.dtype],
            "shape": list(type.storage_shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _data(name: str, type: ValueType, weights: WeightReader) -> Iterator[memoryview]:
    written = 0
    for part in weights.parts(name):
        view = part.contiguous().view(-1).view(torch.uint8).numpy().data
        written += len(view)
        yield view
        del part, view
    if written != type.nbytes:
        raise CompilerBug(f"weight {name} is {type} with {type.nbytes} bytes, its parts have {written}")
