"""`rewright bench --stages` and `--trace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SHORT = ("-n", 2, "-r", 2, "--threads", 1)


def test_stages_stand_behind_the_results(cli: Callable, compiled_tiny: Path) -> None:
    options = (compiled_tiny, "-p", 16, "-b", "1,2", *SHORT, "--stages")
    done = cli("bench", *options)
    assert done.code == 0, done.stderr
    _, _, *tables = done.stdout.split("\n\n")
    assert [table.split(":")[0] for table in tables] == ["tg2@16", "tg2@16 x 2"]
    lines = [line.split() for line in tables[0].splitlines()[2:]]
    *stages, total = [(words[0], int(words[-6].replace(",", "")), words[-3]) for words in lines]
    assert total[0] == "all"
    assert total[1] == sum(count for _, count, _ in stages)
    record = json.loads(cli("bench", *options, "--json").stdout)
    assert [r["case"] for r in record["results"]["host"]] == ["pp16", "tg2@16", "tg2@16 x 2"]
    first, second = record["stages"]
    assert (first["case"], second["case"]) == ("tg2@16", "tg2@16 x 2")
    assert total[1:] == (first["launches"], f"{first['bytes']:,}")
    assert first["variant"] == "decode-b1-c128"
    assert first["context"] == 17
    assert second["bytes"] > first["bytes"]
    seconds = sorted(record["results"]["host"][1]["seconds"])
    assert first["step_us"] == pytest.approx(sum(seconds) / 2 / 2 * 1e6)


def test_a_trace_is_written(cli: Callable, compiled_tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    done = cli("bench", compiled_tiny, "-p", 16, *SHORT, "--trace", path, "--json")
    assert done.code == 0, done.stderr
    assert "stages" not in json.loads(done.stdout)
    assert str(path) in done.stderr
    trace = json.loads(path.read_text())
    plan = json.loads((compiled_tiny / "plan-decode-b1-c128.json").read_text())
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in complete] == [launch["symbol"] for launch in plan["launches"]]
    assert trace["otherData"] == {"case": "tg2@16", "context": 17, "clock": "wall clock"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--stages", "-n", 0), "no decode step"),
        (("--trace", "FILE", "-n", 0), "no decode step"),
        (("--trace", "FILE", "-n", 1, "-b", "1,2"), "a trace is of one step"),
        (("--trace", "FOLDER", "-n", 1), "no place for a file"),
        (("--trace", "ABSENT", "-n", 1), "no place for a file"),
    ],
)
def test_wrong_use_is_2(
    cli: Callable, compiled_tiny: Path, tmp_path: Path, options: tuple, says: str
) -> None:
    named = {"FILE": tmp_path / "t.json", "FOLDER": tmp_path, "ABSENT": tmp_path / "absent" / "t.json"}
    done = cli("bench", compiled_tiny, "-p", 16, *(named.get(o, o) for o in options))
    assert done.code == 2, done.stderr
    assert says in done.stderr
    assert not any(tmp_path.iterdir())
