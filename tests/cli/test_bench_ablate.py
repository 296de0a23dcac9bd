"""`rewright bench --ablate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rewright.cli import bench_model
from rewright.compiler import CompileOptions
from rewright.ir.errors import Refused
from rewright.ir.launch_bytes import launch_bytes
from rewright.ir.variant import Variant
from rewright.passes.manager import PassOptions
from rewright.passes.pipelines import pass_names
from rewright.random_artifact import compile_random
from rewright.runtime import card

SHORT = ("--layers", 3, "--max-context", 256, "-n", 1, "-r", 1, "--threads", 1, "--ablate")


def keep_passes(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Only these passes are left out one by one; all of them still run by default."""
    monkeypatch.setattr("rewright.passes.pipelines.pass_names", lambda: names)


def planned(config: Path, target: str, without: tuple[str, ...], variant: Variant, context: int):
    """Launches and bytes of a step."""
    import torch

    options = CompileOptions(
        max_context=256, target=target, passes=PassOptions.of(None, without), max_batch=variant.batch
    )
    batches = (variant.batch,)
    made = compile_random(config, options, torch.device("cpu"), layers=3, batches=batches, context=context)
    plan = made.plans[variant]
    return len(plan.launches), sum(moved.total for moved in launch_bytes(plan, context))


@pytest.mark.parametrize(
    ("target", "chosen"),
    [("host", pass_names()), ("sm80", ("eliminate_quant", "fuse_norm_quant", "fuse_moe"))],
)
def test_every_pass_is_left_out_once(
    cli: Callable, tiny_v4: Path, monkeypatch: pytest.MonkeyPatch, target: str, chosen: tuple[str, ...]
) -> None:
    monkeypatch.setenv(card.EMULATE, "1")
    keep_passes(monkeypatch, chosen)
    config = tiny_v4 / "config.json"
    batch = "1,2" if target == "host" else "2"
    done = cli(
        "bench", "--random-weights", config, *SHORT, "-p", 4, "-b", batch, "--target", target, "--json"
    )
    assert done.code == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["target"], record["random_weights"]["layers"]) == (target, 3)
    rows = {row["name"]: row for row in record["ablation"]}
    assert list(rows) == [
        "default",
        *(f"without {name}" for name in chosen),
        "without any pass",
        "default again",
    ]
    default = rows["default"]
    for name, row in rows.items():
        assert row["graphs"]
        for found, usual in zip(row["cases"], default["cases"], strict=True):
            assert found["ratio"] == pytest.approx(found["us"] / usual["us"])
            if name in ("default", "default again", "without any pass", "without fuse_moe"):
                variant = Variant(1, int(found["case"].partition(" x ")[2] or 1), 128)
                expected = planned(config, target, tuple(row["without"]), variant, 5)
                assert (found["launches"], found["bytes"]) == expected
    usual = default["cases"][-1]
    for name in ("without fuse_moe", "without eliminate_quant", "without any pass"):
        assert rows[name]["cases"][-1]["launches"] > usual["launches"]
        assert not rows[name]["cases"][-1]["same_launches"]
    assert rows["default again"]["cases"][-1]["same_launches"]
    assert rows["without any pass"]["without"] == list(chosen)
    if target == "sm80":  # its phases take the parts, fused before or not
        assert rows["without fuse_norm_quant"]["cases"][-1]["same_launches"]


def test_the_table(cli: Callable, tiny_v4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_passes(monkeypatch, ("fold_wo", "fuse_moe"))
    done = cli(
        "bench", "--random-weights", tiny_v4, *SHORT, "-p", 4, "--target", "host", "--no-pass", "fold_wo"
    )
    assert done.code == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title == "tg1@4: a decode step at 5 tokens"
    assert head.split() == ["us", "spread", "ratio", "launches", "bytes"]
    names = [row.split("  ")[0] for row in rows]
    assert names == ["default", "without fuse_moe", "without any pass", "default again"]
    ratios = [float(row.split()[-3]) for row in rows]
    assert ratios[0] == 1
    assert [row.split()[-2][-1] == "=" for row in rows] == [True, False, False, True]


def test_a_plan_without_a_kernel_is_a_row_that_says_so(
    cli: Callable, tiny_v4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_passes(monkeypatch, ("fold_wo", "fuse_moe"))
    usual = bench_model.BenchModel.artifact

    def artifact(self: bench_model.BenchModel, without: list[str] = [], progress=None):  # noqa: B006
        if without == ["fuse_moe"]:
            raise Refused("no kernel of target host computes it")
        return usual(self, without, progress)

    monkeypatch.setattr(bench_model.BenchModel, "artifact", artifact)
    options = ("--random-weights", tiny_v4, *SHORT, "-p", 4, "--target", "host")
    done = cli("bench", *options)
    assert done.code == 0, done.stderr
    assert "without fuse_moe: no kernel of target host computes it" in done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("without fuse_moe"))
    assert row.split() == ["without", "fuse_moe", "not", "run"]
    rows = json.loads(cli("bench", *options, "--json").stdout)["ablation"]
    assert [row.get("refused") for row in rows][2] == "no kernel of target host computes it"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("OUT",), "--random-weights CONFIG --ablate"),
        (("--random-weights", "CONFIG", "-n", 0), "no decode step"),
        (("--random-weights", "CONFIG", "--stages"), "does not go with --stages"),
        (("--random-weights", "CONFIG", "--trace", "x.json"), "does not go with --trace"),
        (("--random-weights", "CONFIG", "--compare", "x.json"), "does not go with --compare"),
        (("--random-weights", "CONFIG", "--plot", "x.png"), "does not go with --plot"),
        (("--random-weights", "CONFIG", "--format", "csv"), "tables of their own"),
    ],
)
def test_wrong_use_is_2(cli: Callable, compiled_tiny: Path, tiny_v4: Path, options: tuple, says: str) -> None:
    named = {"OUT": compiled_tiny, "CONFIG": tiny_v4 / "config.json"}
    done = cli("bench", *(named.get(o, o) for o in options), "--ablate")
    assert done.code == 2, done.stderr
    assert says in done.stderr
