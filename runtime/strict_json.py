"""JSON and text as prompts need them: standard JSON only, and nothing that UTF-8 cannot hold."""

from __future__ import annotations

import json
from typing import Any

from rewright.ir.errors import BadInput


def json_value(text: str, where: str) -> Any:
    """Decode JSON strictly: no NaN, no Infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not valid JSON: {error}", where=where, fix="mend the JSON text") from error


def json_text(value: object, where: str) -> str:
    """Encode JSON as the chat format has it: non-ASCII kept, a space after comma and colon."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"cannot be written as JSON: {error}", where=where, fix="use JSON values only"
        ) from error
    return check_text(text, where)


def check_text(text: str, where: str) -> str:
    """The same text, if it can be encoded in UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            f"character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X})",
            where=where,
            fix="replace it: no UTF-8 text can hold it",
        ) from error
    return text


def kind(value: object) -> str:
    """What a decoded value is in JSON's words, for an error."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")
