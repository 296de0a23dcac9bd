"""`rewright bench --stages` and `--trace`: where the time of a decode step goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import MachineError, UsageError

if TYPE_CHECKING:
    from rewright.runtime.profile import Profile

Stages = Annotated[
    bool, typer.Option("--stages", help="Time, bytes and share of every stage of a decode step as well.")
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write the launches of one decode step as a Chrome trace."),
]


def check_trace(path: Path, decodes: int) -> None:
    """Refuse, before anything is measured, a trace of several steps or one that cannot be written."""
    if decodes > 1:
        raise UsageError("a trace is of one step", where="--trace", fix="name one length with -p and one -b")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError("is no place for a file", where=f"--trace {path}", fix="choose another file")


def write_trace(path: Path, profile: Profile) -> None:
    """Write a profile's trace; `MachineError` where that is impossible."""
    from rewright.runtime.trace_events import trace_events

    try:
        path.write_text(json.dumps(trace_events(profile)) + "\n", encoding="utf-8")
    except OSError as e:
        raise MachineError(
            f"cannot be written ({e.strerror})", where=str(path), fix="choose another file"
        ) from e
    output.note(f"trace of {profile.case.name} written to {path}: open it with ui.perfetto.dev")


def render_profile(profile: Profile, step_us: float) -> None:
    """Print the stages of a step.

    Args:
        profile: the step taken apart.
        step_us: microseconds of a step as it ordinarily runs.
    """
    stages = profile.by_stage()
    total = sum(stage.us for stage in stages)
    rows = [
        _row(s.name, s.count, s.us, s.us / s.count, s.bytes, s.gb_per_second, s.us / total) for s in stages
    ]
    count, nbytes = len(profile.plan.launches), sum(s.bytes for s in stages)
    rows.append(_row("all", count, total, total / count, nbytes, nbytes / total / 1e3, 1.0))
    output.result(
        f"\n{profile.case.name}: step at {profile.case.middle} tokens, {profile.plan.variant.name}; "
        f"{profile.clock} of each launch, as it runs {step_us:,.1f} us"
    )
    output.table(("stage", "launches", "us", "us each", "bytes", "GB/s", "share"), rows)


def _row(
    name: str, count: int, us: float, each: float, nbytes: int, rate: float, share: float
) -> tuple[str, ...]:
    said = f"{rate:,.1f}" if rate >= 1 else f"{rate:.4f}"
    return (name, f"{count:,}", f"{us:,.1f}", f"{each:,.2f}", f"{nbytes:,}", said, f"{share:.1%}")
