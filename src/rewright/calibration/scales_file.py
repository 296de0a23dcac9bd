"""Reads the file of scales that `rewright calibrate` writes."""

from __future__ import annotations

import json
from pathlib import Path

from rewright.ir.errors import BadInput
from rewright.ir.static_scales import StaticScales, parse_static_scales

FORMAT = 1
_FIX = "name a file that rewright calibrate has written"


def read_scales(path: Path) -> StaticScales:
    """The scales of a file; `BadInput` if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"is no file of scales of format {FORMAT}")
        return parse_static_scales(value)
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the path") from e
    except (ValueError, RecursionError) as e:
        raise BadInput(str(e), where=str(path), fix=_FIX) from e
