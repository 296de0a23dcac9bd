"""Colours of a diff: on a terminal only, and nothing but colours."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewright.cli.colour import coloured, paint

DIFF = """\
~ op nodes: 392 -> 91 (-301)

layers.0.ffn (alike in layers 1-5): each saves 3,592 bytes
  ~ rule moe: 2 nodes -> 1
    - %a : f32[1] = linear(%b)
    + %a : f32[1] = moe(%b)
nodes          392     91     -301
flops           10     20      +10
"""


def test_signs_have_colours_and_text_stays() -> None:
    painted = paint(DIFF)
    assert re.sub(r"\x1b\[\d+m", "", painted) == DIFF
    assert "\x1b[31m    - %a" in painted
    assert "\x1b[32m    + %a" in painted
    assert "\x1b[33m~ op nodes" in painted
    assert "\x1b[1mlayers.0.ffn" in painted
    assert "\x1b[32m-301" in painted
    assert "\x1b[31m+10" in painted


@pytest.mark.parametrize(
    ("tty", "env", "colours"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
    ],
)
def test_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tty: bool, env: dict[str, str], colours: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty, raising=False)
    assert (coloured(DIFF) != DIFF) == colours


def test_a_file_has_none(cli: Callable[..., Any], tiny_v4: Path, tmp_path: Path) -> None:
    out = tmp_path / "diff.txt"
    assert cli("graph", "diff", tiny_v4, f"{tiny_v4}@fused", "--stat", "-o", out).code == 0
    assert "\x1b" not in out.read_text()
    assert out.read_text().startswith(" ")
