"""A profile as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from rewright.ir.stages import module_of
from rewright.runtime.profile import Profile

_PROCESS = 0


def trace_events(profile: Profile) -> dict[str, Any]:
    """One run of the step, the one of median time: an event for each launch, a row for each stage.

    Returns:
        A JSON object of the Trace Event Format. `ts` and `dur` are microseconds.
    """
    rows = {stage: row for row, stage in enumerate(dict.fromkeys(profile.stages))}
    events = [_named("process_name", 0, f"{profile.plan.variant.name}, {profile.case.name}")]
    for stage, row in rows.items():
        events.append(_named("thread_name", row, stage))
        events.append({**_meta("thread_sort_index", row), "args": {"sort_index": row}})
    marks = profile.typical
    for at, launch in enumerate(profile.plan.launches):
        moved = profile.moved[at]
        events.append(
            {
                "name": launch.symbol,
                "cat": profile.stages[at],
                "ph": "X",
                "pid": _PROCESS,
                "tid": rows[profile.stages[at]],
                "ts": marks[at],
                "dur": marks[at + 1] - marks[at],
                "args": {
                    "launch": at,
                    "symbol": launch.symbol,
                    "phase": launch.phase,
                    "module": module_of(launch),
                    "bytes": moved.total,
                    "weight_bytes": moved.weights_read,
                    "state_bytes": moved.state,
                    "activation_bytes": moved.activations,
                },
            }
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "case": profile.case.name,
            "context": profile.case.middle,
            "clock": profile.clock,
        },
    }


def _meta(name: str, row: int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": row}


def _named(what: str, row: int, name: str) -> dict[str, Any]:
    return {**_meta(what, row), "args": {"name": name}}
