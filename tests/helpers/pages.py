"""Reads the document out of a page."""

from __future__ import annotations

import json
import re
from typing import Any


def document_of(page: str) -> dict[str, Any]:
    """The JSON that a page shows."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def nodes_of(document: dict[str, Any], snapshot: int) -> list[dict[str, Any]]:
    """The op nodes of a snapshot with their tables looked up."""
    found = []
    for at in document["snapshots"][snapshot]["nodes"]:
        names, types, op, operands, attrs, module, rule, cost = document["nodes"][at]
        found.append(
            {
                "names": [document["names"][n] for n in names],
                "types": [document["types"][t] for t in types],
                "op": document["ops"][op],
                "operands": [None if n < 0 else document["names"][n] for n in operands],
                "attrs": document["attrs"][attrs],
                "module": document["modules"][module],
                "rule": document["rules"][rule] or None,
                "cost": dict(zip(document["cost_fields"], document["costs"][cost], strict=True)),
            }
        )
    return found
