"""The command line: `rewright` and `compile-model`. docs/errors.md lists the exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from typing import Any, NoReturn

import typer

from rewright import __version__
from rewright.cli import output
from rewright.cli.bench import bench
from rewright.cli.calibrate import calibrate
from rewright.cli.compile import compile_model
from rewright.cli.doctor import doctor
from rewright.cli.explain import explain
from rewright.cli.generate import generate
from rewright.cli.graph import app as graph_app
from rewright.cli.kernels import app as kernels_app
from rewright.cli.ops import app as ops_app
from rewright.cli.passes import app as passes_app
from rewright.cli.passes import reproduce
from rewright.cli.score import score
from rewright.cli.sensitivity import sensitivity
from rewright.ir.errors import CompilerBug, MachineError, RewrightError, UserError

# typer brings its own copy of click in newer releases, so its exceptions are found through its exports.
_ClickException: Any = typer.BadParameter.__mro__[2]

EXIT_BUG = 70
EXIT_INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compile DeepSeek-V4 ahead of time, look at its graph, run it.\n\n"
    "Example: rewright compile-model examples/tiny-v4 -o out",
)
app.command("compile-model")(compile_model)
app.add_typer(graph_app, name="graph")
app.add_typer(passes_app, name="passes")
app.add_typer(ops_app, name="ops")
app.add_typer(kernels_app, name="kernels")
app.command()(explain)
app.command()(reproduce)
app.command()(generate)
app.command()(score)
app.command()(sensitivity)
app.command()(bench)
app.command()(calibrate)
app.command()(doctor)

compile_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
compile_app.command()(compile_model)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True),
) -> None:
    if version:
        output.result(f"rewright {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Entry point of `rewright`."""
    _run(app, "rewright")


def compile_model_main() -> NoReturn:
    """Entry point of `compile-model`."""
    _run(compile_app, "compile-model")


def _run(application: typer.Typer, name: str) -> NoReturn:
    arguments = [a for a in sys.argv[1:] if a != "--traceback"]
    show_trace = len(arguments) < len(sys.argv) - 1
    command = typer.main.get_command(application)
    if sys.stdout is None:  # closed by whoever started this: results are not wanted
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text in any encoding
    if f"_{name.upper()}_COMPLETE" in os.environ:
        command.main(prog_name=name)  # the shell asks for completions
    try:
        # Not `command.main`: it takes a closed pipe for an error and Ctrl-C for an exit.
        with command.make_context(name, arguments) as context:
            code = command.invoke(context)
    except typer.Exit as e:
        code = e.exit_code
    except _ClickException as e:
        e.show(sys.stderr)
        code = e.exit_code
    except (KeyboardInterrupt, typer.Abort):
        output.error("interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()  # its reader has gone (a pager was closed): nothing is wrong, nobody listens
        code = 0
    except UserError as e:
        if show_trace:
            traceback.print_exc()
        output.error(str(e))
        code = e.exit_code
        if code == EXIT_BUG and e.__cause__ is not None:
            traceback.print_exception(e.__cause__)  # a pass failed in a way that is ours
    except Exception as e:
        code = _exit_code_of(e)
    sys.exit(code if isinstance(code, int) else 0)


def _exit_code_of(error: Exception) -> int:
    """Report an exception that no part of Rewright raised on purpose, or that is its own bug."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _drop_stdout()
        output.error(f"cannot write: {error.strerror}\n  -> free some space, or write elsewhere")
        return MachineError.exit_code
    traceback.print_exc()
    kind = "" if isinstance(error, CompilerBug) else f"{type(error).__name__}: "
    output.error(
        f"this is a bug in Rewright: {kind}{error}\n  -> report it with the command and the lines above"
    )
    return error.exit_code if isinstance(error, RewrightError) else EXIT_BUG


def _drop_stdout() -> None:
    """Forget what stdout still holds, so that the end of the process does not fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
