"""Pictures of results, `--plot`: what they have in common. matplotlib is needed for them only."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from rewright.cli import output
from rewright.cli.files import check_place
from rewright.ir.errors import MachineError, UsageError

_SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, a picture that cannot be drawn.

    Raises:
        UsageError: of another kind, or no place for a file.
        MachineError: matplotlib is not installed.
    """
    where = f"--plot {path}"
    if path.suffix not in _SUFFIXES:
        raise UsageError(
            f"{path.suffix or 'no suffix'} is neither .png nor .svg", where=where, fix="name out.png"
        )
    check_place(path, where)
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError(
            "drawing needs matplotlib, which is not installed",
            where=where,
            fix="pip install matplotlib (Rewright's extra `plot`), or leave --plot out",
        )


def open_pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files; the same results give the same file."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    pyplot.rcParams["svg.hashsalt"] = "rewright"
    return pyplot


def save(pyplot: Any, figure: Any, path: Path) -> None:
    """Write a figure, and close it.

    Raises:
        MachineError: it cannot be written.
    """
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as e:
        raise MachineError(
            f"cannot be written ({e.strerror})", where=f"--plot {path}", fix="choose another file"
        ) from e
    finally:
        pyplot.close(figure)
    output.note(f"picture written to {path}")
