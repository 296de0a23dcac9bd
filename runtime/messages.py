"""Chat messages in the shape of the OpenAI API, read from JSON into values that can be relied on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewright.ir.errors import BadInput
from rewright.runtime.strict_json import check_text, json_text, json_value, kind

TASKS = ("action", "query", "authority", "domain", "title", "read_url")

_COMMON_FIELDS = frozenset({"role", "content", "task"})
_FIELDS: dict[str, frozenset[str]] = {
    "system": _COMMON_FIELDS | {"tools", "response_format"},
    "developer": _COMMON_FIELDS | {"tools", "response_format"},
    "user": _COMMON_FIELDS,
    "assistant": _COMMON_FIELDS | {"reasoning_content", "tool_calls"},
    "tool": _COMMON_FIELDS | {"tool_call_id"},
    "latest_reminder": _COMMON_FIELDS,
}
# Carried by real conversations, and not part of a prompt: a training mask, a tool's name.
_NOT_ENCODED = frozenset({"mask", "name"})

_TOOL_FIX = 'write [{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
_CALL_FIX = 'write {"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}'


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made, with decoded arguments."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One checked message.

    Attributes:
        where: what to call it in an error, such as `messages[2]`.
        answers: for a tool result, the position of its call among those of the assistant.
        tools: function descriptions, without OpenAI's `{"type": "function"}` around them.
    """

    where: str
    role: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    response_format: dict[str, Any] | None = None
    task: str | None = None


@dataclass(frozen=True)
class Conversation:
    """The content of a messages file, ready for `ChatEncoder.encode`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None


def load_messages(path: Path) -> Conversation:
    """Read and check a JSON file: a list of messages, or an object that has one as `messages`.

    The object may also hold `tools` (OpenAI's list) and `response_format` (a JSON schema).
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise BadInput(
            f"cannot be read: {error.strerror}", where=str(path), fix="name a readable JSON file of messages"
        ) from error
    except UnicodeDecodeError as error:
        raise BadInput(
            f"byte {error.start} is not UTF-8", where=str(path), fix="save the file as UTF-8"
        ) from error
    value = json_value(text, str(path))
    data: Any = {"messages": value} if isinstance(value, list) else value
    if not isinstance(data, dict) or "messages" not in data:
        raise BadInput(
            'holds neither a list of messages nor an object with "messages"',
            where=str(path),
            fix='write [{"role": "user", "content": "..."}]',
        )
    unknown = sorted(data.keys() - {"messages", "tools", "response_format"})
    if unknown:
        raise BadInput(
            f"unknown key {unknown[0]!r} beside the messages",
            where=str(path),
            fix="keep only messages, tools and response_format; generation options go on the command line",
        )
    read_messages(data["messages"], f"{path}: messages")
    read_tools(data.get("tools"), f"{path}: tools")
    read_response_format(data.get("response_format"), f"{path}: response_format")
    return Conversation(data["messages"], data.get("tools"), data.get("response_format"))


def read_messages(raw: object, where: str = "messages") -> list[Message]:
    """Check a list of messages and match each tool result with its call."""
    if not isinstance(raw, list) or not raw:
        raise BadInput(
            "must be a list of at least one message",
            where=where,
            fix='write [{"role": "user", "content": "..."}]',
        )
    messages: list[Message] = []
    waiting: dict[int, str | None] = {}  # The latest assistant's calls that have no result: ids by position.
    for index, item in enumerate(raw):
        message = _read_message(item, f"{where}[{index}]", waiting)
        if message.role == "assistant":
            waiting = {position: call.id for position, call in enumerate(message.calls)}
        messages.append(message)
    return messages


def read_tools(raw: object, where: str) -> tuple[dict[str, Any], ...]:
    """The function descriptions in an OpenAI `tools` list; none if it is null or empty."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadInput(f"must be a list, not {kind(raw)}", where=where, fix=_TOOL_FIX)
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadInput("is not a function with a name", where=f"{where}[{index}]", fix=_TOOL_FIX)
        functions.append(function)
    return tuple(functions)


def read_response_format(raw: object, where: str) -> dict[str, Any] | None:
    """The JSON schema of a reply; None if it is null or empty."""
    if raw is not None and not isinstance(raw, dict):
        raise BadInput(f"must be an object, not {kind(raw)}", where=where, fix="give it a JSON schema")
    return raw or None


def _read_message(item: object, where: str, waiting: dict[int, str | None]) -> Message:
    if not isinstance(item, dict):
        raise BadInput(
            f"a message must be an object, not {kind(item)}",
            where=where,
            fix='write {"role": "user", "content": "..."}',
        )
    role = item.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise BadInput(f"unknown role {role!r}", where=where, fix=f"use one of {', '.join(_FIELDS)}")
    for field, value in item.items():
        # Null and empty fields are common in messages that a program wrote, and mean nothing.
        if value and field not in _FIELDS[role] | _NOT_ENCODED:
            raise BadInput(
                f"a message of role {role} has no field {field!r}",
                where=where,
                fix=f"remove it; the fields are {', '.join(sorted(_FIELDS[role]))}",
            )
    calls = _read_calls(item.get("tool_calls"), f"{where}.tool_calls")
    content = _text(item, "content", where, optional=bool(calls))
    if role == "developer" and not content:
        raise BadInput("a developer message must not be empty", where=where, fix="give it content")
    task = item.get("task")
    if task is not None and task not in TASKS:
        raise BadInput(f"unknown task {task!r}", where=where, fix=f"use one of {', '.join(TASKS)}")
    return Message(
        where,
        role,
        content,
        reasoning=_text(item, "reasoning_content", where, optional=True),
        calls=calls,
        answers=_match_call(item, where, waiting) if role == "tool" else 0,
        tools=read_tools(item.get("tools"), f"{where}.tools"),
        response_format=read_response_format(item.get("response_format"), f"{where}.response_format"),
        task=task,
    )


def _read_calls(raw: object, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadInput(f"must be a list, not {kind(raw)}", where=where, fix=f"in the list, {_CALL_FIX}")
    return tuple(_read_call(call, f"{where}[{index}]") for index, call in enumerate(raw))


def _read_call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise BadInput("is not a function call", where=where, fix=_CALL_FIX)
    name = _text(function, "name", f"{where}.function")
    source = _text(function, "arguments", f"{where}.function")
    arguments = json_value(source, f"{where}.function.arguments")
    if not isinstance(arguments, dict):
        raise BadInput(
            f"must be the JSON text of an object, not of {kind(arguments)}",
            where=f"{where}.function.arguments",
            fix='write "{}" for a call without arguments',
        )
    json_text(arguments, f"{where}.function.arguments")  # An escape in the JSON may hide a surrogate.
    for text in (name, *arguments):
        if not text or '"' in text:
            raise BadInput(
                f"the name {text!r} cannot be written in a tool call",
                where=where,
                fix="use names that are not empty and have no quotation mark",
            )
    return ToolCall(name, arguments, _text(call, "id", where, optional=True) or None)


def _match_call(item: dict[str, Any], where: str, waiting: dict[int, str | None]) -> int:
    """Take the call that a tool result answers out of `waiting`.

    Calls without an id are answered in their order by results without one.
    """
    wanted = _text(item, "tool_call_id", where, optional=True) or None
    for position, call_id in waiting.items():
        if call_id == wanted:
            del waiting[position]
            return position
    ids = ", ".join(repr(call_id) for call_id in waiting.values() if call_id) or "none"
    raise BadInput(
        f"this tool result (tool_call_id {wanted!r}) answers no open call of the assistant before it",
        where=where,
        fix=f"give tool_call_id the id of such a call (open ids: {ids}), or remove the message",
    )


def _text(item: dict[str, Any], key: str, where: str, *, optional: bool = False) -> str:
    value = item.get(key)
    if value is None and optional:
        return ""
    if value is None:
        raise BadInput(f"`{key}` is missing", where=where, fix=f"give it `{key}`, a string")
    if not isinstance(value, str):
        raise BadInput(
            f"`{key}` must be a string, not {kind(value)}", where=where, fix="write it as one string"
        )
    return check_text(value, f"{where}.{key}")
