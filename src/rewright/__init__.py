"""Rewright compiles DeepSeek-V4 ahead of time for GPUs without FP8 and FP4 tensor cores.

import rewright
rewright.compile_model("examples/tiny-v4", "out")
engine = rewright.load("out")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewright.compiler import compile_model
    from rewright.runtime.engine import Engine

__version__ = "0.1.0"
__all__ = ["__version__", "compile_model", "load"]


def load(folder: str | Path) -> Engine:
    """Open a compiled model, ready to prefill, decode and score."""
    from rewright.runtime.engine import Engine
    from rewright.runtime.load import Artifact

    return Engine(Artifact.open(Path(folder)))


def __getattr__(name: str) -> Any:
    # torch takes a second to import; only those who compile wait for it.
    if name == "compile_model":
        from rewright.compiler import compile_model

        return compile_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
