"""`rewright bench --format`, `--compare`, `--fail-slower` and `--plot`."""

from __future__ import annotations

import csv
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rewright.cli import bench_compare, picture
from rewright.runtime import bench
from rewright.runtime.engine import Engine

SHORT = ("-p", 8, "-n", 2, "-r", 3, "--threads", 1)
SECONDS = {"pp8": (0.2, 0.1, 0.4), "tg2@8": (0.5, 0.5, 0.25), "tg2@8 x 2": (1.0, 1.0, 1.0)}
RESULT = (
    '{"target": "host", "results": {"host": [{"prompt": 8, "new": 0, "batch": 1, "tokens_per_second": 40, '
    '"spread": 0}]}}'
)
RATES = {"pp8": 40.0, "tg2@8": 4.0, "tg2@8 x 2": 4.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Runs take `SECONDS`, and memory is read at 1 GB/s; factors by case make runs slower."""
    factors: dict[str, float] = {}
    seen: dict[str, int] = {}

    def measure_seconds(engine: Engine, case: bench.Case) -> float:
        at = seen[case.name] = seen.get(case.name, -2) + 1  # the run before the first is untimed
        return SECONDS[case.name][at % 3] * factors.get(case.name, 1) if at >= 0 else 1e9

    def forget(*_: object) -> float:
        seen.clear()
        return 1e9

    monkeypatch.setattr(bench, "measure_seconds", measure_seconds)
    monkeypatch.setattr(bench, "read_bandwidth", forget)
    return factors


@pytest.fixture
def old(cli: Callable, compiled_tiny: Path, clock: dict[str, float], tmp_path: Path) -> Path:
    """An earlier run of two cases."""
    path = tmp_path / "old.json"
    path.write_text(cli("bench", compiled_tiny, *SHORT, "--format", "json").stdout)
    return path


def changed(path: Path, **values: Any) -> Path:
    """A copy of a record with other values; None takes one out."""
    record = {**json.loads(path.read_text()), **values}
    copy = path.with_name("changed.json")
    copy.write_text(json.dumps({key: value for key, value in record.items() if value is not None}))
    return copy


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_the_table_says_what_was_measured(
    cli: Callable, compiled_tiny: Path, clock: dict[str, float]
) -> None:
    done = cli("bench", compiled_tiny, *SHORT, "-b", "1,2")
    assert done.code == 0, done.stderr
    head, rule, *rows = cells(done.stdout.split("\n\n")[0])
    assert set("".join(rule)) == {"-", ":"}
    record = json.loads(cli("bench", compiled_tiny, *SHORT, "-b", "1,2", "--json").stdout)
    for cell, found in zip(rows, record["results"]["host"], strict=True):
        row = dict(zip(head, cell, strict=True))
        seconds, case = SECONDS[row["test"]], found["case"]
        assert row["test"] == case
        assert found["seconds"] == list(seconds)
        assert float(row["tok/s"]) == found["tokens_per_second"] == RATES[case]
        spread = (max(seconds) - min(seconds)) / statistics.median(seconds)
        assert found["spread"] == pytest.approx(spread)
        assert row["spread"] == f"{spread:.0%}"
        assert row["MB/token"] == f"{found['bytes_per_token'] / 1e6:.2f}"
        assert row["of ceiling"] == f"{found['bytes_per_token'] * RATES[case] / 1e9:.1%}"


def test_csv_has_the_values_of_json(cli: Callable, compiled_tiny: Path, clock: dict[str, float]) -> None:
    done = cli("bench", compiled_tiny, *SHORT, "-b", "1,2", "--format", "csv")
    assert done.code == 0, done.stderr
    record = json.loads(cli("bench", compiled_tiny, *SHORT, "-b", "1,2", "--format", "json").stdout)
    lines = list(csv.DictReader(done.stdout.splitlines()))
    for line, found in zip(lines, record["results"]["host"], strict=True):
        assert json.loads(line["seconds"]) == found["seconds"]
        for key in ("prompt", "new", "batch", "tokens", "tokens_per_second", "spread", "bytes_per_token"):
            assert float(line[key]) == found[key]
        assert float(line["share_of_ceiling"]) == found["bytes_per_second"] / 1e9
        assert (line["target"], line["runs_on"], line["case"]) == ("host", "host", found["case"])
        assert line["model_config"] == record["model"]["config"]
        assert "ratio" not in line


def test_rows_match_by_case(cli: Callable, compiled_tiny: Path, clock: dict[str, float], old: Path) -> None:
    clock.update({"pp8": 2.0, "tg2@8": 0.5})
    done = cli("bench", compiled_tiny, *SHORT, "-b", "1,2", "--compare", old)
    assert done.code == 0, done.stderr
    _, _, comparison = done.stdout.split("\n\n")
    assert cells(comparison)[2:] == [
        ["pp8", "40.0", "150%", "20.0", "150%", "0.500"],
        ["tg2@8", "4.0", "50%", "8.0", "50%", "2.000"],
    ]
    assert f"{old}: has no tg2@8 x 2" in done.stderr
    assert "warning" not in done.stderr
    found = json.loads(cli("bench", compiled_tiny, *SHORT, "--compare", old, "--json").stdout)["comparison"]
    assert [
        (r["case"], r["old_tokens_per_second"], r["new_tokens_per_second"], r["ratio"]) for r in found
    ] == [
        ("pp8", 40, 20, 0.5),
        ("tg2@8", 4, 8, 2),
    ]
    done = cli("bench", compiled_tiny, *SHORT, "-n", 0, "--compare", old, "--format", "csv")
    (line,) = csv.DictReader(done.stdout.splitlines())
    assert (float(line["old_tokens_per_second"]), float(line["ratio"])) == (40, 0.5)
    assert f"{old}: its tg2@8 was not measured now" in done.stderr


@pytest.mark.parametrize(
    ("factor", "limit", "code"),
    [(1.0, 0, 0), (1.2, 20, 0), (1.3, 20, 1), (1.01, 0, 1), (0.5, 0, 0), (1.9, 50, 0), (2.1, 50, 1)],
)
def test_a_slower_case_fails(
    cli: Callable,
    compiled_tiny: Path,
    clock: dict[str, float],
    old: Path,
    factor: float,
    limit: float,
    code: int,
) -> None:
    clock["tg2@8"] = factor
    done = cli("bench", compiled_tiny, *SHORT, "--compare", old, "--fail-slower", limit)
    assert done.code == code, done.stderr
    assert done.stdout  # results are there either way
    assert ("tg2@8 is" in done.stderr) == (code == 1)
    assert "pp8 is" not in done.stderr
    if code:
        assert f"{1 - 1 / factor:.1%} slower than 4.0 tok/s, more than {limit:g}%" in done.stderr


def test_a_case_without_its_like_never_fails(
    cli: Callable, compiled_tiny: Path, clock: dict[str, float], old: Path
) -> None:
    record = json.loads(old.read_text())
    record["results"]["host"][0].update(prompt=9, tokens_per_second=1e9)
    path = changed(old, results=record["results"])
    done = cli("bench", compiled_tiny, *SHORT, "--compare", path, "--fail-slower", 0)
    assert done.code == 0, done.stderr
    assert "has no pp8" in done.stderr
    assert "its pp9 was not measured now" in done.stderr
    done = cli("bench", compiled_tiny, *SHORT, "-n", 0, "--compare", path, "--fail-slower", 0)
    assert done.code == 0
    assert "nothing was judged" in done.stderr
    assert len(done.stdout.split("\n\n")) == 2  # no comparison


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"processor": "Other 9000"}, "processor Other 9000, now "),
        ({"threads": 7}, "threads 7, now 1"),
        ({"numerics": "bf16"}, "numerics bf16, now faithful"),
        ({"card": "NVIDIA A100"}, "card NVIDIA A100, now none"),
        ({"processor": None}, "does not say its processor"),
        ({"model": {"layers": 7}}, "other model: layers 7, now 6"),
        ({"compiled_for": {"chunk": 7}}, "other limits: chunk 7, now 128"),
    ],
)
def test_other_machines_and_models_are_said(
    cli: Callable,
    compiled_tiny: Path,
    clock: dict[str, float],
    old: Path,
    values: dict[str, Any],
    says: str,
) -> None:
    record = json.loads(old.read_text())
    merged = {k: {**record[k], **v} if isinstance(v, dict) else v for k, v in values.items()}
    path = changed(old, **merged)
    done = cli("bench", compiled_tiny, *SHORT, "-n", 0, "--compare", path)
    assert done.code == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("warning: ")] != []
    assert says in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"target": "host", "results": {"host": []}}',
        '{"target": "host", "results": {"host": [{"prompt": 8, "new": 0, "batch": 1}]}}',
        RESULT.replace("40", "0"),
        RESULT.replace("40", "1e999"),
        RESULT.replace("8", '"8"'),
        '{"target": "host", "ablation": []}',
        '{"target": NaN}',
    ],
)
def test_what_is_no_earlier_run_is_3(cli: Callable, compiled_tiny: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    done = cli("bench", compiled_tiny, *SHORT, "--compare", path)
    assert (done.code, done.stdout) == (3, ""), done.stderr
    assert f"--compare {path}" in done.stderr
    assert cli("bench", compiled_tiny, *SHORT, "--compare", tmp_path / "absent.json").code == 3


def test_an_earlier_run_needs_no_more_than_this(tmp_path: Path) -> None:
    """So that it is what the wrong ones lack which is refused."""
    (tmp_path / "old.json").write_text(RESULT)
    assert bench_compare.read_earlier(tmp_path / "old.json").rows == {"pp8": bench_compare.Row(40, 0)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--fail-slower", 5), "no earlier run"),
        (("--compare", "OLD", "--fail-slower", 100), "100 is not from 0"),
        (("--compare", "OLD", "--fail-slower", -1), "-1 is not from 0"),
        (("--compare", "OLD", "--fail-slower", "nan"), "nan is not from 0"),
        (("--format", "yaml"), "unknown format 'yaml'"),
        (("--format", "csv", "--json"), "--json is not --format csv"),
        (("--format", "csv", "--stages"), "tables of their own"),
        (("--plot", "out.jpg"), ".jpg is neither"),
        (("--plot", "out"), "no suffix is neither"),
        (("--plot", "absent/out.png"), "no place for a file"),
    ],
)
def test_wrong_use_is_2(cli: Callable, compiled_tiny: Path, options: tuple, says: str) -> None:
    done = cli("bench", compiled_tiny, *SHORT, *options)
    assert (done.code, done.stdout) == (2, "")
    assert says in done.stderr


def test_a_picture_without_matplotlib_is_4(
    cli: Callable, compiled_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    done = cli("bench", compiled_tiny, *SHORT, "--plot", tmp_path / "out.png")
    assert (done.code, done.stdout) == (4, "")
    assert "needs matplotlib, which is not installed" in done.stderr
    assert "pip install matplotlib" in done.stderr
    assert not any(tmp_path.iterdir())


class FakeAxis:
    """Keeps the bars that it is told to draw, and takes every other call."""

    def __init__(self) -> None:
        self.bars: list[tuple[float, float, list[list[float]]]] = []
        self.labels: list[str] = []

    def barh(self, at: float, width: float, *, color: str, xerr: list[list[float]]) -> None:
        self.bars.append((at, width, xerr))

    def set_yticks(self, ticks: range, labels: list[str], *, fontsize: int) -> None:
        self.labels = labels

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def test_the_picture_has_the_measured_bars(
    cli: Callable,
    compiled_tiny: Path,
    clock: dict[str, float],
    old: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    axis, saved = FakeAxis(), []
    matplotlib, pyplot = ModuleType("matplotlib"), ModuleType("matplotlib.pyplot")

    class Figure(FakeAxis):
        def savefig(self, path: Path, metadata: object) -> None:
            saved.append(path)

    vars(matplotlib).update(use=lambda name: None)
    vars(pyplot).update(rcParams={}, subplots=lambda figsize: (Figure(), axis), close=lambda figure: None)
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: True)
    clock["pp8"] = 2.0
    path = old.with_name("out.png")
    done = cli("bench", compiled_tiny, *SHORT, "--compare", old, "--plot", path)
    assert done.code == 0, done.stderr
    assert saved == [path]
    assert axis.labels == ["pp8, host", "pp8, before", "tg2@8, host", "tg2@8, before"]
    # 8 tokens in 0.2, 0.4 and 0.8 s; 2 tokens in 0.25, 0.5 and 0.5 s
    assert axis.bars == [
        (0, 20, [[10], [20]]),
        (1, 40, [[0], [0]]),
        (2, 4, [[0], [4]]),
        (3, 4, [[0], [0]]),
    ]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_picture_is_drawn(cli: Callable, compiled_tiny: Path, tmp_path: Path) -> None:
    for path, begin in ((tmp_path / "a.png", b"\x89PNG"), (tmp_path / "a.svg", b"<?xml")):
        assert cli("bench", compiled_tiny, *SHORT, "--plot", path).code == 0
        assert path.read_bytes().startswith(begin)


def test_the_exit_code_is_the_documented_one(repo_root: Path) -> None:
    page = (repo_root / "docs" / "errors.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {bench_compare.EXIT_SLOWER} |")]
    assert "`rewright bench --fail-slower`" in row
    assert "later version" not in row
