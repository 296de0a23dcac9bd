"""Errors for two kinds of reader: the user who can act on them, and us.

A `UserError` says what is wrong, where, and what to do, and carries the exit code of the
command line (docs/errors.md). A `CompilerBug` is ours and asks for a report. Every other
exception that reaches the command line is treated as a `CompilerBug`.
"""

from __future__ import annotations


class RewrightError(Exception):
    """Base of every error that Rewright raises on purpose."""

    exit_code = 70


class UserError(RewrightError):
    """Something the user can mend.

    Args:
        what: what is wrong, one sentence without a trailing full stop.
        where: the file, tensor, option or node it is about.
        fix: what to do about it.
    """

    exit_code = 3

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        self.what, self.where, self.fix = what, where, fix
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}\n  -> {fix}" if fix else text)


class UsageError(UserError):
    """The command line asks for something that does not exist or would overwrite."""

    exit_code = 2


class BadInput(UserError):
    """A checkpoint, artifact, prompt or text that cannot be used as it is."""

    exit_code = 3


class MachineError(UserError):
    """This machine cannot: card, memory or disk."""

    exit_code = 4


class Refused(UserError):
    """Rewright declines: failed verification, quality gate, or a missing match."""

    exit_code = 5


class VerifyError(Refused):
    """A graph breaks the rules of its stage.

    Attributes:
        problems: every problem found, one line each.
    """

    def __init__(self, graph: str, problems: list[str]):
        self.problems = problems
        lines = "".join(f"\n  - {p}" for p in problems)
        super().__init__(f"{len(problems)} problem(s) in the graph{lines}", where=graph)


class ProblemList(BadInput):
    """Several things wrong with one input, listed together.

    Attributes:
        problems: every problem found, one line each.
    """

    def __init__(self, what: str, problems: list[str], *, where: str | None = None, fix: str | None = None):
        self.problems = problems
        lines = "".join(f"\n  - {p}" for p in problems)
        super().__init__(f"{what}{lines}", where=where, fix=fix)


class CompilerBug(RewrightError):
    """An invariant of our own is broken."""

    exit_code = 70
