"""Opens a compiled model and checks everything about it before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rewright.ir.errors import BadInput, ProblemList, UsageError
from rewright.ir.graph import Graph
from rewright.ir.line_edits import apply_edits
from rewright.ir.manifest import (
    CHAT_NAME,
    GENERATION_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    FileEntry,
    Manifest,
    graph_file,
    parse_manifest,
    plan_file,
)
from rewright.ir.parser import parse
from rewright.ir.plan import kernel_abi
from rewright.ir.variant import Variant
from rewright.ir.weight_layout import LAYOUTS
from rewright.runtime import _native
from rewright.runtime.chat import ChatEncoder
from rewright.runtime.tokenizer import Tokenizer

KERNELS: dict[str, Callable[[], dict[str, str]]] = {
    "host": _native.kernels,
    "sm80": _native.device_kernels,
}
"""Signatures of the installed kernels by symbol, for each target that this version can execute."""

_AGAIN = "compile the model again"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled model on disk.

    Attributes:
        folder: where it lies.
        manifest: its checked manifest.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Artifact:
        """Read the manifest and check that every file is there and unchanged.

        Small files are hashed; of weight shards the size is checked. Whether this machine can execute the
        target is asked when that is wanted: graphs and `--reference` need no card.

        Raises:
            BadInput: not an artifact, or of another format.
            ProblemList: missing, cut or edited files.
        """
        path = folder / MANIFEST_NAME
        if not folder.exists():
            raise BadInput("no such file or folder", where=str(folder), fix="check the path")
        if not path.is_file():
            raise BadInput(
                "not a compiled model: it has no manifest.json",
                where=str(folder),
                fix="make one with: compile-model CHECKPOINT -o OUT",
            )
        try:
            manifest = parse_manifest(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as e:
            raise BadInput(f"cannot be read ({e})", where=str(path), fix=_AGAIN) from e
        if manifest.target not in KERNELS:
            raise BadInput(
                f"compiled for the target {manifest.target!r}; this Rewright runs {' and '.join(KERNELS)}",
                where=str(path),
                fix=_AGAIN,
            )
        if manifest.abi != kernel_abi(KERNELS[manifest.target]()):
            raise BadInput(
                "compiled for the kernels of another version of Rewright", where=str(path), fix=_AGAIN
            )
        found = [_damage(folder / name, name, entry) for name, entry in manifest.files.items()]
        if problems := [problem for problem in found if problem]:
            raise ProblemList("the compiled model is damaged", problems, where=str(folder), fix=_AGAIN)
        return cls(folder, manifest)

    def graph(self, variant: Variant, stage: str | None = None) -> Graph:
        """The graph of a variant that is executed, or that of a stage on the way to it.

        Raises:
            UsageError: the stage was not made, or is not kept of a high variant.
            BadInput: the text cannot be read.
        """
        stages = self.manifest.stages
        if stage is not None and stage not in stages:
            raise UsageError(
                f"it was compiled without stage {stage}",
                where=str(self.folder),
                fix=f"stages: {', '.join(stages)}",
            )
        if variant.is_high and stage not in (None, stages[-1]):
            raise UsageError(
                f"of {variant.name} only the graph at stage {stages[-1]} is kept",
                where=str(self.folder),
                fix="name that stage, or the checkpoint with the option precision=high",
            )
        made = stages[-1] if stage is None else stage
        text = self._text(variant, lambda v: graph_file(made, v))
        return parse(text, str(self.folder / graph_file(made, variant)))

    def plan_text(self, variant: Variant) -> str:
        """The plan of a variant as JSON; `BadInput` if it cannot be read."""
        return self._text(variant, plan_file)

    def _text(self, variant: Variant, file_of: Callable[[Variant], str]) -> str:
        """The text of a variant, made of that of its base where its file holds edits."""
        path = self.folder / file_of(variant)
        text = path.read_text(encoding="utf-8")
        if variant.base is None:
            return text
        try:
            return apply_edits(self._text(variant.base, file_of), text)
        except ValueError as e:
            raise BadInput(f"no edits of {file_of(variant.base)} ({e})", where=str(path), fix=_AGAIN) from e

    def weights(self) -> dict[str, Tensor]:
        """Every weight and constant by name as stored, mapped from the shards: one with a layout has its
        shape but not its order. `BadInput` if one is not there."""
        return dict(self.each_weight())

    def each_weight(self) -> Iterator[tuple[str, Tensor]]:
        """The same one after the other, shard by shard: only what the caller keeps stays mapped."""
        found: set[str] = set()
        for shard in self._shards():
            try:
                with safe_open(self.folder / shard, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        found.add(name)
                        yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as e:
                raise BadInput(f"cannot be read ({e})", where=str(self.folder / shard), fix=_AGAIN) from e
        if missing := sorted(self.manifest.tensors.keys() - found):
            raise ProblemList("weights are in no shard", missing, where=str(self.folder), fix=_AGAIN)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.manifest.files[shard].bytes for shard in self._shards())

    def _shards(self) -> list[str]:
        return sorted(set(self.manifest.tensors.values()))

    def weights_by_row(self) -> dict[str, Tensor]:
        """The same in row order, as graphs mean them; what had another layout is a copy."""
        layouts = self.manifest.layouts
        return {name: LAYOUTS[layouts.get(name, "")].unpack(t) for name, t in self.weights().items()}

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `BadInput` if it was compiled without one."""
        if TOKENIZER_NAME not in self.manifest.files:
            raise BadInput(
                "compiled without a tokenizer, so it takes token ids only",
                where=str(self.folder),
                fix=f"put {TOKENIZER_NAME} into the checkpoint folder and compile again",
            )
        return Tokenizer.open(self.folder / TOKENIZER_NAME)

    def chat_encoder(self) -> ChatEncoder:
        """The chat encoding, with the constants that the checkpoint brought."""
        if CHAT_NAME not in self.manifest.files:
            return ChatEncoder(None)
        return ChatEncoder(json.loads((self.folder / CHAT_NAME).read_text(encoding="utf-8")))

    def generation_defaults(self) -> dict[str, Any]:
        """What the checkpoint's generation_config.json sets; empty if it had none."""
        if GENERATION_NAME not in self.manifest.files:
            return {}
        path = self.folder / GENERATION_NAME
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as e:
            raise BadInput(f"not valid JSON ({e})", where=str(path), fix=_GENERATION_FIX) from e
        if not isinstance(value, dict):
            raise BadInput("not a JSON object", where=str(path), fix=_GENERATION_FIX)
        given = {key: v for key, v in value.items() if v is not None}
        for key, accepts in _GENERATION_KEYS.items():
            if key in given and not accepts(given[key]):
                raise BadInput(f"{key} cannot be {given[key]!r}", where=str(path), fix=_GENERATION_FIX)
        return given

    @property
    def eos(self) -> frozenset[int]:
        """Token ids that end a completion."""
        given = self.generation_defaults().get("eos_token_id", self.manifest.model["eos_token_id"])
        return frozenset(given if isinstance(given, list) else [given])

    @property
    def bos(self) -> int:
        """Token id that begins every text."""
        return self.manifest.model["bos_token_id"]


def _damage(file: Path, name: str, entry: FileEntry) -> str | None:
    """What is wrong with a file of the artifact."""
    if not file.is_file():
        return f"{name} is missing"
    if (size := file.stat().st_size) != entry.bytes:
        return f"{name} has {size} bytes instead of {entry.bytes}"
    if name.endswith(".safetensors"):
        return None
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as e:
        return f"{name} cannot be read ({e.strerror})"
    return None if digest == entry.sha256 else f"{name} was changed after it was compiled"


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_token_or_tokens(value: object) -> bool:
    return all(type(v) is int for v in (value if isinstance(value, list) else [value]))


_GENERATION_KEYS: dict[str, Callable[[object], bool]] = {
    "do_sample": lambda value: isinstance(value, bool),
    "temperature": _is_number,
    "top_p": _is_number,
    "eos_token_id": _is_token_or_tokens,
}
_GENERATION_FIX = "mend the checkpoint's file and compile again"
