"""`rewright doctor`: what this machine and this install can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import UsageError


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="Exit with 4 unless this target runs here: host or sm80.")
    ] = None,
) -> None:
    """Say what this machine and this install can do, and what is missing.

    Examples:

      rewright doctor --json

      rewright doctor --target sm80
    """
    from rewright import __version__
    from rewright.codegen.targets import TARGETS
    from rewright.runtime.card import card_refusal
    from rewright.runtime.machine import Check, examine

    if target not in (None, *TARGETS):
        raise UsageError(
            f"there is no target {target!r}", where="--target", fix=f"one of {', '.join(TARGETS)}"
        )
    checks = [Check("rewright", None, __version__), *examine(Path.cwd())]
    if json_output:
        output.result(json.dumps([{"name": c.name, "ok": c.ok, "text": c.text} for c in checks], indent=1))
    else:
        width = max(len(c.name) for c in checks)
        for c in checks:
            mark = {True: "ok", False: "no", None: ""}[c.ok]
            output.result(f"{c.name:<{width}}  {mark:<2}  {c.text}")
    if target == "sm80" and (refusal := card_refusal()):
        raise refusal
