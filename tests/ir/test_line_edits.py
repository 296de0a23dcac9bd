"""Ed scripts: a text comes back from another one and what differs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewright.ir.line_edits import apply_edits, edit_script

LINES = st.lists(
    st.sampled_from(["a", "b", "c", "", "5", "3d", "1,2c", "..", " .", "\r", "\x85"]), max_size=12
)


def text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


@given(LINES, LINES)
def test_the_script_makes_the_text(old: list[str], new: list[str]) -> None:
    assert apply_edits(text(old), edit_script(text(old), text(new))) == text(new)


def test_a_script_as_people_see_it() -> None:
    old, new = "a\nb\nc\nd\ne\nf\n", "a\nB\nd\ne\nx\nf\ng\n"
    script = edit_script(old, new)
    assert script == "6a\ng\n.\n5a\nx\n.\n2,3c\nB\n.\n"
    assert edit_script(old, "a\nb\ne\nf\n") == "3,4d\n"
    assert edit_script(old, old) == ""
    assert apply_edits(old, script) == new


@pytest.mark.skipif(shutil.which("patch") is None or shutil.which("ed") is None, reason="no patch with ed")
@given(LINES.filter(len), LINES)
def test_patch_makes_the_text_too(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("patch")
    for name, content in (("old", text(old)), ("script", edit_script(text(old), text(new)))):
        (folder / name).write_bytes(content.encode())
    command = ["patch", "-e", "-s", "-o", "new", "old", "script"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    assert Path(folder / "new").read_bytes() == text(new).encode()


@pytest.mark.parametrize("old", ["a\nb", "."])
def test_a_text_must_end_with_a_line_feed(old: str) -> None:
    with pytest.raises(ValueError, match="line feed"):
        edit_script(old, "a\n")
    with pytest.raises(ValueError, match="line feed"):
        apply_edits(old, "1d\n")


def test_a_line_of_one_dot_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="one dot"):
        edit_script("a\n", "a\n.\n")
    assert apply_edits("a\n.\n", edit_script("a\n.\n", "a\n")) == "a\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("x\n", "'x' is no command"),
        ("1,2a\nx\n.\n", "not within the text"),
        ("0d\n", "not within the text"),
        ("3,2d\n", "not within the text"),
        ("4d\n", "not within the text"),
        ("4a\nx\n.\n", "not within the text"),
        ("1d\n2d\n", "not above the command before it"),
        ("2c\nx\n", "the lines of '2c' do not end"),
        ("1d", "line feed"),
        ("99999999999d\n", "no command"),
    ],
)
def test_what_is_no_script_of_the_text(script: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_edits("a\nb\nc\n", script)
