"""Launches that overlap against the same launches one after the other, and against recorded graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rewright.compiler import CompileOptions, compile_model
from rewright.runtime import card
from rewright.runtime.card import open_card
from rewright.runtime.decode_loop import Start
from rewright.runtime.device import DeviceModel
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.model import Row
from rewright.runtime.sampling import SamplingOptions

PROMPT = tuple(range(5, 13))
LONG = 256


@pytest.fixture(scope="module")
def artifact(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("overlap") / "out"
    compile_model(tiny_v4, out, CompileOptions(max_context=512, max_batch=8, target="sm80"))
    return Artifact.open(out)


def steps(
    artifact: Artifact, batch: int, count: int, *, overlap: bool, graphs: bool
) -> tuple[Tensor, Tensor]:
    """Logits of a prompt and of `count` tokens behind it, and the state then."""
    model = DeviceModel(artifact, open_card(), overlap=overlap, graphs=graphs)
    logits = [model.step([Row(PROMPT, 0, slot) for slot in range(batch)]).clone()]
    for i in range(count):
        logits.append(model.step([Row((31 * i + s,), 8 + i, s) for s in range(batch)]).clone())
    if overlap:
        programs = model._programs.values()
        assert all(p.early > p.launches // 3 and p.aside > 0 for p in programs)
    return torch.cat(logits).cpu(), model.state.cpu()


@pytest.mark.parametrize("batch", [1, 2])
def test_emulated(artifact: Artifact, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setenv(card.EMULATE, "1")
    check(artifact, batch, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_on_a_card(artifact: Artifact, batch: int) -> None:
    check(artifact, batch, 64)


def check(artifact: Artifact, batch: int, count: int) -> None:
    """Bit for bit: overlapped launches change no order of sums."""
    alone = steps(artifact, batch, count, overlap=False, graphs=False)
    for graphs in (False, True):
        logits, state = steps(artifact, batch, count, overlap=True, graphs=graphs)
        assert torch.equal(logits, alone[0])
        assert torch.equal(state, alone[1])


@pytest.mark.gpu
def test_a_graph_draws_the_tokens_of_single_launches(artifact: Artifact) -> None:
    def drawn(*, overlap: bool, graphs: bool) -> list[int]:
        engine = Engine(artifact, model=DeviceModel(artifact, open_card(), overlap=overlap, graphs=graphs))
        engine.prefill(0, list(PROMPT))
        start = Start(7, len(PROMPT), 0, LONG, SamplingOptions(temperature=0.7, seed=3))
        return [step[0] for step in engine.decode_loop([start])]

    alone = drawn(overlap=False, graphs=False)
    assert len(alone) == LONG
    assert drawn(overlap=True, graphs=True) == drawn(overlap=True, graphs=False) == alone
