"""From the text of a completion back to an assistant message."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from rewright.ir.errors import BadInput
from rewright.runtime.chat import DSML, EOS, THINK_END
from rewright.runtime.strict_json import json_text, json_value

_BLOCK_START = f"\n\n<{DSML}tool_calls>"
_BLOCK_END = re.compile(rf"\s*</{DSML}tool_calls>")
_INVOKE = re.compile(rf'\s*<{DSML}invoke name="([^"]+)">')
_INVOKE_END = re.compile(rf"\s*</{DSML}invoke>")
_PARAMETER = re.compile(
    rf'\s*<{DSML}parameter name="([^"]+)" string="(true|false)">(.*?)</{DSML}parameter>', re.DOTALL
)

_WHERE = "completion"
_SHOWN_CHARS = 60


def parse_completion(text: str, *, thinking: bool) -> dict[str, Any]:
    """The assistant message that a completion stands for, in the shape of the OpenAI chat API.

    It has `reasoning_content` in thinking mode and `tool_calls`, with ids, if there are any. A
    completion that stops before the end of its reasoning is all reasoning, with empty content.

    Args:
        text: what followed the prompt; EOS at its end is optional.
        thinking: whether the prompt was encoded in thinking mode.

    Raises:
        BadInput: the text goes on after EOS, or has a tool-call block that is not well formed,
            not closed, or not at the end.
    """
    body = text.removesuffix(EOS)
    if EOS in body:
        raise BadInput(
            "the text goes on after its end mark", where=_WHERE, fix=f"cut it after the first {EOS}"
        )
    message: dict[str, Any] = {"role": "assistant"}
    if thinking:
        reasoning, _, body = body.partition(THINK_END)
        if DSML in reasoning:
            _malformed("no tool call inside the reasoning", reasoning, reasoning.index(DSML))
        message["reasoning_content"] = reasoning
    content, block, calls = body.partition(_BLOCK_START)
    if DSML in content:
        _malformed("an empty line and the start of a tool-call block", content, content.index(DSML))
    message["content"] = content
    if block:
        message["tool_calls"] = _parse_calls(calls)
    return message


def _parse_calls(text: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    position = 0
    while not (end := _BLOCK_END.match(text, position)):
        invoke = _INVOKE.match(text, position)
        if not invoke:
            _malformed("a call, or the end of the block", text, position)
        arguments, position = _parse_arguments(text, invoke.end())
        function = {"name": invoke[1], "arguments": arguments}
        calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
    if not calls:
        _malformed("at least one call", text, position)
    if end.end() != len(text):
        _malformed("nothing after the block", text, end.end())
    return calls


def _parse_arguments(text: str, position: int) -> tuple[str, int]:
    """The arguments of a call as JSON text, and where the call ends."""
    arguments: dict[str, str] = {}
    while not (end := _INVOKE_END.match(text, position)):
        parameter = _PARAMETER.match(text, position)
        if not parameter or DSML in parameter[3]:
            _malformed("a complete parameter, or the end of the call", text, position)
        name, is_string, value = parameter.groups()
        if name in arguments:
            _malformed(f"the parameter {name!r} once only", text, position)
        where = f"{_WHERE}, parameter {name!r}"
        if is_string == "true":
            value = json_text(value, where)
        else:
            json_text(json_value(value, where), where)  # An escape in the JSON may hide a surrogate.
        arguments[name] = f"{json_text(name, where)}: {value}"
        position = parameter.end()
    return "{" + ", ".join(arguments.values()) + "}", end.end()


def _malformed(expected: str, text: str, position: int) -> NoReturn:
    found = text[position : position + _SHOWN_CHARS]
    raise BadInput(
        f"malformed tool calls: expected {expected}, found {repr(found) if found else 'the end'}",
        where=_WHERE,
        fix="use the text as it is, or generate again (with a larger token limit if it was cut off)",
    )
