"""Reading a release's chat texts: which assignments count, and that nothing is ever run."""

from pathlib import Path

import pytest

from rewright.frontend.chat_constants import read_chat_constants
from rewright.ir.errors import BadInput

TINY = Path(__file__).parents[2] / "examples" / "tiny-v4"


def checkpoint(folder: Path, source: str | bytes) -> Path:
    path = folder / "encoding" / "encoding_dsv4.py"
    path.parent.mkdir()
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return folder


def test_no_file(tmp_path):
    assert read_chat_constants(tmp_path) is None


def test_tiny_v4_has_all_three():
    constants = read_chat_constants(TINY)
    assert constants is not None
    assert sorted(constants) == ["REASONING_EFFORT_MAX", "TOOLS_TEMPLATE", "response_format_template"]
    assert "{tool_schemas}" in constants["TOOLS_TEMPLATE"]
    assert constants["response_format_template"].endswith("{schema}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('TOOLS_TEMPLATE = "a\\n{tool_schemas}"', "a\n{tool_schemas}"),
        ("TOOLS_TEMPLATE: str = 'a'", "a"),
        ('TOOLS_TEMPLATE = """a\nb"""', "a\nb"),
        ("TOOLS_TEMPLATE = (\n    'a'\n    'b'\n)", "ab"),
        ("TOOLS_TEMPLATE = r'\\d'", "\\d"),
        ("TOOLS_TEMPLATE = ''", ""),
        ("TOOLS_TEMPLATE = '{} { } {{}} {\"a\": 1} {0}'", '{} { } {{}} {"a": 1} {0}'),
        ("# -*- coding: latin-1 -*-\nTOOLS_TEMPLATE = '\xe9'".encode("latin-1"), "\xe9"),
    ],
)
def test_literal_forms(tmp_path, source, text):
    assert read_chat_constants(checkpoint(tmp_path, source)) == {"TOOLS_TEMPLATE": text}


def test_other_content_is_ignored(tmp_path):
    source = """
import os
from typing import Any
eos: str = "x"
OTHER = "{anything}"
print(TOOLS_TEMPLATE)
def render(schema: Any) -> str:
    return response_format_template.format(schema=schema)
response_format_template = "as {schema}"
"""
    assert read_chat_constants(checkpoint(tmp_path, source)) == {"response_format_template": "as {schema}"}


def test_a_file_without_the_texts(tmp_path):
    assert read_chat_constants(checkpoint(tmp_path, "")) == {}


def test_the_file_is_never_executed(tmp_path):
    trace = tmp_path / "executed"
    source = f"open({str(trace)!r}, 'w').close()\nTOOLS_TEMPLATE = 'a'\nraise SystemExit(1)\n"
    assert read_chat_constants(checkpoint(tmp_path, source)) == {"TOOLS_TEMPLATE": "a"}
    assert not trace.exists()
    exec(compile(source.replace("raise SystemExit(1)", ""), "side effect", "exec"))
    assert trace.exists(), "the trace must be what running the file leaves"


def test_warnings_of_the_file_are_not_ours(tmp_path, recwarn):
    assert read_chat_constants(checkpoint(tmp_path, "x = '\\d'\n")) == {}
    assert not recwarn.list


@pytest.mark.parametrize(
    "statement",
    [
        "TOOLS_TEMPLATE = 'a' + 'b'",
        "TOOLS_TEMPLATE = f'a'",
        "TOOLS_TEMPLATE = b'a'",
        "TOOLS_TEMPLATE = 1",
        "TOOLS_TEMPLATE = make()",
        "TOOLS_TEMPLATE = OTHER = 'a'",
        "TOOLS_TEMPLATE, other = 'ab'",
        "TOOLS_TEMPLATE: str",
        "TOOLS_TEMPLATE += 'a'",
        "if True: TOOLS_TEMPLATE = 'a'",
        "for TOOLS_TEMPLATE in 'ab': pass",
        "(TOOLS_TEMPLATE := 'a')",
        "def TOOLS_TEMPLATE(): pass",
        "class TOOLS_TEMPLATE: pass",
        "from texts import TOOLS_TEMPLATE",
        "import texts as TOOLS_TEMPLATE",
        "del TOOLS_TEMPLATE",
    ],
)
def test_anything_but_one_literal_is_refused(tmp_path, statement):
    with pytest.raises(BadInput, match=r"encoding_dsv4\.py:3: TOOLS_TEMPLATE is not assigned once"):
        read_chat_constants(checkpoint(tmp_path, f"\n\n{statement}\n"))


@pytest.mark.parametrize("second", ["TOOLS_TEMPLATE = 'b'", "TOOLS_TEMPLATE += 'b'", "del TOOLS_TEMPLATE"])
def test_a_second_assignment_is_refused(tmp_path, second):
    with pytest.raises(BadInput, match=r"\.py:2: TOOLS_TEMPLATE is not assigned once"):
        read_chat_constants(checkpoint(tmp_path, f"TOOLS_TEMPLATE = 'a'\n{second}\n"))


@pytest.mark.parametrize(
    ("name", "placeholder"),
    [
        ("TOOLS_TEMPLATE", "schema"),
        ("TOOLS_TEMPLATE", "today"),
        ("response_format_template", "tool_schemas"),
        ("REASONING_EFFORT_MAX", "dsml_token"),
        ("REASONING_EFFORT_MAX", "größe_2"),
    ],
)
def test_unknown_placeholder(tmp_path, name, placeholder):
    with pytest.raises(BadInput, match=rf"\.py:2: {name} holds the placeholder \{{{placeholder}\}}"):
        read_chat_constants(checkpoint(tmp_path, f"\n{name} = 'a {{{placeholder}}}'\n"))


def test_known_placeholders(tmp_path):
    text = "{tool_schemas}{dsml_token}{thinking_start_token}{thinking_end_token}"
    assert read_chat_constants(checkpoint(tmp_path, f"TOOLS_TEMPLATE = '{text}'")) == {"TOOLS_TEMPLATE": text}


def test_half_a_surrogate_pair(tmp_path):
    with pytest.raises(BadInput, match="REASONING_EFFORT_MAX holds half of a surrogate pair"):
        read_chat_constants(checkpoint(tmp_path, "REASONING_EFFORT_MAX = '\\ud800'"))


@pytest.mark.parametrize(
    "source",
    [
        "x = (\n",
        b"x = '\xff'\n",
        "x = '\0'\n",
        "x = " + "(" * 5000 + ")" * 5000,
        "x = " + "-" * 100_000 + "1",
    ],
    ids=["syntax", "not-utf8", "null-byte", "nested", "nested-deeper"],
)
def test_not_python(tmp_path, source):
    with pytest.raises(BadInput, match=r"encoding_dsv4\.py.*is not valid Python: \S") as caught:
        read_chat_constants(checkpoint(tmp_path, source))
    assert caught.value.fix


def test_not_a_file(tmp_path):
    (tmp_path / "encoding" / "encoding_dsv4.py").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"encoding_dsv4\.py: cannot be read"):
        read_chat_constants(tmp_path)
