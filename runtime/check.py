"""What `rewright doctor` finds. Imports nothing, so that it can say what cannot be imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        ok: True works, False does not, None is merely told.
        text: what was found.
        fix: what to do about it, where something is to be done.
        data: the numbers in `text`, for programs.
    """

    name: str
    ok: bool | None
    text: str
    fix: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "text": self.text, "fix": self.fix, "data": self.data}
