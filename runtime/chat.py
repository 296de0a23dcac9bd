"""The chat format of DeepSeek-V4: from messages to the text of a prompt.

Control tokens are written as text, BOS included, and the tokenizer turns them into ids. The long
fixed texts come from the checkpoint; without them everything else still works.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rewright.ir.errors import BadInput
from rewright.runtime.messages import TASKS, Message, read_messages, read_response_format, read_tools
from rewright.runtime.strict_json import json_text

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"

_PAD = "<｜▁pad▁｜>"
_USER = "<｜User｜>"
_ASSISTANT = "<｜Assistant｜>"
_LATEST_REMINDER = "<｜latest_reminder｜>"
_TASK_TOKENS = {task: f"<｜{task}｜>" for task in TASKS}
_CONTROL_TOKENS = (
    *(BOS, EOS, _PAD, _USER, _ASSISTANT, THINK_START, THINK_END, DSML, _LATEST_REMINDER),
    *_TASK_TOKENS.values(),
)

_EFFORTS = ("high", "max")


def control_tokens_in(text: str) -> list[str]:
    """The control tokens that a text would turn into, each once."""
    return [token for token in _CONTROL_TOKENS if token in text]


class ChatEncoder:
    """Writes prompts for one checkpoint.

    Args:
        constants: the checkpoint's fixed texts by name; None if it ships none.
    """

    def __init__(self, constants: Mapping[str, str] | None):
        self._constants = dict(constants or {})

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        response_format: dict[str, Any] | None = None,
        drop_reasoning: bool = True,
    ) -> str:
        """The prompt for `messages`, in the shape of the OpenAI chat API.

        It ends where the assistant goes on if the last message is a user's, a tool's or a
        developer's; a conversation that ends otherwise is written as it is.

        Args:
            messages: roles system, developer, user, assistant, tool and latest_reminder. A `task`
                on a message that is last, or before the assistant's, asks for a short answer of
                that kind.
            thinking: let the model reason before it answers.
            effort: `high` (as the model was trained) or `max`; in thinking mode only.
            tools: functions for the first system or developer message. A message may also hold
                `tools` of its own.
            response_format: a JSON schema for the reply, placed like `tools`.
            drop_reasoning: in thinking mode, leave out the reasoning and the developer messages
                before the last user turn. All of it is kept if any tools are defined.

        Raises:
            BadInput: a message or an option is malformed, would have no effect, or needs a fixed
                text that the checkpoint does not supply.
        """
        if effort is not None and effort not in _EFFORTS:
            raise BadInput(f"unknown effort {effort!r}", fix=f"use one of {', '.join(_EFFORTS)}")
        if effort is not None and not thinking:
            raise BadInput(
                f"effort {effort!r} has no meaning in chat mode", fix="turn thinking on, or leave it out"
            )
        turns = _merge_user_turns(_attach(read_messages(messages), tools, response_format))
        drop = thinking and drop_reasoning and not any(turn.tools for turn in turns)
        past, current = _split_at_last_user(turns) if drop else ([], turns)
        turns = _without_developers(past) + current

        prompt = [BOS]
        if effort == "max":
            prompt.append(self._constant("REASONING_EFFORT_MAX", "maximum effort"))
        reasoning_from = len(turns) - len(current) if thinking else len(turns)
        previous: Message | None = None
        for index, turn in enumerate(turns):
            following = turns[index + 1] if index + 1 < len(turns) else None
            reasons = index >= reasoning_from
            after_task = previous is not None and previous.task is not None
            prompt.append(self._turn(turn, reasons and not after_task))
            prompt.append(_handover(turn, following, thinking, reasons))
            previous = turn
        return "".join(prompt)

    def _turn(self, turn: Message, reasons: bool) -> str:
        match turn.role:
            case "system":
                return self._instructions(turn)
            case "developer":
                return _USER + self._instructions(turn)
            case "user":
                return _USER + turn.content
            case "latest_reminder":
                return _LATEST_REMINDER + turn.content
        reasoning = turn.reasoning + THINK_END if reasons else ""
        return reasoning + turn.content + _tool_calls(turn) + EOS

    def _instructions(self, turn: Message) -> str:
        """The content of a system or developer message, its tools, and the form of the reply."""
        sections = [turn.content]
        if turn.tools:
            values = {
                "tool_schemas": "\n".join(json_text(tool, f"{turn.where}.tools") for tool in turn.tools),
                "dsml_token": DSML,
                "thinking_start_token": THINK_START,
                "thinking_end_token": THINK_END,
            }
            sections.append(_fill(self._constant("TOOLS_TEMPLATE", "a list of tools"), values))
        if turn.response_format is not None:
            schema = json_text(turn.response_format, f"{turn.where}.response_format")
            template = self._constant("response_format_template", "a response format")
            sections.append(_fill(template, {"schema": schema}))
        return "\n\n".join(sections)

    def _constant(self, name: str, need: str) -> str:
        if name not in self._constants:
            raise BadInput(
                f"{need} needs the fixed text {name}, and the checkpoint does not supply it",
                fix=f"put the release's encoding/encoding_dsv4.py, which defines {name}, into the checkpoint "
                "folder and compile again",
            )
        return self._constants[name]


def _attach(
    messages: list[Message], tools: list[dict[str, Any]] | None, response_format: dict[str, Any] | None
) -> list[Message]:
    """Give the first system or developer message, or a new one, what stands beside the messages."""
    functions = read_tools(tools, "tools")
    schema = read_response_format(response_format, "response_format")
    if not functions and schema is None:
        return messages
    hosts = [index for index, message in enumerate(messages) if message.role in ("system", "developer")]
    if not hosts:
        return [Message("messages", "system", "", tools=functions, response_format=schema), *messages]
    host = messages[hosts[0]]
    for field, own, given in (
        ("tools", host.tools, functions),
        ("response_format", host.response_format, schema),
    ):
        if own and given:
            raise BadInput(
                f"`{field}` is given in this message and beside the messages",
                where=host.where,
                fix="keep one of the two",
            )
    host = replace(
        host,
        tools=host.tools or functions,
        response_format=host.response_format if schema is None else schema,
    )
    return [*messages[: hosts[0]], host, *messages[hosts[0] + 1 :]]


def _merge_user_turns(messages: list[Message]) -> list[Message]:
    """Make one user turn of consecutive user messages and tool results; a task ends the turn."""
    runs: list[list[Message]] = []
    for message in messages:
        last = runs[-1][-1] if runs else None
        if last and last.task is None and {last.role, message.role} <= {"user", "tool"}:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_user_turn(run) if run[0].role in ("user", "tool") else run[0] for run in runs]


def _user_turn(run: list[Message]) -> Message:
    """The messages as one; tool results trade places until they stand as the calls were made."""
    results = iter(sorted((m for m in run if m.role == "tool"), key=lambda m: m.answers))
    parts = [
        f"<tool_result>{next(results).content}</tool_result>" if m.role == "tool" else m.content for m in run
    ]
    return replace(run[-1], role="user", content="\n\n".join(parts))


def _split_at_last_user(turns: list[Message]) -> tuple[list[Message], list[Message]]:
    users = [index for index, turn in enumerate(turns) if turn.role in ("user", "developer")]
    last = users[-1] if users else 0
    return turns[:last], turns[last:]


def _without_developers(turns: list[Message]) -> list[Message]:
    for turn in turns:
        if turn.role == "developer" and turn.response_format is not None:
            raise BadInput(
                "the response_format would be lost: a developer message before the last user message is "
                "dropped with the earlier reasoning",
                where=turn.where,
                fix="put it on a system message, or keep the reasoning",
            )
    return [turn for turn in turns if turn.role != "developer"]


def _handover(turn: Message, following: Message | None, thinking: bool, reasons: bool) -> str:
    """What stands between a turn and the assistant's answer to it."""
    answered_next = following is None or following.role in ("assistant", "latest_reminder")
    if turn.task is not None and not answered_next:
        raise BadInput(
            f"task {turn.task!r} is on a message that is neither last nor before the assistant's",
            where=turn.where,
            fix="move the task to the message that it is about, or remove it",
        )
    if turn.task == "action":
        return _ASSISTANT + (THINK_START if thinking else THINK_END) + _TASK_TOKENS["action"]
    if turn.task is not None:
        return _TASK_TOKENS[turn.task]
    if answered_next and turn.role in ("user", "developer"):
        return _ASSISTANT + (THINK_START if reasons else THINK_END)
    return ""


def _tool_calls(turn: Message) -> str:
    if not turn.calls:
        return ""
    lines: list[str] = []
    for call in turn.calls:
        parameters = [
            f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else json_text(value, turn.where)}</{DSML}parameter>"
            for name, value in call.arguments.items()
        ]
        # A call without arguments has an empty line where they would stand.
        lines += [f'<{DSML}invoke name="{call.name}">', *(parameters or [""]), f"</{DSML}invoke>"]
    return "\n\n" + "\n".join([f"<{DSML}tool_calls>", *lines, f"</{DSML}tool_calls>"])


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace placeholders as text, in one pass: what is put in is not searched again."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)
