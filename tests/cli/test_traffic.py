"""`rewright graph traffic`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STAGES = ["traced", "canonical", "fused", "precision", "layout"]

Cli = Callable[..., Any]


def traffic(cli: Cli, *args: object) -> Any:
    return cli("graph", "traffic", *args)


def as_json(cli: Cli, *args: object) -> dict[str, Any]:
    done = traffic(cli, *args, "--format", "json")
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


def test_help_has_an_example(cli: Cli) -> None:
    done = traffic(cli, "--help")
    assert done.code == 0
    assert "Examples:" in done.stdout


def test_every_stage_then_the_last(cli: Cli, tiny_v4: Path) -> None:
    done = traffic(cli, tiny_v4, "--context", 256, "--top", 3)
    assert (done.code, done.stderr) == (0, "")
    title, totals, trips, floors, cards = done.stdout.split("\n\n")
    assert title == "decode-b1-c4096, faithful, context 256: bytes of one step"
    assert [line.split()[0] for line in totals.splitlines()[1:]] == STAGES
    assert trips.startswith("written and read again at stage layout: 3 of ")
    assert len(trips.splitlines()) == 1 + 1 + 3 + 1
    assert floors.startswith("floor at stage layout, bytes that the card moves in a step")
    assert len(cards.splitlines()) == 5


@pytest.mark.parametrize("options", [("--stage", "fused"), ("--all-stages",)])
def test_json_has_the_numbers_of_the_text(cli: Cli, tiny_v4: Path, options: tuple[str, ...]) -> None:
    spec = f"{tiny_v4}?passes=canonicalize,fuse_attention"  # fewer passes, less time
    text = traffic(cli, spec, *options, "--top", 4).stdout
    value = as_json(cli, spec, *options, "--top", 4)
    shown = sorted(STAGES) if "--all-stages" in options else ["fused"]
    assert list(value["stages"]) == list(value["floors"]) == shown
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    for name, totals in value["stages"].items():
        state = totals["state_written"] + totals["state_read"]
        activations = (totals["activations_written"], totals["activations_read"])
        amounts = (totals["nodes"], *activations, state, totals["weights"], totals["constants"])
        assert [name, *(f"{a:,}" for a in (*amounts, totals["total"]))] in lines
    assert value["round_trips"].keys() == value["floors"].keys()
    for trips in value["round_trips"].values():
        assert len(trips) == 4
        for trip in trips:
            amounts = [f"{trip[key]:,}" for key in ("total", "written", "read", "values")]
            rows = [line for line in lines if line[:6] == [*amounts, trip["value"], trip["producer"]]]
            assert counted(rows[0][6]) == trip["readers"]
    for floors in value["floors"].values():
        moved = floors["bytes"]
        assert ["total", f"{moved['total']:,}"] in lines
        assert ["held: weights, constants, state", f"{moved['resident']:,}"] in lines
        for name, floor in floors["cards"].items():
            cells = [name, f"{floor['bytes_per_second'] / 1e9:,.0f}", floor["rate"]]
            cells += [f"{floor['seconds'] * 1e3:,.3f}", f"{floor['tokens_per_second']:,.1f}"]
            assert [line for line in lines if line[:5] == cells]


def counted(text: str) -> dict[str, int]:
    """What `3 linear, 1 rope` says."""
    pairs = [part.split() for part in text.split(", ") if part != "-"]
    return {op: int(count) for count, op in pairs}


def test_one_stage(cli: Cli, tiny_v4: Path) -> None:
    by_option = traffic(cli, tiny_v4, "--stage", "canonical")
    assert by_option.code == 0
    assert by_option == traffic(cli, f"{tiny_v4}@canonical")
    assert "traced" not in by_option.stdout
    done = traffic(cli, f"{tiny_v4}@canonical", "--all-stages")
    assert (done.code, done.stdout) == (2, "")


def test_a_compiled_model(cli: Cli, tiny_v4: Path, compiled_tiny: Path) -> None:
    found = as_json(cli, compiled_tiny, "--context", 512)
    assert list(found["stages"]) == sorted(STAGES)
    limits = "max-context=1024&max-batch=4"
    wanted = as_json(cli, f"{tiny_v4}@layout?{limits}", "--context", 512)
    assert {**found, "stages": {"layout": found["stages"]["layout"]}} == wanted


def test_flash(cli: Cli, repo_root: Path) -> None:
    """The weights are those that tests/frontend/test_bytes.py asserts."""
    config = f"{repo_root / 'examples/configs/v4-flash.json'}@traced"
    done = traffic(cli, config, "--context", 1024, "--card", "h200")
    assert done.code == 0
    totals = done.stdout.splitlines()[3].split()
    assert (totals[0], totals[5]) == ("traced", "11,212,055,916")
    assert " 43  layers.*.attn.q " in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("h200  4,340  measured  ")
    assert last.endswith("does not fit: needs 156.06 GB of 141 GB")


def test_a_chunk_says_what_a_floor_leaves_out(cli: Cli, tiny_v4: Path) -> None:
    done = traffic(cli, f"{tiny_v4}@traced?variant=chunk")
    assert done.code == 0
    assert "leaves arithmetic out" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--card", "h100"), "cards: a100-80g-pcie, a100-80g-sxm, a800-80g-pcie, h200"),
        (("--tp", 2), "--tp 2: expert width: 128 / 2 = 64 is no multiple of 128\n  -> sizes: 1\n"),
        (("--tp", 3), "--tp 3: attention heads: 8 is no multiple of 3; "),
        (("--tp", 0), "sizes: 1"),
        (("--context", 0), "choose from 1 to 4096"),
        (("--context", 4097), "choose from 1 to 4096"),
        (("--format", "yaml"), "text or json"),
        (("--stage", "molten"), "traced"),
        (("--top", 0), "--top"),
    ],
)
def test_wrong_use_is_2(cli: Cli, tiny_v4: Path, options: tuple[object, ...], says: str) -> None:
    code, stdout, stderr = traffic(cli, tiny_v4, *options)
    assert (code, stdout) == (2, "")
    assert says in stderr
    assert "Traceback" not in stderr


def test_a_path_that_is_not_there_is_3(cli: Cli, tmp_path: Path) -> None:
    assert traffic(cli, tmp_path / "none").code == 3
