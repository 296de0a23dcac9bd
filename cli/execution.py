"""Options of the commands that execute a model."""

from __future__ import annotations

from typing import Annotated

import typer

Reference = Annotated[
    bool,
    typer.Option("--reference", help="Execute with the interpreter over op references: slow, the oracle."),
]
Threads = Annotated[int | None, typer.Option(help="Threads of the kernels; one for each core if not given.")]
