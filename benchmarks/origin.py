"""Where the figures of a benchmark on this CPU come from."""

from __future__ import annotations

import os
import platform
from datetime import date
from typing import Any

import torch

import rewright
from rewright.runtime import _native


def origin(benchmark: str, arguments: str = "") -> dict[str, Any]:
    """What a record begins with: date, command, machine and versions."""
    return {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "command": f"python benchmarks/{benchmark}.py {arguments}".rstrip(),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "card": None},
        "vector": _native.vector_name(),
        "versions": {
            "rewright": rewright.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
