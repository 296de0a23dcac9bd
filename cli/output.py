"""What commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

SHOW_AFTER_SECONDS = 1.0
_WIDE = 1000

_stderr = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Say something to the user that is no result."""
    _stderr.print(text, markup=False, style="dim", soft_wrap=True)


def notes(texts: Iterable[str]) -> None:
    """Say several things."""
    for text in texts:
        note(f"note: {text}")


def error(text: str) -> None:
    """Say what went wrong."""
    _stderr.print(f"error: {text}", markup=False, style="red", soft_wrap=True)


def result(text: str, *, end: str = "\n") -> None:
    """Print a result at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table; behind the first `left` columns cells are numbers. A terminal folds what is too wide for
    it, anything else gets whole lines."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for at, column in enumerate(columns):
        found.add_column(column, justify="left" if at < left else "right", no_wrap=at < left)
    for row in rows:
        found.add_row(*row)
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(found)


class ProgressBar:
    """A progress bar on a terminal's stderr that appears when the work has taken a second."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=_stderr,
            transient=True,
        )
        self._task: TaskID | None = None
        self._begin = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report that `done` of `total` of the work called `what` is done."""
        if self._task is None:
            if not _stderr.is_terminal or time.monotonic() - self._begin < SHOW_AFTER_SECONDS:
                return
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, description=what, completed=done, total=total)

    def counter(self, what: str, total: int) -> _Counter:
        """A function that reports `n` more of `total` done."""
        return _Counter(self, what, total)


class _Counter:
    def __init__(self, bar: ProgressBar, what: str, total: int):
        self._bar, self._what, self._total = bar, what, total
        self._done = 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._bar(self._what, self._done, self._total)
