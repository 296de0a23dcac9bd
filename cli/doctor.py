"""`rewright doctor`: what this machine and this install can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rewright.cli import output


def doctor(json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine and this install can do, and what is missing.

    Example: rewright doctor --json
    """
    from rewright import __version__
    from rewright.runtime.machine import Check, examine

    checks = [Check("rewright", None, __version__), *examine(Path.cwd())]
    if json_output:
        output.result(json.dumps([{"name": c.name, "ok": c.ok, "text": c.text} for c in checks], indent=1))
        return
    width = max(len(c.name) for c in checks)
    for c in checks:
        mark = {True: "ok", False: "no", None: ""}[c.ok]
        output.result(f"{c.name:<{width}}  {mark:<2}  {c.text}")
