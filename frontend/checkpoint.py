"""The lazy checkpoint reader: opening reads the configuration and the shard headers, nothing else.

What is wrong with the set of shards is reported in one error, because a user with a bad download
wants the whole list. Tensor data is read one tensor at a time and checked on the way.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rewright.frontend import safetensors_file
from rewright.frontend.config import CONFIG_NAME, ModelConfig, read_json_object
from rewright.frontend.quant_formats import check_release_names
from rewright.frontend.safetensors_file import ReadStats, ShardHeader, TensorInfo
from rewright.frontend.value_check import check_values
from rewright.ir.errors import BadInput, ProblemList

INDEX_NAME = "model.safetensors.index.json"
SHARD_GLOB = "model*.safetensors"
MTP_PREFIX = "mtp."

_SHARD_OF = re.compile(r"(.*-)\d{5}(-of-(\d{5})\.safetensors)")
_LISTED = 50  # tensors named per kind of problem


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A released checkpoint folder, opened with `Checkpoint.open`.

    Attributes:
        folder: where it lies.
        config: its validated configuration.
        notes: what the user should know: ignored keys, left out tensors.
        tensors: every tensor of the main model by name, sorted.
        mtp_tensors: the tensors of the multi-token-prediction blocks, which are not compiled.
        stats: how much has been read.
    """

    folder: Path
    config: ModelConfig
    notes: list[str]
    tensors: Mapping[str, TensorInfo]
    mtp_tensors: Mapping[str, TensorInfo]
    stats: ReadStats
    _fingerprint: str

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the configuration, the index and every shard header once; no tensor data.

        Raises:
            BadInput: no such folder, no shard, an unreadable configuration or index, or names that
                are not the release's.
            ProblemList: everything wrong with the configuration, or everything wrong with the
                shards: missing, unreadable, or contradicting the index or each other.
        """
        folder = Path(folder)
        if not folder.is_dir():
            fix = f"name the folder that holds {CONFIG_NAME} and the shards"
            raise BadInput("no such folder", where=str(folder), fix=fix)
        config_path = folder / CONFIG_NAME
        raw_config = read_json_object(config_path)
        config, notes = ModelConfig.from_dict(raw_config, str(config_path))
        index = _read_index(folder / INDEX_NAME)
        stats, problems = ReadStats(), []
        with _paused_gc():
            headers = _read_headers(folder, _shard_names(folder, index), stats, problems)
            tensors = _merge(headers, problems)
        if index is not None:
            problems += _check_index(index, headers, tensors)
        if problems:
            fix = "download the shards and the index again"
            raise ProblemList("the shards do not make a checkpoint", problems, where=str(folder), fix=fix)
        check_release_names(tensors, str(folder))
        main = {name: t for name, t in tensors.items() if not name.startswith(MTP_PREFIX)}
        mtp = {name: t for name, t in tensors.items() if name.startswith(MTP_PREFIX)}
        if mtp:
            size = sum(t.nbytes for t in mtp.values())
            notes.append(f"{folder}: {len(mtp)} tensors of MTP blocks (mtp.*, {size} bytes) are left out")
        return cls(folder, config, notes, main, mtp, stats, _fingerprint(raw_config, headers))

    def fingerprint(self) -> str:
        """SHA-256 over the configuration and the shard headers: names, dtypes, shapes, places.

        Two checkpoints that differ in tensor values alone have the same fingerprint.
        """
        return self._fingerprint

    def read_bytes(self, name: str) -> bytearray:
        """The stored bytes of a tensor, unchecked."""
        return safetensors_file.read_bytes(self._info(name), self.stats)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in its stored dtype (packed FP4 as uint8, two codes a byte), values checked.

        Raises:
            BadInput: unknown name, unreadable file, or a value that is not a finite number.
        """
        info = self._info(name)
        tensor = safetensors_file.read_tensor(info, self.stats)
        check_values(tensor, f"{name} ({info.file})")
        return tensor

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name) or self.mtp_tensors.get(name)
        if info is None:
            raise BadInput(f"no tensor {name}", where=str(self.folder), fix="check the name")
        return info


@dataclass(frozen=True, slots=True)
class _Index:
    """`model.safetensors.index.json`: tensor name -> file name of its shard."""

    weight_map: dict[str, str]
    total_size: int | None


def _read_index(path: Path) -> _Index | None:
    """The index, None if there is none."""
    if not path.exists():
        return None
    raw = read_json_object(path)
    weight_map, metadata = raw.get("weight_map"), raw.get("metadata", {})
    if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
        fix = "weight_map must be an object: tensor name to the file name of a shard in the same folder"
        raise BadInput("index without a usable weight_map", where=str(path), fix=fix)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not (total is None or type(total) is int):
        fix = "metadata must be an object, its total_size an integer"
        raise BadInput("index without usable metadata", where=str(path), fix=fix)
    return _Index(weight_map, total)


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & {"/", "\\", "\0"}


def _shard_names(folder: Path, index: _Index | None) -> list[str]:
    """File names of all shards that are there or should be, sorted."""
    names = {p.name for p in folder.glob(SHARD_GLOB)}
    if index is not None:
        names |= set(index.weight_map.values())
    else:
        names |= {sibling for name in names for sibling in _siblings(name)}
    if not names:
        fix = f"the shards must be called {SHARD_GLOB}, or be named by {INDEX_NAME}"
        raise BadInput("no safetensors shard", where=str(folder), fix=fix)
    return sorted(names)


def _siblings(name: str) -> Iterable[str]:
    """All shards that `model-00001-of-00046.safetensors` says exist."""
    match = _SHARD_OF.fullmatch(name)
    if match is None:
        return ()
    head, tail, count = match.groups()
    return (f"{head}{i:05d}{tail}" for i in range(1, int(count) + 1))


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Headers make some 10^5 small objects and no cycle; walking them is half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_headers(folder: Path, names: list[str], stats: ReadStats, problems: list[str]) -> list[ShardHeader]:
    headers = []
    for name in names:
        if not (folder / name).exists():
            problems.append(f"shard {name} is missing")
            continue
        try:
            headers.append(safetensors_file.read_header(folder / name, stats))
        except BadInput as e:  # listed with the rest
            problems.append(f"shard {name}: {e.what}" + (f" ({e.fix})" if e.fix else ""))
    return headers


def _merge(headers: list[ShardHeader], problems: list[str]) -> dict[str, TensorInfo]:
    """All tensors by name, sorted."""
    tensors: dict[str, TensorInfo] = {}
    twice = []
    for header in headers:
        for name, info in header.tensors.items():
            first = tensors.setdefault(name, info)
            if first is not info:
                twice.append(f"tensor {name} is in two shards: {first.file.name} and {info.file.name}")
    problems += _capped(twice)
    return dict(sorted(tensors.items()))


def _check_index(index: _Index, headers: list[ShardHeader], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """What the index says against what the headers say."""
    by_shard = {header.file.name: header.tensors for header in headers}
    lacking = []
    for name, shard in sorted(index.weight_map.items()):
        # A shard that is missing or unreadable is a problem of its own, not one per tensor.
        if shard in by_shard and name not in by_shard[shard]:
            there = f"it is in {tensors[name].file.name}" if name in tensors else "no shard has it"
            lacking.append(f"the index sends tensor {name} to {shard}, which lacks it ({there})")
    stray = [
        f"tensor {name} of {info.file.name} is not in the index"
        for name, info in tensors.items()
        if name not in index.weight_map
    ]
    size = sum(t.nbytes for t in tensors.values())
    sizes = []
    if index.total_size not in (None, size):
        sizes.append(f"the index says total_size {index.total_size}, the tensors found have {size} bytes")
    return [*_capped(lacking), *_capped(stray), *sizes]


def _capped(lines: list[str]) -> list[str]:
    """At most `_LISTED` lines, and how many were left off."""
    left = len(lines) - _LISTED
    return lines if left <= 0 else [*lines[:_LISTED], f"... and {left} more of this kind"]


def _fingerprint(raw_config: Mapping[str, object], headers: list[ShardHeader]) -> str:
    canonical = {"config": raw_config, "shards": {h.file.name: h.digest for h in headers}}
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
