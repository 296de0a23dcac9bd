"""What the benchmark counts, and the command around it."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from rewright.ir.errors import UsageError
from rewright.runtime import bench
from rewright.runtime.bench import Case, cases, measure
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact


@pytest.fixture(scope="module")
def host(compiled_tiny: Path) -> Engine:
    return Engine(Artifact.open(compiled_tiny), threads=1)


def test_tokens_are_counted_not_chunks(host: Engine) -> None:
    assert Case(300, 0, 1).tokens == 300
    assert Case(300, 7, 4).tokens == 28
    result = measure(host, Case(20, 3, 2), repeats=2)
    assert len(result.seconds) == 2
    assert result.tokens_per_second == pytest.approx(6 / (sum(result.seconds) / 2))


def test_the_clock_sees_the_timed_runs_only(host: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run warms up, the others are reported in their order, by their median."""
    clock = iter([9.0, 0.5, 0.1, 0.2])
    monkeypatch.setattr(bench, "measure_seconds", lambda engine, case: next(clock))
    result = measure(host, Case(20, 3, 2), repeats=3)
    assert result.seconds == (0.5, 0.1, 0.2)
    assert result.tokens_per_second == 30
    assert result.spread == 2
    assert next(clock, None) is None


def test_a_decode_is_as_many_steps_as_are_counted(host: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is counted that no step made: the first of a sequence comes from the prompt."""
    steps: list[tuple[int, int]] = []
    step = host.model.step

    def counted(rows, **options):
        steps.append((len(rows), len(rows[0].tokens)))
        return step(rows, **options)

    monkeypatch.setattr(host.model, "step", counted)
    case = Case(130, 5, 2)
    bench.measure_seconds(host, case)
    assert steps == [(1, 128), (1, 2)] * 2 + [(2, 1)] * 5
    assert sum(rows for rows, tokens in steps if tokens == 1) == case.tokens == 10


def test_a_decode_starts_behind_its_prompt(host: Engine) -> None:
    measure(host, Case(20, 3, 2), repeats=1)
    assert [host.length(slot) for slot in (0, 1)] == [23, 23]


def test_bytes_are_those_of_the_variants_that_run(host: Engine) -> None:
    """A batch reads its dense weights once for all sequences; a longer context has more entries to read."""
    alone, four = (measure(host, Case(16, 1, batch), 1).bytes_per_token for batch in (1, 4))
    assert alone / 4 < four < alone
    assert measure(host, Case(600, 1, 1), 1).bytes_per_token > alone


@pytest.mark.parametrize(
    ("prompts", "new", "batches"),
    [([0], 1, [1]), ([1000], 100, [1]), ([8], 1, [0]), ([8], 1, [5]), ([8], -1, [1])],
)
def test_what_does_not_fit_is_refused(host: Engine, prompts: list[int], new: int, batches: list[int]) -> None:
    with pytest.raises(UsageError):
        cases(host.limits, prompts, new, batches)


def test_the_command(cli: Callable, compiled_tiny: Path) -> None:
    options = ("-p", "16,20", "-n", 2, "-b", "1,2", "-r", 1, "--threads", 1)
    done = cli("bench", compiled_tiny, *options)
    assert done.code == 0, done.stderr
    table, peak = done.stdout.split("\n\n")
    _, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    names = [cells[3] for cells in lines]
    assert names == ["pp16", "pp20", "tg2@16", "tg2@16 x 2", "tg2@20", "tg2@20 x 2"]
    assert {tuple(cells[:3]) for cells in lines} == {("deepseek_v4 6L faithful", "15.8 MB", "host")}
    assert peak.startswith("peak memory: ")
    assert "1 threads" in done.stderr
    record = json.loads(cli("bench", compiled_tiny, *options, "--json").stdout)
    assert [r["case"] for r in record["results"]["host"]] == names
    assert set(record) == {
        "rewright",
        "target",
        "numerics",
        "kv",
        "precision",
        "model",
        "compiled_for",
        "processor",
        "cores",
        "vector",
        "threads",
        "read_bytes_per_second",
        "peak_memory",
        "results",
    }
    assert (record["target"], record["numerics"], record["threads"]) == ("host", "faithful", 1)
    assert record["read_bytes_per_second"] > 0
    assert 0 < record["peak_memory"]["process"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for result in record["results"]["host"]:
        tokens = (result["new"] or result["prompt"]) * result["batch"]
        (seconds,) = result["seconds"]
        assert (result["tokens"], result["warm_up_runs"]) == (tokens, 1)
        assert result["tokens_per_second"] == pytest.approx(tokens / seconds)
        assert result["spread"] == 0
        rate = result["bytes_per_token"] * result["tokens_per_second"]
        assert result["bytes_per_second"] == pytest.approx(rate)


def test_peers_run_the_same_cases_alone(cli: Callable, compiled_tiny: Path) -> None:
    options = ("-p", 8, "-n", 1, "-b", "1,2", "-r", 1, "--threads", 1, "--peers", "--json")
    done = cli("bench", compiled_tiny, *options)
    assert done.code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert set(results) == {"host", "reference", "torch bf16 eager"}
    for name in ("reference", "torch bf16 eager"):
        assert [r["case"] for r in results[name]] == ["pp8", "tg1@8"]
    table = cli("bench", compiled_tiny, *options[:-1]).stdout.split("\n\n")[0]
    for line in table.splitlines()[2:]:
        name, *_, rate, _, nbytes, _, share, ratio = [cell.strip() for cell in line.split("|")[3:-1]]
        assert float(rate.replace(",", "")) > 0
        assert bool(nbytes) == bool(share) == (not ratio) == (name == "host")


@pytest.mark.parametrize("options", [("-r", 0), ("-p", "x"), ("-b", "1,"), ("-p", 5000)])
def test_wrong_use_is_2(cli: Callable, compiled_tiny: Path, options: tuple) -> None:
    assert cli("bench", compiled_tiny, *options).code == 2
