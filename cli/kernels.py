"""`rewright kernels`: the kernels that plans are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import UsageError

if TYPE_CHECKING:
    from rewright.codegen.kernel import KernelDef

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at the kernels of each target.\n\nExample: rewright kernels show host.attention",
)

TargetName = Annotated[str | None, typer.Option("--target", help="Only this target: host or sm80.")]


@app.command("list")
def list_kernels(target: TargetName = None) -> None:
    """List the kernels: symbol, and the ops that it covers.

    Example: rewright kernels list --target host
    """
    from rewright.codegen.targets import TARGETS

    if target is not None and target not in TARGETS:
        raise UsageError(
            f"there is no target {target!r}", where="--target", fix=f"one of {', '.join(TARGETS)}"
        )
    chosen = [t for name, t in TARGETS.items() if target in (None, name)]
    rows = [(symbol, _pattern(k)) for t in chosen for k in t.kernels for symbol in k.symbols]
    width = max(len(symbol) for symbol, _ in rows)
    for symbol, pattern in rows:
        output.result(f"{symbol:<{width}}  {pattern}")


@app.command()
def show(symbol: Annotated[str, typer.Argument(metavar="SYMBOL", help="Symbol of a kernel.")]) -> None:
    """Show a kernel's signature, whether this machine has it, and what it computes.

    Example: rewright kernels show host.moe
    """
    from rewright.codegen.targets import TARGETS
    from rewright.runtime import _native

    found = [(t, k) for t in TARGETS.values() for k in t.kernels if symbol in k.symbols]
    if not found:
        near = [
            s
            for t in TARGETS.values()
            for k in t.kernels
            for s in k.symbols
            if symbol.rpartition(".")[2] in s
        ]
        fix = f"perhaps {', '.join(near[:6])}" if near else "rewright kernels list has all of them"
        raise UsageError(f"there is no kernel {symbol}", fix=fix)
    target, kernel = found[0]
    output.result(f"{symbol}: kernel of target {target.name}")
    output.result(f"signature  {kernel.signature}")
    output.result(f"launches   {', '.join(kernel.symbols)}")
    output.result("covers     " + _pattern(kernel))
    if target.name == "host":
        here = symbol in _native.kernels()
        output.result(f"installed  {'yes, ' + _native.vector_name() if here else 'no'}")
    else:
        from rewright.runtime.card import kernel_files

        here = symbol in _native.device_kernels() and kernel_files()
        output.result(f"installed  {'yes' if here else 'no: this build has no machine code of it'}")
    for op in dict.fromkeys(op for slot in kernel.covers for op in slot.ops):
        output.result(f"op         {op}: {_summary(op)}")


def _pattern(kernel: KernelDef) -> str:
    return " + ".join(map(str, kernel.covers))


def _summary(op: str) -> str:
    from rewright.ir.op import registry

    return " ".join((registry()[op].__doc__ or "").strip().split("\n\n")[0].split())
