"""`rewright ops`: the ops that graphs are made of."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import UsageError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at the ops of the graph.\n\nExample: rewright ops show rms_norm_quant",
)


@app.command("list")
def list_ops() -> None:
    """List the ops: name, first stage at which it may appear, what it computes.

    Example: rewright ops list
    """
    from rewright.ir.op import registry

    ops = sorted(registry().values(), key=lambda op: (op.since != "traced", op.name))
    width = max(len(op.name) for op in ops)
    since = max(len(op.since) for op in ops)
    for op in ops:
        output.result(f"{op.name:<{width}}  {op.since:<{since}}  {_first_line(op.__doc__)}")


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of an op.")]) -> None:
    """Show an op: signature, meaning, the ops that it is composed of, its kernels on every target.

    Example: rewright ops show attention
    """
    from rewright.codegen.kernel import signature
    from rewright.codegen.targets import TARGETS
    from rewright.ir.op import registry

    if name not in registry():
        near = [n for n in registry() if name in n or n in name]
        raise UsageError(
            f"there is no op {name}",
            fix=f"perhaps {', '.join(near[:6])}" if near else "rewright ops list has all of them",
        )
    op = registry()[name]
    output.result(signature(op))
    output.result(f"since stage {op.since}")
    for role, state in op.updates.items():
        output.result(f"updates     {state}{f' (result {role})' if role else ''}")
    output.result("")
    output.result(inspect.cleandoc(op.__doc__ or ""))
    output.result("")
    if op.composition is not None:
        output.result("composition")
        body = inspect.getsource(op.composition)
        output.result(
            inspect.cleandoc(body[body.index('"""', body.index('"""') + 3) + 3 :]) if '"""' in body else body
        )
        output.result("")
    output.result("kernels")
    for target in TARGETS.values():
        symbols = [s for k in target.kernels for slot in k.covers if name in slot.ops for s in k.symbols]
        text = ", ".join(dict.fromkeys(symbols)) or "none: it is taken apart"
        output.result(f"  {target.name:<5} {text}")


def _first_line(text: str | None) -> str:
    return " ".join((text or "").strip().split("\n\n")[0].split())
