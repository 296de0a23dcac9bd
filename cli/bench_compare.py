"""`rewright bench --compare` and `--fail-slower`: a run beside an earlier one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rewright.cli import output
from rewright.cli.bench_table import markdown
from rewright.ir.errors import BadInput, UsageError

EXIT_SLOWER = 1

Compare = Annotated[
    Path | None,
    typer.Option(
        "--compare", metavar="OLD.json", help="Beside each case what an earlier --format json had of it."
    ),
]
FailSlower = Annotated[
    float | None,
    typer.Option(
        "--fail-slower",
        metavar="PCT",
        help="With --compare: exit with 1 if a case has more than so many per cent fewer tokens a second.",
    ),
]

_SAME = {
    "processor": "processor",
    "cores": "cores",
    "card": "card",
    "vector": "vector unit",
    "threads": "threads",
    "target": "target",
    "numerics": "numerics",
    "kv": "format of keys",
    "precision": "precision",
    "model": "model",
    "compiled_for": "limits",
}
"""What two runs have in common when their difference is that of Rewright, and how people call it."""

_AGAIN = "name what `rewright bench --format json` printed"


@dataclass(frozen=True, slots=True)
class Row:
    """One case of an earlier run: tokens per second (median), and (slowest - fastest) / median."""

    tokens_per_second: float
    spread: float


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier run.

    Attributes:
        where: its file, for messages.
        record: what the file holds.
        rows: its own results by case, without those of peers.
    """

    where: str
    record: Mapping[str, Any]
    rows: Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Pair:
    """A case of both runs."""

    case: str
    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """New tokens per second over old: more than 1 is faster."""
        return self.new.tokens_per_second / self.old.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "old_tokens_per_second": self.old.tokens_per_second,
            "old_spread": self.old.spread,
            "new_tokens_per_second": self.new.tokens_per_second,
            "new_spread": self.new.spread,
            "ratio": self.ratio,
        }


def check_limit(limit: float | None, compare: Path | None) -> None:
    """Refuse, before anything is measured, a limit without an earlier run, or one that is no percentage."""
    if limit is None:
        return
    if compare is None:
        raise UsageError(
            "there is no earlier run to be slower than",
            where="--fail-slower",
            fix="name one with --compare OLD.json",
        )
    if not 0 <= limit < 100:  # not a number fails both
        raise UsageError(f"{limit:g} is not from 0 to less than 100", where="--fail-slower")


def read_earlier(path: Path) -> Earlier:
    """Read what `--format json` printed.

    Raises:
        BadInput: it cannot be read, or is something else.
    """
    from rewright.runtime.strict_json import json_value

    where = f"--compare {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"cannot be read ({e})", where=where, fix=_AGAIN) from e
    record = json_value(text, where)
    if isinstance(record, dict) and "ablation" in record:
        raise BadInput("is of --ablate, which has no cases to compare", where=where, fix=_AGAIN)
    try:
        found = record["results"][record["target"]]
        rows = {_case(r): Row(_rate(r["tokens_per_second"]), float(r["spread"])) for r in found}
    except (KeyError, TypeError, ValueError) as e:
        raise BadInput(f"holds no results of rewright bench ({e!r})", where=where, fix=_AGAIN) from e
    if not rows:
        raise BadInput("holds no results", where=where, fix=_AGAIN)
    return Earlier(where, record, rows)


def compare_runs(earlier: Earlier, record: Mapping[str, Any]) -> list[Pair]:
    """Cases of both runs, in the order of the new one.

    What only one of them has, and what else differs between them, is said on stderr.

    Args:
        earlier: the old run.
        record: the new run, as JSON has it.
    """
    new = {_case(r): Row(r["tokens_per_second"], r["spread"]) for r in record["results"][record["target"]]}
    for said in differences(earlier.record, record):
        output.note(f"warning: {earlier.where}: {said}")
    for case in new:
        if case not in earlier.rows:
            output.note(f"{earlier.where}: has no {case}, which is compared with nothing")
    for case in earlier.rows:
        if case not in new:
            output.note(f"{earlier.where}: its {case} was not measured now")
    return [Pair(case, earlier.rows[case], row) for case, row in new.items() if case in earlier.rows]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why two runs may differ for other reasons than Rewright, a line each.

    Args:
        old, new: records; one from before a value was recorded is said not to have it.
    """
    found = []
    for key, name in _SAME.items():
        if old.get(key) == new.get(key):
            continue
        if key not in old:
            found.append(f"does not say its {name}, now {_brief(new[key])}")
        elif isinstance(was := old[key], dict) and isinstance(now := new.get(key), dict):
            fields = [f for f in (*was, *(f for f in now if f not in was)) if was.get(f) != now.get(f)]
            text = "; ".join(f"{f} {_brief(was.get(f))}, now {_brief(now.get(f))}" for f in fields)
            found.append(f"other {name}: {text}")
        else:
            found.append(f"{name} {_brief(old.get(key))}, now {_brief(new.get(key))}")
    return found


def slower_than(pairs: Sequence[Pair], limit: float) -> list[Pair]:
    """Pairs whose new rate is more than `limit` per cent below the old one."""
    return [p for p in pairs if p.new.tokens_per_second < p.old.tokens_per_second * (1 - limit / 100)]


def render_comparison(pairs: Sequence[Pair]) -> None:
    """Print old, new and ratio of each case; nothing where there is none."""
    if not pairs:
        return
    rows = [
        (
            p.case,
            *(f"{p.old.tokens_per_second:,.1f}", f"{p.old.spread:.0%}"),
            *(f"{p.new.tokens_per_second:,.1f}", f"{p.new.spread:.0%}", f"{p.ratio:.3f}"),
        )
        for p in pairs
    ]
    columns = ("test", "old tok/s", "spread", "new tok/s", "spread", "new / old")
    output.result("\n" + "\n".join(markdown(columns, rows)))


def judge(pairs: Sequence[Pair], limit: float | None) -> int:
    """The exit code, `EXIT_SLOWER` or 0; says on stderr which cases are slower, and how much."""
    if limit is None:
        return 0
    if not pairs:
        output.note("--fail-slower: no case of both runs, nothing was judged")
    found = slower_than(pairs, limit)
    for p in found:
        output.note(
            f"--fail-slower: {p.case} is {1 - p.ratio:.1%} slower than {p.old.tokens_per_second:,.1f} tok/s, "
            f"more than {limit:g}%"
        )
    return EXIT_SLOWER if found else 0


def _case(result: Mapping[str, Any]) -> str:
    """A case by what it is, whatever it was called: as `Case.name` has it."""
    from rewright.runtime.bench import Case

    prompt, new, batch = (result[key] for key in ("prompt", "new", "batch"))
    if not all(type(n) is int for n in (prompt, new, batch)):
        raise TypeError("prompt, new and batch are numbers")
    return Case(prompt, new, batch).name


def _rate(value: Any) -> float:
    rate = float(value)
    if not 0 < rate < math.inf:
        raise ValueError(f"{value} tokens per second")
    return rate


def _brief(value: Any) -> str:
    """A value in a warning: hashes are cut."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_brief(item)}" for key, item in value.items())
    if isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value):
        return value[:12]
    return "none" if value in (None, "") else str(value)
