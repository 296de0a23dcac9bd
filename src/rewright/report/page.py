"""One HTML file of a document: data, style and script in it, so that it opens from any disk, offline."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "dom.js",
    "model.js",
    "drawing.js",
    "overview.js",
    "tree.js",
    "graph.js",
    "changes.js",
    "tables.js",
    "panel.js",
    "search.js",
    "main.js",
)
"""In the order in which they need each other."""


def render_page(document: Mapping[str, Any]) -> str:
    """The page of a document; equal documents give equal bytes."""
    parts = {
        "@TITLE@": html.escape(f"{document['subject']} - Rewright"),
        "@STYLE@": _asset("page.css"),
        "@DATA@": _embedded(document),
        "@SCRIPT@": "\n".join(map(_asset, SCRIPTS)),
    }
    page = _asset("page.html")
    found: list[str] = []
    for mark, text in parts.items():  # in their order in the page, so that no text is searched for marks
        before, _, page = page.partition(mark)
        found += [before, text]
    return "".join([*found, page])


def _asset(name: str) -> str:
    return (files("rewright.report") / "assets" / name).read_text(encoding="utf-8")


def _embedded(document: Mapping[str, Any]) -> str:
    """JSON that stands in a script element: nothing in it ends the element."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
