"""The chat format: every rule of the encoder on vectors of our own, and every refusal in words."""

import json
from pathlib import Path

import pytest

from rewright.frontend.chat_constants import read_chat_constants
from rewright.ir.errors import BadInput
from rewright.runtime.chat import ChatEncoder, control_tokens_in
from rewright.runtime.chat_parse import parse_completion
from rewright.runtime.messages import load_messages

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
U, A, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"

CONSTANTS = {
    "TOOLS_TEMPLATE": "Tools ({dsml_token}, {thinking_start_token}{thinking_end_token}):\n"
    "{tool_schemas}\nEnd.",
    "REASONING_EFFORT_MAX": "Try hard.\n\n",
    "response_format_template": "Schema: {schema}",
}


def system(content, **more):
    return {"role": "system", "content": content, **more}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def developer(content, **more):
    return {"role": "developer", "content": content, **more}


def reminder(content):
    return {"role": "latest_reminder", "content": content}


def assistant(content, reasoning=None, calls=None, **more):
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": calls,
        **more,
    }


def call(name, arguments="{}", call_id=None):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, call_id=None, **more):
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


def tools_text(*schemas):
    return "\n".join(["Tools (｜DSML｜, <think></think>):", *schemas, "End."])


def calls_text(*lines):
    return "\n".join(["\n\n<｜DSML｜tool_calls>", *lines, "</｜DSML｜tool_calls>"])


def encode(messages, constants=CONSTANTS, **options):
    return ChatEncoder(constants).encode(messages, **options)


THREE_TURNS = [
    user("1"),
    assistant("one", "r1"),
    user("2"),
    assistant("two", "r2"),
    user("3"),
]


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([user("hi")], {}, f"{U}hi{A}</think>"),
        ([user("hi")], {"thinking": True}, f"{U}hi{A}<think>"),
        ([user("")], {}, f"{U}{A}</think>"),
        ([user("  \n")], {}, f"{U}  \n{A}</think>"),
        ([system("Be kind."), user("hi")], {}, f"Be kind.{U}hi{A}</think>"),
        ([system("Be kind.")], {}, "Be kind."),
        ([user("a"), user("b")], {}, f"{U}a\n\nb{A}</think>"),
        ([user("hi"), system("Note."), user("ho")], {}, f"{U}hiNote.{U}ho{A}</think>"),
        ([user("hi"), assistant("yo", "r")], {}, f"{U}hi{A}</think>yo{EOS}"),
        ([user("hi"), assistant("yo", "r")], {"thinking": True}, f"{U}hi{A}<think>r</think>yo{EOS}"),
        ([user("hi"), assistant("yo")], {"thinking": True}, f"{U}hi{A}<think></think>yo{EOS}"),
        ([system("s"), assistant("yo", "r")], {"thinking": True}, f"sr</think>yo{EOS}"),
        (THREE_TURNS, {}, f"{U}1{A}</think>one{EOS}{U}2{A}</think>two{EOS}{U}3{A}</think>"),
        (THREE_TURNS, {"thinking": True}, f"{U}1{A}</think>one{EOS}{U}2{A}</think>two{EOS}{U}3{A}<think>"),
        (
            THREE_TURNS,
            {"thinking": True, "drop_reasoning": False},
            f"{U}1{A}<think>r1</think>one{EOS}{U}2{A}<think>r2</think>two{EOS}{U}3{A}<think>",
        ),
    ],
)
def test_conversations(messages, options, expected):
    assert encode(messages, None, **options) == BOS + expected


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        # Developers are user turns, and go with the reasoning that is dropped.
        ([developer("d")], {}, f"{U}d{A}</think>"),
        ([developer("d"), user("u")], {}, f"{U}d{U}u{A}</think>"),
        ([developer("d"), user("u")], {"thinking": True}, f"{U}u{A}<think>"),
        ([user("u"), developer("d")], {"thinking": True}, f"{U}u{U}d{A}<think>"),
        ([developer("d"), user("u")], {"thinking": True, "drop_reasoning": False}, f"{U}d{U}u{A}<think>"),
        (
            [user("u"), assistant("a", "r"), developer("d"), assistant("b", "s")],
            {"thinking": True},
            f"{U}u{A}</think>a{EOS}{U}d{A}<think>s</think>b{EOS}",
        ),
        (
            [developer("d"), assistant("a", "r"), user("u")],
            {"thinking": True},
            f"a{EOS}{U}u{A}<think>",
        ),
        ([reminder("Monday"), user("hi")], {}, f"{REMINDER}Monday{U}hi{A}</think>"),
        ([user("hi"), reminder("Monday")], {"thinking": True}, f"{U}hi{A}<think>{REMINDER}Monday"),
        (
            [user("a"), reminder("Monday"), user("b")],
            {"thinking": True},
            f"{U}a{A}</think>{REMINDER}Monday{U}b{A}<think>",
        ),
    ],
)
def test_developer_and_reminder(messages, options, expected):
    assert encode(messages, None, **options) == BOS + expected


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
@pytest.mark.parametrize("thinking", [False, True])
def test_task_after_a_message(task, thinking):
    messages = [user("hi", task=task), assistant("answer", "unused")]
    expected = f"{BOS}{U}hi<｜{task}｜>"
    assert encode(messages[:1], None, thinking=thinking) == expected
    assert encode(messages, None, thinking=thinking) == f"{expected}answer{EOS}"


@pytest.mark.parametrize(("thinking", "mark"), [(False, "</think>"), (True, "<think>")])
def test_action_follows_the_think_mark(thinking, mark):
    messages = [user("hi", task="action"), assistant("Search")]
    expected = f"{BOS}{U}hi{A}{mark}<｜action｜>Search{EOS}"
    assert encode(messages, None, thinking=thinking) == expected
    later = encode([*messages, user("ho")], None, thinking=thinking)
    assert later == f"{expected}{U}ho{A}{mark}"


def test_title_after_an_answer():
    messages = [user("hi"), assistant("yo", "r", task="title"), assistant("A greeting")]
    expected = f"{BOS}{U}hi{A}<think>r</think>yo{EOS}<｜title｜>A greeting{EOS}"
    assert encode(messages, None, thinking=True) == expected


def test_a_task_ends_a_merged_turn():
    messages = [user("a"), user("b", task="query")]
    assert encode(messages, None) == f"{BOS}{U}a\n\nb<｜query｜>"


@pytest.mark.parametrize(
    "messages", [[user("a", task="query"), user("b")], [system("a", task="title"), user("b")]]
)
def test_a_task_without_effect_is_refused(messages):
    with pytest.raises(BadInput, match=r"messages\[0\]: task .* neither last nor before"):
        encode(messages, None)


def test_effort():
    prompt = f"{U}hi{A}<think>"
    for effort, preamble in ((None, ""), ("high", ""), ("max", "Try hard.\n\n")):
        assert encode([user("hi")], thinking=True, effort=effort) == BOS + preamble + prompt
    assert encode([user("hi")], None, thinking=True, effort="high") == BOS + prompt
    with pytest.raises(BadInput, match="unknown effort 'low'"):
        encode([user("hi")], thinking=True, effort="low")
    with pytest.raises(BadInput, match="effort 'max' has no meaning in chat mode"):
        encode([user("hi")], effort="max")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"thinking": True, "effort": "max"}, "REASONING_EFFORT_MAX"),
        ({"tools": [tool("f")]}, "TOOLS_TEMPLATE"),
        ({"response_format": {"type": "object"}}, "response_format_template"),
    ],
)
def test_a_text_that_the_checkpoint_lacks(options, name):
    others = {key: text for key, text in CONSTANTS.items() if key != name}
    for constants in (None, others):
        with pytest.raises(BadInput, match=name) as caught:
            encode([user("hi")], constants, **options)
        assert "encoding/encoding_dsv4.py" in str(caught.value)
    encode([user("hi")], {name: CONSTANTS[name]}, **options)


def test_tools_in_their_places():
    tools = [tool("f", description="größer", parameters={"type": "object"}), tool("g")]
    text = tools_text(
        '{"name": "f", "description": "größer", "parameters": {"type": "object"}}', '{"name": "g"}'
    )
    tail = f"{U}u{A}</think>"
    assert encode([user("u")], tools=tools) == f"{BOS}\n\n{text}{tail}"
    assert encode([system("s"), user("u")], tools=tools) == f"{BOS}s\n\n{text}{tail}"
    assert encode([system("s", tools=tools), user("u")]) == f"{BOS}s\n\n{text}{tail}"
    assert encode([developer("d"), system("s"), user("u")], tools=tools) == f"{BOS}{U}d\n\n{text}s{tail}"
    assert encode([user("u")], None, tools=[]) == BOS + tail


def test_response_format_follows_the_tools():
    schema = {"type": "object", "title": "é"}
    expected = (
        f'{BOS}s\n\n{tools_text(json.dumps({"name": "f"}))}\n\nSchema: {{"type": "object", "title": "é"}}'
    )
    tail = f"{U}u{A}</think>"
    messages = [system("s"), user("u")]
    assert encode(messages, tools=[tool("f")], response_format=schema) == expected + tail
    messages = [system("s", response_format=schema), user("u")]
    assert encode(messages, tools=[tool("f")]) == expected + tail
    assert encode([user("u")], response_format=schema).startswith(f"{BOS}\n\nSchema: ")
    assert encode([developer("d")], response_format={"a": 1}) == f'{BOS}{U}d\n\nSchema: {{"a": 1}}{A}</think>'
    assert encode([user("u")], None, response_format={}) == BOS + tail


def test_a_response_format_is_not_dropped_with_its_developer():
    messages = [developer("d"), user("u")]
    with pytest.raises(BadInput, match=r"messages\[0\]: the response_format would be lost"):
        encode(messages, thinking=True, response_format={"type": "object"})
    kept = encode(messages, thinking=True, drop_reasoning=False, response_format={"type": "object"})
    assert "Schema: " in kept


@pytest.mark.parametrize("field", ["tools", "response_format"])
def test_given_twice(field):
    value = {"tools": [tool("f")], "response_format": {"type": "object"}}[field]
    with pytest.raises(BadInput, match=rf"messages\[1\]: `{field}` is given in this message and beside"):
        encode([user("u"), system("s", **{field: value})], **{field: value})


def test_inserted_text_is_not_searched_for_placeholders():
    tools = [tool("f", description="{dsml_token} {tool_schemas} {schema} {other} \\1")]
    prompt = encode([user("{schema}")], tools=tools, response_format={"title": "{schema} {tool_schemas}"})
    text = tools_text('{"name": "f", "description": "{dsml_token} {tool_schemas} {schema} {other} \\\\1"}')
    schema = 'Schema: {"title": "{schema} {tool_schemas}"}'
    assert prompt == f"{BOS}\n\n{text}\n\n{schema}{U}{{schema}}{A}</think>"


def test_other_braces_of_a_text_stay():
    prompt = encode(
        [user("u")], {"response_format_template": "{} {0} {{}} {schema}"}, response_format={"a": 1}
    )
    assert prompt == f'{BOS}\n\n{{}} {{0}} {{{{}}}} {{"a": 1}}{U}u{A}</think>'


def test_tools_keep_all_reasoning():
    messages = [system("", tools=[tool("f")]), developer("d"), assistant("a", "r"), user("u")]
    tail = f"{U}d{A}<think>r</think>a{EOS}{U}u{A}<think>"
    assert encode(messages, thinking=True) == f"{BOS}\n\n{tools_text(json.dumps({'name': 'f'}))}{tail}"


def test_tool_calls():
    arguments = {
        "text": 'a "b"\n<c> é',
        "count": 3,
        "on": True,
        "none": None,
        "list": [1, "é"],
        "object": {"k": 1.5},
        "empty": "",
    }
    messages = [
        user("u"),
        assistant("Wait.", "r", [call("f", json.dumps(arguments)), call("g")]),
    ]
    expected = calls_text(
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="text" string="true">a "b"\n<c> é</｜DSML｜parameter>',
        '<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>',
        '<｜DSML｜parameter name="on" string="false">true</｜DSML｜parameter>',
        '<｜DSML｜parameter name="none" string="false">null</｜DSML｜parameter>',
        '<｜DSML｜parameter name="list" string="false">[1, "é"]</｜DSML｜parameter>',
        '<｜DSML｜parameter name="object" string="false">{"k": 1.5}</｜DSML｜parameter>',
        '<｜DSML｜parameter name="empty" string="true"></｜DSML｜parameter>',
        "</｜DSML｜invoke>",
        '<｜DSML｜invoke name="g">',
        "",
        "</｜DSML｜invoke>",
    )
    assert encode(messages, None) == f"{BOS}{U}u{A}</think>Wait.{expected}{EOS}"
    thinking = encode(messages, None, thinking=True)
    assert thinking == f"{BOS}{U}u{A}<think>r</think>Wait.{expected}{EOS}"
    parsed = parse_completion(thinking.split("<think>")[1], thinking=True)
    assert [json.loads(c["function"]["arguments"]) for c in parsed["tool_calls"]] == [arguments, {}]
    assert encode([user("u"), parsed], None, thinking=True) == thinking


def test_tool_calls_may_stand_for_content():
    message = assistant(None, calls=[call("f")])
    block = calls_text('<｜DSML｜invoke name="f">', "", "</｜DSML｜invoke>")
    assert encode([user("u"), message], None) == f"{BOS}{U}u{A}</think>{block}{EOS}"


def after_calls(*messages, calls=(("f", "x"), ("g", "y"), ("h", "z"))):
    """What the encoder writes after an assistant's calls."""
    start = [user("u"), assistant("", calls=[call(name, call_id=call_id) for name, call_id in calls])]
    return encode([*start, *messages], None).removeprefix(encode(start, None))


@pytest.mark.parametrize(
    ("messages", "turn"),
    [
        ([result("1", "x")], "<tool_result>1</tool_result>"),
        (
            [result("3", "z"), result("1", "x"), result("2", "y")],
            "<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>\n\n<tool_result>3</tool_result>",
        ),
        (
            [result("2", "y"), user("and"), result("1", "x"), user("so?")],
            "<tool_result>1</tool_result>\n\nand\n\n<tool_result>2</tool_result>\n\nso?",
        ),
        ([result("", "x", name="f")], "<tool_result></tool_result>"),
    ],
)
def test_tool_results(messages, turn):
    assert after_calls(*messages) == f"{U}{turn}{A}</think>"


def test_tool_results_without_ids_answer_in_order():
    results = [result("1"), result("2")]
    expected = f"{U}<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>{A}</think>"
    assert after_calls(*results, calls=[("f", None), ("g", None)]) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [result("1", "w")],
        [result("1")],
        [result("1", "x"), result("2", "x")],
        [result("1", "x"), assistant("done"), result("2", "y")],
    ],
    ids=["unknown-id", "no-id", "answered-twice", "assistant-went-on"],
)
def test_tool_result_without_a_call(messages):
    at = 1 + len(messages)
    with pytest.raises(BadInput, match=rf"messages\[{at}\]: this tool result .* answers no open call"):
        after_calls(*messages)


def test_tool_result_error_names_the_open_ids():
    with pytest.raises(BadInput, match=r"open ids: 'y', 'z'"):
        after_calls(result("1", "x"), result("2", "x"))


def test_tool_results_are_a_user_turn_for_dropping():
    messages = [user("u"), assistant("", "r", [call("f")]), result("1"), assistant("a", "s")]
    block = calls_text('<｜DSML｜invoke name="f">', "", "</｜DSML｜invoke>")
    tail = f"{U}<tool_result>1</tool_result>{A}<think>s</think>a{EOS}"
    assert encode(messages, None, thinking=True) == f"{BOS}{U}u{A}</think>{block}{EOS}{tail}"


def test_the_callers_messages_are_left_alone():
    messages = [system("s"), user("u"), assistant("a", "r"), user("v")]
    before = json.dumps(messages)
    encode(messages, thinking=True, tools=[tool("f")])
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("hi", "must be an object, not a string"),
        (None, "must be an object, not null"),
        ({"content": "x"}, "unknown role None"),
        ({"role": "bot", "content": "x"}, "unknown role 'bot'"),
        ({"role": ["user"], "content": "x"}, "unknown role"),
        ({"role": "user"}, "`content` is missing"),
        (system(None), "`content` is missing"),
        (assistant(None), "`content` is missing"),
        (assistant(None, "r", []), "`content` is missing"),
        (reminder(None), "`content` is missing"),
        (developer(""), "must not be empty"),
        (user(3), "`content` must be a string, not a number"),
        (user(True), "`content` must be a string, not a boolean"),
        (user([{"type": "text", "text": "x"}]), "`content` must be a string, not a list"),
        (assistant("x", {"a": 1}), "`reasoning_content` must be a string, not an object"),
        (user("x", task="sum"), "unknown task 'sum'"),
        (user("x", task=["title"]), "unknown task"),
        (user("x", tools=[tool("f")]), "a message of role user has no field 'tools'"),
        (assistant("x", thoughts="r"), "a message of role assistant has no field 'thoughts'"),
        (user("\ud83d"), r"content: character 0 is half of a surrogate pair \(U\+D83D\)"),
        (assistant("x", "ab\udc00"), "reasoning_content: character 2 is half of a surrogate pair"),
        (system("x", tools={"f": 1}), "tools: must be a list, not an object"),
        (system("x", tools=[{"name": "f"}]), r"tools\[0\]: is not a function with a name"),
        (system("x", tools=[tool("f"), tool(3)]), r"tools\[1\]: is not a function with a name"),
        (system("x", tools=["f"]), r"tools\[0\]: is not a function with a name"),
        (system("x", tools=[tool("f\ud800")]), r"tools: character \d+ is half of a surrogate pair"),
        (system("x", tools=[tool("f", limit=float("nan"))]), "tools: cannot be written as JSON"),
        (system("x", response_format="json"), "response_format: must be an object, not a string"),
        (assistant("x", calls={"f": 1}), "tool_calls: must be a list, not an object"),
        (assistant("x", calls=["f"]), r"tool_calls\[0\]: is not a function call"),
        (assistant("x", calls=[{"function": "f"}]), r"tool_calls\[0\]: is not a function call"),
        (assistant("x", calls=[{"function": {"name": "f"}}]), "`arguments` is missing"),
        (assistant("x", calls=[call(None)]), "`name` is missing"),
        (assistant("x", calls=[call("f", {"a": 1})]), "`arguments` must be a string, not an object"),
        (assistant("x", calls=[call("f", "")]), "arguments: not valid JSON"),
        (assistant("x", calls=[call("f", "{'a': 1}")]), "arguments: not valid JSON"),
        (assistant("x", calls=[call("f", '{"a": NaN}')]), "arguments: not valid JSON: NaN"),
        (assistant("x", calls=[call("f", '{"a": 1e999}')]), "arguments: cannot be written as JSON"),
        (assistant("x", calls=[call("f", "[" * 100_000)]), "arguments: not valid JSON"),
        (assistant("x", calls=[call("f", "[1]")]), "must be the JSON text of an object, not of a list"),
        (assistant("x", calls=[call("f", '{"a": "\\ud800"}')]), "arguments: character 7 is half"),
        (assistant("x", calls=[call("f", '{"a\\"": 1}')]), "cannot be written in a tool call"),
        (assistant("x", calls=[call('f"')]), "cannot be written in a tool call"),
        (assistant("x", calls=[call("")]), "the name '' cannot be written in a tool call"),
        (assistant("x", calls=[call("f", call_id=7)]), "`id` must be a string, not a number"),
        (result(None, "x"), "`content` is missing"),
        (result("1", 7), "`tool_call_id` must be a string, not a number"),
    ],
)
def test_malformed_message(message, problem):
    with pytest.raises(BadInput, match=problem) as caught:
        encode([user("hi"), message])
    assert caught.value.where is not None
    assert caught.value.where.startswith("messages[1]")
    assert caught.value.fix


def test_empty_and_unencoded_fields_are_accepted():
    message = user("hi", name="Ada", mask=1, refusal=None, annotations=[], tool_calls=None, tools=[])
    assert encode([message], None) == f"{BOS}{U}hi{A}</think>"


@pytest.mark.parametrize("messages", [[], {}, "hi", None])
def test_no_messages(messages):
    with pytest.raises(BadInput, match="messages: must be a list of at least one message"):
        encode(messages)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": {}}, "tools: must be a list, not an object"),
        ({"tools": [{}]}, r"tools\[0\]: is not a function with a name"),
        ({"response_format": [1]}, "response_format: must be an object, not a list"),
    ],
)
def test_malformed_options(options, problem):
    with pytest.raises(BadInput, match=problem):
        encode([user("hi")], **options)


# Completions


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("Hello.", False, {"content": "Hello."}),
        (f"Hello.{EOS}", False, {"content": "Hello."}),
        ("", False, {"content": ""}),
        ("why</think>Hello.", True, {"reasoning_content": "why", "content": "Hello."}),
        (f"</think>Hello.{EOS}", True, {"reasoning_content": "", "content": "Hello."}),
        ("why, and", True, {"reasoning_content": "why, and", "content": ""}),
        ("a</think>b</think>c", True, {"reasoning_content": "a", "content": "b</think>c"}),
    ],
)
def test_parse_plain(text, thinking, expected):
    assert parse_completion(text, thinking=thinking) == {"role": "assistant", **expected}


def test_parse_tool_calls():
    text = "Wait." + calls_text(
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="a" string="true"> 1\n"é" </｜DSML｜parameter>',
        '<｜DSML｜parameter name="b" string="false">[1.0, {"c": null}]</｜DSML｜parameter>',
        "</｜DSML｜invoke>",
        '<｜DSML｜invoke name="g">',
        "</｜DSML｜invoke>",
    )
    arguments = '{"a": " 1\\n\\"é\\" ", "b": [1.0, {"c": null}]}'
    expected = {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [call("f", arguments, "call_0"), call("g", "{}", "call_1")],
    }
    assert parse_completion(text, thinking=False) == expected
    assert parse_completion(text + EOS, thinking=False) == expected


INVOKE, INVOKE_END = '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"
ONE, TWO = (f'<｜DSML｜parameter name="a" string="false">{n}</｜DSML｜parameter>' for n in (1, 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (calls_text(INVOKE, ONE, INVOKE_END) + "more", "nothing after the block, found 'more'"),
        (calls_text(INVOKE, INVOKE_END) * 2, "nothing after the block"),
        (calls_text(INVOKE, ONE, TWO, INVOKE_END), "the parameter 'a' once only"),
        (calls_text(INVOKE, ONE), "a complete parameter, or the end of the call, found .*tool_calls"),
        (calls_text(INVOKE, "text", INVOKE_END), "a complete parameter, or the end of the call"),
        (calls_text(INVOKE, ONE.replace("false", "maybe"), INVOKE_END), "a complete parameter"),
        (calls_text(INVOKE, ONE.replace(' string="false"', ""), INVOKE_END), "a complete parameter"),
        (
            calls_text(INVOKE, ONE.replace("</｜DSML｜parameter>", ""), TWO, INVOKE_END),
            "a complete parameter",
        ),
        (calls_text(INVOKE, ONE.replace(">1<", ">one<"), INVOKE_END), "parameter 'a': not valid JSON"),
        (
            calls_text(INVOKE, ONE.replace(">1<", '>"\\ud800"<'), INVOKE_END),
            "parameter 'a': character 1 is half",
        ),
        (calls_text(INVOKE, ONE.replace('"a"', '""'), INVOKE_END), "a complete parameter"),
        (calls_text("<｜DSML｜invoke>", INVOKE_END), "a call, or the end of the block"),
        (calls_text("text"), "a call, or the end of the block, found '\\\\ntext"),
        (calls_text(), "at least one call"),
        ("\n\n<｜DSML｜tool_calls>", "a call, or the end of the block, found the end"),
        (f"\n\n<｜DSML｜tool_calls>\n{INVOKE}\n{ONE}", "the end of the call, found the end"),
        (f"\n\n<｜DSML｜tool_calls>\n{INVOKE}\n{INVOKE_END}", "the end of the block, found the end"),
        (f"a{INVOKE}", "an empty line and the start of a tool-call block"),
        (calls_text(INVOKE, INVOKE_END).strip(), "an empty line and the start of a tool-call block"),
        (f"a{EOS}b", "goes on after its end mark"),
    ],
)
def test_malformed_completion(text, problem):
    for thinking, start in ((False, ""), (True, "r</think>")):
        with pytest.raises(BadInput, match=problem) as caught:
            parse_completion(start + text, thinking=thinking)
        assert caught.value.fix


@pytest.mark.parametrize("end", ["", "</think>"])
def test_tool_calls_inside_the_reasoning(end):
    with pytest.raises(BadInput, match="no tool call inside the reasoning"):
        parse_completion("why" + calls_text(INVOKE, ONE, INVOKE_END) + end, thinking=True)


# Files


def messages_file(folder: Path, content: object) -> Path:
    path = folder / "messages.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_load_a_list(tmp_path):
    conversation = load_messages(messages_file(tmp_path, [user("hé")]))
    assert (conversation.messages, conversation.tools, conversation.response_format) == (
        [user("hé")],
        None,
        None,
    )


def test_load_an_object(tmp_path):
    data = {"messages": [user("hi")], "tools": [tool("f")], "response_format": {"type": "object"}}
    conversation = load_messages(messages_file(tmp_path, data))
    assert vars(conversation) == data


@pytest.mark.parametrize(
    ("content", "where", "problem"),
    [
        (b"[", "", "not valid JSON"),
        (b"", "", "not valid JSON"),
        (b'[{"role": "user", "content": "\xff"}]', "", "byte 30 is not UTF-8"),
        (b'[{"role": "user", "content": "x", "n": NaN}]', "", "not valid JSON: NaN"),
        (b"[" * 100_000, "", "not valid JSON"),
        (b'"hi"', "", "neither a list of messages nor an object"),
        ({"tools": []}, "", "neither a list of messages nor an object"),
        ({"messages": [user("hi")], "temperature": 0}, "", "unknown key 'temperature'"),
        ([], ": messages", "at least one message"),
        ({"messages": user("hi")}, ": messages", "at least one message"),
        ([user("hi"), {"role": "x"}], ": messages[1]", "unknown role 'x'"),
        ([user("hi"), result("1", "x")], ": messages[1]", "answers no open call"),
        (b'[{"role": "user", "content": "\\ud800"}]', ": messages[0].content", "half of a surrogate pair"),
        ({"messages": [user("hi")], "tools": "f"}, ": tools", "must be a list, not a string"),
        (
            {"messages": [user("hi")], "response_format": 1},
            ": response_format",
            "must be an object, not a number",
        ),
    ],
)
def test_malformed_file(tmp_path, content, where, problem):
    path = messages_file(tmp_path, content)
    with pytest.raises(BadInput, match=problem) as caught:
        load_messages(path)
    assert caught.value.where == f"{path}{where}"
    assert caught.value.fix


def test_missing_file(tmp_path):
    with pytest.raises(BadInput, match=r"none\.json: cannot be read: No such file"):
        load_messages(tmp_path / "none.json")


# Together with a checkpoint


def test_tiny_v4_texts_leave_no_placeholder():
    constants = read_chat_constants(Path(__file__).parents[2] / "examples" / "tiny-v4")
    prompt = encode(
        [user("hi")],
        constants,
        thinking=True,
        effort="max",
        tools=[tool("f")],
        response_format={"type": "object"},
    )
    assert constants is not None
    assert prompt.startswith(BOS + constants["REASONING_EFFORT_MAX"])
    assert '\n{"name": "f"}\n' in prompt
    assert '\n{"type": "object"}<｜User｜>hi' in prompt
    assert "_token}" not in prompt


def test_control_tokens_in():
    assert control_tokens_in("plain < think > | text") == []
    assert control_tokens_in(f"a</think>b{BOS}c{BOS} ｜DSML｜") == [BOS, "</think>", "｜DSML｜"]
    assert control_tokens_in(f"{REMINDER}<｜title｜>{EOS}") == [EOS, REMINDER, "<｜title｜>"]
