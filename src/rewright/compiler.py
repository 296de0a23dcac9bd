"""The driver: chains the stages from a checkpoint to a compiled model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rewright.codegen.artifact import check_replaceable, copy_file, new_artifact, write_text
from rewright.codegen.shards import write_shards
from rewright.frontend.chat_constants import CHAT_CONSTANTS_NAME, read_chat_constants
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput
from rewright.ir.manifest import (
    CHAT_NAME,
    GENERATION_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    FileEntry,
    Manifest,
)
from rewright.ir.printer import print_graph
from rewright.runtime.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and the total."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What changes the result of a compilation."""

    numerics: Numerics = Numerics.FAITHFUL
    max_context: int = 4096
    max_batch: int = 1
    chunk: int = 128


def _silent(what: str, done: int, total: int) -> None:
    pass


def compile_model(
    checkpoint: str | Path,
    out: str | Path,
    options: CompileOptions | None = None,
    *,
    force: bool = False,
    progress: Progress = _silent,
) -> list[str]:
    """Compile a checkpoint folder into the artifact `out`.

    Args:
        checkpoint: folder with config.json and safetensors shards.
        out: folder to create.
        options: numerics and limits.
        force: replace an existing compiled model.
        progress: told how far the work is.

    Returns:
        Notes for the user: ignored configuration keys, tensors left out, things that are missing.

    Raises:
        UserError: with the exit code that docs/errors.md gives for its kind.
    """
    options = options or CompileOptions()
    checkpoint, out = Path(checkpoint), Path(out)
    check_replaceable(out, force=force)
    if not checkpoint.is_dir():
        raise BadInput("no such folder", where=str(checkpoint), fix="name a checkpoint folder")
    source = ModelSource.open(
        checkpoint,
        options.numerics,
        max_context=options.max_context,
        max_batch=options.max_batch,
        chunk=options.chunk,
    )
    notes = list(source.notes)
    texts = _trace_all(source, progress)
    types = source.weight_types()
    total = sum(t.nbytes for t in types.values())
    with new_artifact(out, force=force, needed_bytes=total) as folder:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress("packing weights", min(done, total), total)

        files = {name: write_text(folder, name, text) for name, text in texts.items()}
        files |= _copy_text_files(checkpoint, folder, source, notes)
        tensors, shards = write_shards(folder, types, source.weights(), advance)
        assert source.checkpoint is not None
        manifest = Manifest(
            model=source.config.to_dict(),
            fingerprint=source.checkpoint.fingerprint(),
            target="reference",
            numerics=options.numerics.value,
            limits=source.limits,
            variants={v: _graph_path(v.name) for v in source.variants()},
            tensors=tensors,
            files=files | shards,
        )
        write_text(folder, MANIFEST_NAME, manifest.to_text())
    return notes


def _graph_path(variant: str) -> str:
    return f"graphs/traced/{variant}.txt"


def _trace_all(source: ModelSource, progress: Progress) -> dict[str, str]:
    """Graph text of every variant by its path in the artifact."""
    variants, texts = source.variants(), {}
    for done, variant in enumerate(variants):
        progress("tracing", done, len(variants))
        texts[_graph_path(variant.name)] = print_graph(source.graph(variant))
    progress("tracing", len(variants), len(variants))
    return texts


def _copy_text_files(
    checkpoint: Path, folder: Path, source: ModelSource, notes: list[str]
) -> dict[str, FileEntry]:
    """Tokenizer, generation defaults and chat constants, as far as the checkpoint has them."""
    files: dict[str, FileEntry] = {}
    tokenizer = checkpoint / TOKENIZER_NAME
    if tokenizer.exists():
        Tokenizer.open(tokenizer).check_vocabulary(source.config.vocab_size)
        files[TOKENIZER_NAME] = copy_file(tokenizer, folder, TOKENIZER_NAME)
    else:
        notes.append(f"{checkpoint} has no {TOKENIZER_NAME}: the compiled model takes token ids only")
    if (checkpoint / GENERATION_NAME).exists():
        files[GENERATION_NAME] = copy_file(checkpoint / GENERATION_NAME, folder, GENERATION_NAME)
    constants = read_chat_constants(checkpoint)
    if constants is None:
        notes.append(
            f"{checkpoint} has no {CHAT_CONSTANTS_NAME}: chat works, except tools, effort max and response "
            "format"
        )
    else:
        text = json.dumps(constants, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        files[CHAT_NAME] = write_text(folder, CHAT_NAME, text)
    return files
