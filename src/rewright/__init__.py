"""Rewright compiles DeepSeek-V4 ahead of time for GPUs without FP8 and FP4 tensor cores.

import rewright

rewright.compile_model("examples/tiny-v4", "out")
engine = rewright.load("out")
tokenizer = engine.artifact.tokenizer()
logits = engine.prefill(0, tokenizer.encode("In the beginning"))  # slot 0
for _ in range(16):
    token = int(logits.argmax())
    print(tokenizer.decode([token]), end="")
    logits = engine.decode({0: token})[0]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewright.compiler import CompileOptions, compile_model
    from rewright.runtime.engine import Engine

__version__ = "0.1.0"
__all__ = ["CompileOptions", "__version__", "compile_model", "load"]


def load(folder: str | Path) -> Engine:
    """Open a compiled model, ready to prefill, decode and score."""
    from rewright.runtime.engine import Engine
    from rewright.runtime.load import Artifact

    return Engine(Artifact.open(Path(folder)))


def __getattr__(name: str) -> Any:
    # torch takes a second to import; only those who compile wait for it.
    if name in ("CompileOptions", "compile_model"):
        from rewright import compiler

        return getattr(compiler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
