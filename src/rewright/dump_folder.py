"""A folder with the text of graphs after every pass."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rewright.ir.errors import MachineError, UsageError
from rewright.ir.graph import Graph
from rewright.ir.printer import print_graph

_OURS = re.compile(r"\d\d-[a-z]+(-[a-z_]+)?\.txt")


class DumpFolder:
    """`VARIANT/NN-STAGE-PASS.txt`, written only where the graph changed.

    An existing folder is replaced only if it holds nothing but such files.

    Raises:
        UsageError: there is something else in it.
        MachineError: it cannot be written.
    """

    def __init__(self, path: Path):
        self._path = path
        self._numbers: dict[str, int] = {}
        self._last: dict[str, str] = {}
        if path.exists():
            self._require_ours()
        try:
            shutil.rmtree(path, ignore_errors=False) if path.exists() else None
            path.mkdir(parents=True)
        except OSError as e:
            raise MachineError(f"cannot be written ({e.strerror})", where=str(path)) from e

    def _require_ours(self) -> None:
        inside = sorted(self._path.rglob("*")) if self._path.is_dir() else [self._path]
        for file in inside:
            if file.is_dir() and file.parent == self._path and any(file.iterdir()):
                continue
            place = file.relative_to(self._path).parts if file != self._path else ()
            if len(place) != 2 or not _OURS.fullmatch(place[1]):
                raise UsageError(
                    f"holds {file.name}, which is no dump", where=str(self._path), fix="choose another folder"
                )

    def add(self, variant: str, stage: str, name: str, graph: Graph) -> None:
        """Write the graph of a variant after a pass (or as traced), unless it is as it was."""
        number = self._numbers.get(variant, 0)
        self._numbers[variant] = number + 1
        text = print_graph(graph)
        body = text.partition("\nir ")[2]  # without the header, which tells the stage
        if self._last.get(variant) == body:
            return
        self._last[variant] = body
        folder = self._path / variant
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02d}-{stage}{'-' + name if name else ''}.txt").write_text(text, encoding="utf-8")
