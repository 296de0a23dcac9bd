"""The model that is calibrated: a graph that quantises in single nodes, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, MachineError
from rewright.ir.graph import Graph
from rewright.ir.manifest import MANIFEST_NAME, TOKENIZER_NAME
from rewright.ir.variant import Variant
from rewright.passes import canonicalize, eliminate_quant
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite
from rewright.runtime.load import Artifact
from rewright.runtime.memory import total_bytes
from rewright.runtime.score import Encoded, encode_texts, load_texts
from rewright.runtime.tokenizer import Tokenizer

STAGE = "canonical"
"""Of the graph: each value is quantised once, by a node of its own."""

MAX_CONTEXT = 4096
CHUNK = 128


@dataclass(frozen=True)
class CalibrationModel:
    """A checkpoint or a compiled model.

    Attributes:
        where: its path.
        fingerprint: of the checkpoint.
        graph: its largest chunk variant at stage `STAGE`.
        weights: tensors by name.
        tokenizer: of the checkpoint.
        bos: its begin token.
        max_context: longest text in tokens.
    """

    where: str
    fingerprint: str
    graph: Graph
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    bos: int
    max_context: int

    @classmethod
    def open(cls, path: Path) -> CalibrationModel:
        """Open a checkpoint folder, or a compiled model.

        Raises:
            BadInput: it is neither, or has no tokenizer.
            MachineError: it does not fit this machine's memory.
        """
        if not path.is_dir():
            raise BadInput(
                "no such folder", where=str(path), fix="name a checkpoint folder or a compiled model"
            )
        return cls._of_artifact(path) if (path / MANIFEST_NAME).is_file() else cls._of_checkpoint(path)

    @classmethod
    def _of_checkpoint(cls, path: Path) -> CalibrationModel:
        source = ModelSource.open(path, Numerics.FAITHFUL, max_context=MAX_CONTEXT, chunk=CHUNK)
        assert source.checkpoint is not None
        tokenizer = path / TOKENIZER_NAME
        if not tokenizer.exists():
            raise BadInput(f"has no {TOKENIZER_NAME}, so no text can be read", where=str(path), fix="add it")
        _require_memory(sum(t.nbytes for t in source.weight_types().values()))
        passes = PassOptions.of(f"{canonicalize.PASS.name},{eliminate_quant.PASS.name}", (), STAGE)
        graph = rewrite(source, _largest_chunk(source.variants()), passes).graph
        reader = source.weights()
        weights = {name: reader.load(name) for name in reader.names()}
        return cls(
            str(path),
            source.checkpoint.fingerprint(),
            graph,
            weights,
            Tokenizer.open(tokenizer),
            source.config.bos_token_id,
            source.limits.max_context,
        )

    @classmethod
    def _of_artifact(cls, path: Path) -> CalibrationModel:
        artifact = Artifact.open(path)
        manifest = artifact.manifest
        if STAGE not in manifest.stages:
            raise BadInput(
                f"keeps no graphs of stage {STAGE}",
                where=str(path),
                fix="calibrate the checkpoint, or compile without --to",
            )
        _require_memory(artifact.weight_bytes)
        graph = artifact.graph(_largest_chunk(list(manifest.variants)), STAGE)
        return cls(
            str(path),
            manifest.fingerprint,
            graph,
            artifact.weights_by_row(),
            artifact.tokenizer(),
            artifact.bos,
            manifest.limits.max_context,
        )

    def read_texts(self, path: Path) -> list[Encoded]:
        """The texts of a JSONL file as token ids.

        Raises:
            BadInput: a line that cannot be used, or a text longer than the context.
        """
        return encode_texts(self.tokenizer, load_texts(path), bos=self.bos, max_context=self.max_context)


def _largest_chunk(variants: list[Variant]) -> Variant:
    """Of the variants that read several tokens of one sequence; a decode step where there is none."""
    alone = [v for v in variants if v.batch == 1 and not v.all_positions]
    return max(alone, key=lambda v: (v.tokens, v.capacity))


def _require_memory(needed: int) -> None:
    if needed > total_bytes():
        raise MachineError(
            f"the model has {needed:,} bytes of weights, this machine has {total_bytes():,}",
            where="calibrate",
            fix="calibrate on a larger machine; the file of scales serves on every other",
        )
