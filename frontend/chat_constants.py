"""The fixed texts of a release's chat format, read from the encoder script that it ships.

The texts belong to the checkpoint, so another release with other texts needs no new compiler. The
script is a stranger's code: it is parsed, and never imported or executed.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from rewright.ir.errors import BadInput

CHAT_CONSTANTS_NAME = "encoding/encoding_dsv4.py"

_PLACEHOLDERS: dict[str, frozenset[str]] = {
    "TOOLS_TEMPLATE": frozenset({"tool_schemas", "dsml_token", "thinking_start_token", "thinking_end_token"}),
    "REASONING_EFFORT_MAX": frozenset(),
    "response_format_template": frozenset({"schema"}),
}
_PLACEHOLDER = re.compile(r"\{([^\W\d]\w*)\}")


def read_chat_constants(checkpoint: Path) -> dict[str, str] | None:
    """The chat texts of a checkpoint by their name, or None if it ships no encoder script.

    A text that the script does not define is absent from the result.

    Raises:
        BadInput: the script cannot be parsed, a text is anything but one string literal assigned
            once, or it holds a placeholder that the chat encoder does not fill.
    """
    path = checkpoint / CHAT_CONSTANTS_NAME
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(
            f"cannot be read: {error.strerror}", where=str(path), fix="make it a readable file, or remove it"
        ) from error
    constants: dict[str, str] = {}
    for name, line, text in _bindings(_parse(source, path)):
        if name not in _PLACEHOLDERS:
            continue
        where = f"{path}:{line}"
        if text is None or name in constants:
            raise BadInput(
                f"{name} is not assigned once, at the top level, from one string literal",
                where=where,
                fix=f'write it as {name} = "..."; the file is read, not executed',
            )
        _check_text(name, text, where)
        constants[name] = text
    return constants


def _parse(source: bytes, path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # An invalid escape in the release's script is no concern of whoever compiles it.
            warnings.simplefilter("ignore")
            return ast.parse(source, str(path))
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise BadInput(
            f"is not valid Python: {error.msg}", where=where, fix="restore the file from the release"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        # Python 3.11 reports null bytes as ValueError, too deep nesting as one of the other two.
        raise BadInput(
            f"is not valid Python: {str(error) or 'nested too deeply'}",
            where=str(path),
            fix="restore the file from the release",
        ) from error


def _bindings(tree: ast.Module) -> Iterator[tuple[str, int, str | None]]:
    """Everything that binds a name: the name, the line, and the text if a literal is assigned.

    A local variable counts too: telling it from a global one is not worth following scopes.
    """
    plain: set[ast.AST] = set()
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name) as target], value=ast.Constant(value=str(text)))
                | ast.AnnAssign(target=ast.Name(id=name) as target, value=ast.Constant(value=str(text)))
            ):
                plain.add(target)
                yield name, statement.lineno, text
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if node not in plain:
                yield name, node.lineno, None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno, None
            case ast.alias(name=name, asname=alias):
                yield alias or name, node.lineno, None


def _check_text(name: str, text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{name} holds half of a surrogate pair, which no UTF-8 text can",
            where=where,
            fix="restore the file from the release",
        ) from error
    for placeholder in _PLACEHOLDER.findall(text):
        if placeholder not in _PLACEHOLDERS[name]:
            known = " ".join(f"{{{p}}}" for p in sorted(_PLACEHOLDERS[name])) or "none"
            raise BadInput(
                f"{name} holds the placeholder {{{placeholder}}}, which the chat encoder cannot fill",
                where=where,
                fix=f"use only these placeholders in it: {known}",
            )
