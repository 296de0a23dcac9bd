"""Logits that are no numbers: every way of executing a model names the sequence and the position."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rewright.compiler import CompileOptions, compile_model
from rewright.ir.errors import MachineError
from rewright.runtime import card
from rewright.runtime.engine import Engine
from rewright.runtime.generate import GenerateOptions, generate
from rewright.runtime.load import Artifact
from rewright.runtime.logit_check import require_likelihoods, require_numbers
from rewright.runtime.sampling import Sampler, SamplingOptions
from rewright.runtime.score import Case, score_cases

BROKEN = 7
"""The token with an embedding of NaN: logits are numbers up to the first place where it is read."""
GOOD = [3, 9, 4, 11, 5, 12, 6, 13, 8, 14]
GREEDY = GenerateOptions(SamplingOptions(temperature=0), 4)
PLACES = ("host", "reference", "sm80")


def break_embedding(artifact: Artifact) -> None:
    """Write NaN into a row of the compiled model's shard: the compiler itself takes no NaN."""
    shard = artifact.folder / artifact.manifest.tensors["embed.weight"]
    data = bytearray(shard.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:header])["embed.weight"]
    assert entry["dtype"] == "BF16"
    row_bytes = 2 * entry["shape"][1]
    begin = header + entry["data_offsets"][0] + BROKEN * row_bytes
    data[begin : begin + row_bytes] = b"\xc0\x7f" * entry["shape"][1]
    shard.write_bytes(data)


@pytest.fixture(scope="module")
def compiled(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("broken")
    checkpoint = make_checkpoint(
        folder / "checkpoint", {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0]}
    )
    found: dict[str, Path] = {}

    def of(target: str) -> Artifact:
        if target not in found:
            options = CompileOptions(max_context=128, max_batch=2, chunk=4, target=target)
            compile_model(checkpoint, folder / target, options)
            break_embedding(Artifact.open(folder / target))
            found[target] = folder / target
        return Artifact.open(found[target])

    return of


@pytest.fixture(params=PLACES)
def engine(request: pytest.FixtureRequest, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv(card.EMULATE, "1")
    artifact = compiled("sm80" if request.param == "sm80" else "host")
    return Engine(artifact, reference=request.param == "reference", threads=1)


def raised(where: str) -> Any:
    return pytest.raises(MachineError, match=rf"^{where}: the logit of token 0 is NaN\n  -> .*--reference")


def test_scores_name_the_token_that_cannot_be_predicted(engine: Engine) -> None:
    """The broken token is the one at 6, of the second chunk: the next one has no likelihood."""
    ids = [*GOOD[:6], BROKEN, *GOOD[6:]]
    assert engine.score(0, ids[:7]).isfinite().all()
    with raised("a text, position 7"):
        engine.score(0, ids, "a text")


def test_cases_name_the_case(engine: Engine) -> None:
    for case, position in (
        (Case([*GOOD[:4], BROKEN], 3, False, 0), 5),
        (Case([*GOOD[:4], BROKEN, 3], 5, False, 0), 5),
        (Case([*GOOD[:3], BROKEN], None, False, 2), 4),
        (Case([BROKEN, 3], None, True, 0), 1),
    ):
        with raised(f"case bad, position {position}"):
            score_cases(engine, {"bad": case}, lambda count: None)


def test_generation_names_the_prompt(engine: Engine) -> None:
    assert len(list(generate(engine, [GOOD], GREEDY))) == 4
    with raised("prompt 2, position 3"):
        list(generate(engine, [GOOD, [3, 4, BROKEN]], GREEDY))


def test_what_cannot_be_chosen_from_cannot_be_scored() -> None:
    """`require_numbers` and the sampler refuse the same logits."""
    nan, inf = torch.nan, torch.inf
    for values in ([0.0, nan], [nan, inf], [inf, 0.0], [inf, inf], [-inf, -inf], [-inf, 0.0], [1.0, 2.0]):
        logits = torch.tensor(values)
        refused = []
        for check in (
            lambda logits=logits: require_numbers(logits, "x", 1),
            lambda logits=logits: Sampler(SamplingOptions(temperature=0)).choose(logits),
        ):
            try:
                check()
            except MachineError:
                refused.append(True)
            else:
                refused.append(False)
        assert refused in ([True, True], [False, False]), values


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([0.0, torch.nan, torch.inf], "the logit of token 1 is NaN"),
        ([0.0, 1.0, torch.inf], "the logit of token 2 is infinite"),
        ([-torch.inf] * 3, "no logit is finite"),
        ([0.0, -torch.inf, 1.0], "the logit of token 1 is infinite"),
    ],
)
def test_likelihoods_that_are_no_numbers(row: list[float], says: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], row])
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 1]), reduction="none")
    with pytest.raises(MachineError, match=rf"text 5, position 41: {says}"):
        require_likelihoods(nll, logits, "text 5", 40)
    require_likelihoods(nll[:1], logits[:1], "text 5", 40)


def test_the_command_line(cli: Any, compiled: Any, tmp_path: Path) -> None:
    out = compiled("host").folder
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps({"odd": {"ids": [1, BROKEN, 2], "nll": True}}))
    for extra in ((), ("--reference",)):
        done = cli("score", out, "--ids", cases, "--logits", tmp_path / "found", *extra)
        assert (done.code, done.stdout) == (4, "")
        assert done.stderr.startswith("error: case odd, position 2: the logit of token 0 is NaN")
        assert not (tmp_path / "found").exists()
