"""`rewright bench --random-weights`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rewright.runtime import card

SHORT = ("-p", 8, "-n", 2, "-r", 1, "--layers", 3)


@pytest.mark.parametrize("target", ["host", "sm80"])
def test_a_configuration_is_measured(
    cli: Callable, tiny_v4: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(card.EMULATE, "1")
    config = tiny_v4 / "config.json"
    options = ("--target", target, "-b", "1,2", "--max-context", 256, "--threads", 1)
    done = cli("bench", "--random-weights", config, *SHORT, *options, "--json")
    assert done.code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["target"] == target
    assert [r["case"] for r in record["results"][target]] == ["pp8", "tg2@8", "tg2@8 x 2"]
    said = record["random_weights"]
    assert (said["config"], said["layers"]) == (str(config), 3)
    assert (said["max_context"], said["max_batch"]) == (256, 2)
    assert said["weight_bytes"] > 3_000_000


def test_limits_follow_from_what_is_measured(cli: Callable, tiny_v4: Path) -> None:
    done = cli("bench", "--random-weights", tiny_v4, *SHORT, "-b", 3, "--target", "host", "--json")
    said = json.loads(done.stdout)["random_weights"]
    assert (said["max_context"], said["max_batch"], said["chunk"]) == (4096, 3, 128)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("OUT", "--random-weights", "CONFIG"), "name one model"),
        ((), "name one model"),
        (("OUT", "--layers", 2, "--no-pass", "fuse_moe"), "--no-pass, --layers cannot change"),
        (("--random-weights", "CONFIG", "--layers", 7), "7 is not from 1 to the model's 6 layers"),
        (("--random-weights", "CONFIG", "--peers"), "--peers"),
        (("--random-weights", "CONFIG", "-p", 300, "--max-context", 256), "do not fit"),
        (("--random-weights", "CONFIG", "--no-pass", "x"), "there is no pass x"),
        (("--random-weights", "CONFIG", "--target", "gpu"), "no target 'gpu'"),
    ],
)
def test_wrong_use_is_2(cli: Callable, compiled_tiny: Path, tiny_v4: Path, options: tuple, says: str) -> None:
    named = {"OUT": compiled_tiny, "CONFIG": tiny_v4 / "config.json"}
    done = cli("bench", *(named.get(o, o) for o in options))
    assert done.code == 2, done.stderr
    assert says in done.stderr


def test_no_configuration_is_3(cli: Callable, tmp_path: Path) -> None:
    assert cli("bench", "--random-weights", tmp_path / "absent.json").code == 3
    assert cli("bench", "--random-weights", tmp_path).code == 3


def test_a_model_that_does_not_fit_is_4(
    cli: Callable, tiny_v4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewright.runtime.memory.total_bytes", lambda: 15_000_000)
    done = cli("bench", "--random-weights", tiny_v4, "-p", 8, "-n", 1, "--target", "host")
    assert done.code == 4, done.stderr
    assert "this machine has 15,000,000 free" in done.stderr
    assert "--layers" in done.stderr
