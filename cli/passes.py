"""`rewright passes`: what the passes are. `rewright reproduce`: run a failed one again."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import UsageError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at the passes that rewrite a graph.\n\nExample: rewright passes show fuse_norm_quant",
)


@app.command("list")
def list_passes() -> None:
    """List the passes in the order in which they run.

    Example: rewright passes list
    """
    from rewright.passes.pipelines import PIPELINE

    name = max(len(p.name) for p in PIPELINE)
    stage = max(len(p.stage) for p in PIPELINE)
    for p in PIPELINE:
        output.result(f"{p.stage:<{stage}}  {p.name:<{name}}  {p.summary}")


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a pass.")]) -> None:
    """Show what a pass does, what it needs, when it refuses, and its rules.

    Example: rewright passes show fuse_hyper_connection
    """
    from rewright.passes.pipelines import PIPELINE

    found = [p for p in PIPELINE if p.name == name]
    if not found:
        owners = [p.name for p in PIPELINE if any(rule.name == name for rule in p.rules)]
        if owners:
            raise UsageError(f"{name} is a rule", fix=f"it belongs to {', '.join(owners)}")
        raise UsageError(f"there is no pass {name}", fix=f"passes: {', '.join(p.name for p in PIPELINE)}")
    p = found[0]
    output.result(f"{p.name}: {p.summary}")
    output.result(f"stage       {p.stage}")
    output.result(f"requires    {', '.join(p.requires) or 'no other pass'}")
    output.result(f"refuses     {p.refuses or 'nothing in particular'}")
    output.result(f"idempotent  {'yes' if p.idempotent else 'no'}")
    output.result("rules")
    described: dict[str, str] = {}
    for rule in p.rules:
        described.setdefault(rule.name, inspect.cleandoc(type(rule).__doc__ or "").split("\n\n")[0])
    for rule, text in described.items():
        output.result(f"  {rule}: {' '.join(text.split())}")


def reproduce(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What a failed pass has written.")],
) -> None:
    """Run a failed pass again from its reproducer. The exit code is that of the failure.

    Example: rewright reproduce out.reproducer.json
    """
    from rewright.passes.manager import rerun
    from rewright.passes.report import render
    from rewright.passes.reproducer import read_reproducer

    reproducer = read_reproducer(file)
    for name, version in reproducer.versions.items():
        output.note(f"written with {name} {version}")
    result = rerun(reproducer)
    output.result(render(result.report), end="")
    output.note("nothing failed: this Rewright does not have the fault")
