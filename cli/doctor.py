"""`rewright doctor`: what this machine and this install can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import MachineError, UsageError

if TYPE_CHECKING:
    from rewright.runtime.check import Check


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="Exit with 4 unless this target runs here: host or sm80.")
    ] = None,
) -> None:
    """Say what this machine and this install can do, what would be refused, and how to mend it.

    Where there are several cards, bytes are copied between each two and compared. The speed of the disk is
    that of a temporary file of 32 MiB in the current folder.

    Examples:

      rewright doctor --json

      rewright doctor --target sm80
    """
    from rewright.codegen.targets import TARGETS

    if target not in (None, *TARGETS):
        raise UsageError(
            f"there is no target {target!r}", where="--target", fix=f"one of {', '.join(TARGETS)}"
        )
    checks = _checks()
    if json_output:
        output.result(json.dumps([check.to_json() for check in checks], indent=1))
    else:
        width = max(len(c.name) for c in checks)
        for c in checks:
            mark = {True: "ok", False: "no", None: ""}[c.ok]
            output.result(f"{c.name:<{width}}  {mark:<2}  {c.text}")
            if c.fix is not None:
                output.result(f"{'':<{width}}      -> {c.fix}")
    for c in checks:
        if c.name == f"target {target}" and c.ok is False:
            raise MachineError(c.text, where=c.name, fix=c.fix)


def _checks() -> list[Check]:
    """All findings; of an install whose native part cannot be loaded, that no target runs."""
    from rewright import __version__
    from rewright.codegen.targets import TARGETS
    from rewright.runtime.check import Check

    checks = [Check("rewright", None, __version__)]
    try:
        from rewright.runtime import machine
    except ImportError as e:
        fix = "install Rewright again, for this Python"
        broken = [Check(f"target {name}", False, f"cannot be loaded ({e})", fix) for name in TARGETS]
        return [*checks, *broken]
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # it was removed; what it was called is all the same
        folder = Path(".")
    return [*checks, *machine.examine(folder)]
