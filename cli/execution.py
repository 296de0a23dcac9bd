"""Options of the commands that execute a model, and the engine that they make."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output

if TYPE_CHECKING:
    from rewright.runtime.engine import Engine
    from rewright.runtime.load import Artifact

Reference = Annotated[
    bool,
    typer.Option("--reference", help="Execute with the interpreter over op references: slow, the oracle."),
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of the host's kernels; one for each core if not given.")
]


class Precision(StrEnum):
    low = "low"
    high = "high"


PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision", help="Variants that run; high ones are there after compile-model --variants low,high."
    ),
]


def open_engine(
    artifact: Artifact,
    *,
    reference: bool = False,
    threads: int | None = None,
    graphs: bool = True,
    quiet: bool = False,
    precision: str = "low",
) -> Engine:
    """An engine for a compiled model; says so where a card is emulated, and how far loading onto one is.

    Args:
        artifact: the model.
        reference: execute it with the interpreter.
        threads: of the host's kernels.
        graphs: whether a card's steps are recorded as CUDA graphs.
        quiet: nobody is told; for one model after the other.
        precision: of the variants that run.

    Raises:
        UsageError: the model was not compiled in that precision.
    """
    from rewright.runtime.card import EMULATE, emulating
    from rewright.runtime.engine import Engine, require_precision

    require_precision(artifact, precision)  # before weights are loaded
    if quiet:
        return Engine(artifact, reference=reference, threads=threads, graphs=graphs, precision=precision)
    if artifact.manifest.target == "sm80" and emulating() and not reference:
        output.note(f"target sm80, emulated on this CPU ({EMULATE} is set): slow")
    with output.ProgressBar() as bar:
        loading = bar.counter("loading weights", artifact.weight_bytes)
        return Engine(
            artifact,
            reference=reference,
            threads=threads,
            loading=loading,
            graphs=graphs,
            precision=precision,
        )
