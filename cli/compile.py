"""`compile-model`: checkpoint -> compiled model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rewright.cli import output

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CKPT", help="Checkpoint folder: config.json and safetensors shards.")
]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Folder to create.")]
MaxContext = Annotated[int, typer.Option(help="Longest sequence in tokens, prompt and completion.")]
MaxBatch = Annotated[int, typer.Option(help="Sequences that can run at once.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a prefill chunk.")]
Numerics = Annotated[
    str, typer.Option(help="faithful keeps every rounding of the released model, fp32 has none.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing compiled model.")]


def compile_model(
    ckpt: Checkpoint,
    out: Out,
    max_context: MaxContext = 4096,
    max_batch: MaxBatch = 1,
    chunk: Chunk = 128,
    numerics: Numerics = "faithful",
    force: Force = False,
) -> None:
    """Compile a checkpoint into a folder that `rewright generate` runs.

    Example: compile-model examples/tiny-v4 -o out --max-context 8192
    """
    from rewright.compiler import CompileOptions
    from rewright.compiler import compile_model as compile_checkpoint
    from rewright.frontend.numerics import parse_numerics

    begin = time.monotonic()
    options = CompileOptions(parse_numerics(numerics), max_context, max_batch, chunk)
    with output.ProgressBar() as bar:
        notes = compile_checkpoint(ckpt, out, options, force=force, progress=bar)
    output.notes(notes)
    output.note(f"compiled in {time.monotonic() - begin:.1f} s")
    output.result(str(out))
