"""Opens a compiled model and checks everything about it before anything runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rewright.ir.errors import BadInput, ProblemList
from rewright.ir.graph import Graph
from rewright.ir.manifest import (
    CHAT_NAME,
    GENERATION_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    parse_manifest,
)
from rewright.ir.parser import parse
from rewright.ir.variant import Variant
from rewright.runtime.chat import ChatEncoder
from rewright.runtime.tokenizer import Tokenizer

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

        Small files are hashed; of weight shards the size is checked.

        Raises:
            BadInput: not an artifact, or of another format.
            ProblemList: missing, cut or edited files.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise BadInput(
                "not a compiled model: it has no manifest.json",
                where=str(folder),
                fix="make one with: compile-model CHECKPOINT -o OUT",
            )
        manifest = parse_manifest(path.read_text(), str(path))
        problems = []
        for name, entry in manifest.files.items():
            file = folder / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif file.stat().st_size != entry.bytes:
                problems.append(f"{name} has {file.stat().st_size} bytes instead of {entry.bytes}")
            elif not name.endswith(".safetensors") and _sha256(file) != entry.sha256:
                problems.append(f"{name} was changed after it was compiled")
        if problems:
            raise ProblemList("the compiled model is damaged", problems, where=str(folder), fix=_AGAIN)
        return cls(folder, manifest)

    def graph(self, variant: Variant) -> Graph:
        """The graph of a variant."""
        path = self.folder / self.manifest.variants[variant]
        return parse(path.read_text(), str(path))

    def weights(self) -> dict[str, Tensor]:
        """Every weight and constant by name, mapped from the shards."""
        weights: dict[str, Tensor] = {}
        for shard in sorted(set(self.manifest.tensors.values())):
            try:
                with safe_open(self.folder / shard, framework="pt") as file:
                    weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as e:
                raise BadInput(f"cannot be read ({e})", where=str(self.folder / shard), fix=_AGAIN) from e
        return weights

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
        return ChatEncoder(json.loads((self.folder / CHAT_NAME).read_text()))

    def generation_defaults(self) -> dict[str, Any]:
        """Contents of the checkpoint's generation_config.json, empty if it had none."""
        if GENERATION_NAME not in self.manifest.files:
            return {}
        path = self.folder / GENERATION_NAME
        try:
            value = json.loads(path.read_text())
        except ValueError as e:
            raise BadInput(f"not valid JSON ({e})", where=str(path)) from e
        if not isinstance(value, dict):
            raise BadInput("not a JSON object", where=str(path))
        return value

    @property
    def eos(self) -> frozenset[int]:
        """Token ids that end a completion."""
        given = self.generation_defaults().get("eos_token_id", self.manifest.model["eos_token_id"])
        return frozenset(given if isinstance(given, list) else [given])

    @property
    def bos(self) -> int:
        """Token id that begins every text."""
        return self.manifest.model["bos_token_id"]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
