"""The command line: `rewright` and `compile-model`. docs/errors.md lists the exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Any, NoReturn

import typer

from rewright import __version__
from rewright.cli import output
from rewright.cli.compile import compile_model
from rewright.cli.doctor import doctor
from rewright.cli.generate import generate
from rewright.cli.graph import app as graph_app
from rewright.cli.score import score
from rewright.ir.errors import CompilerBug, RewrightError, UserError

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
app.command()(generate)
app.command()(score)
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
        # The reader of stdout has gone (a pager was closed): nothing is wrong, nobody listens.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except UserError as e:
        if show_trace:
            traceback.print_exc()
        output.error(str(e))
        code = e.exit_code
    except Exception as e:
        traceback.print_exc()
        kind = "" if isinstance(e, CompilerBug) else f"{type(e).__name__}: "
        output.error(
            f"this is a bug in Rewright: {kind}{e}\n  -> report it with the command and the lines above"
        )
        code = e.exit_code if isinstance(e, RewrightError) else EXIT_BUG
    sys.exit(code if isinstance(code, int) else 0)
