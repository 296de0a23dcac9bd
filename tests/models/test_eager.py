"""The traced graph against the modules it was traced from, run eagerly on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stepper import Saved, Stepper
from torch import Tensor

from rewright.frontend.layers import Step, bind
from rewright.ir.variant import Variant

POSITIONS = [0, 3, 4, 5, 127, 128, 129, 130, 255, 256]
CAPACITY = 512


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=["faithful", "fp32"])
def stepper(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_checkpoint: Callable[..., Path],
) -> Stepper:
    """A model with all kinds of layers and both routers, index lists binding."""
    folder = make_checkpoint(tmp_path_factory.mktemp("eager"), {"vocab_size": 256}, seed=6)
    run = Stepper.open(folder, request.param, max_batch=2, capacity=CAPACITY)
    bind(run.source.model, run.weights)
    return run


@pytest.fixture(scope="module")
def before(stepper: Stepper, ids: list[int]) -> dict[int, Saved]:
    """State in front of every position: slot 0 holds the sequence, slot 1 another one."""
    run = stepper.fresh()
    run.prefill(ids[::-1][:40], slot=1)
    saved = {}
    for position in POSITIONS:
        if todo := ids[run.positions[0] : position]:
            run.prefill(todo)
        saved[position] = run.save()
    return saved


def eager(stepper: Stepper, inputs: dict[str, Tensor], state: dict[str, Tensor], all_positions: bool = False):
    """Logits and next state of one step of the modules themselves."""
    step = Step(**inputs, state=dict(state), capacity=CAPACITY, all_positions=all_positions)
    return stepper.source.model(step)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def check(stepper: Stepper, variant: Variant, inputs: dict[str, Tensor], saved: Saved) -> None:
    """Graph and modules agree in every bit of logits and state, and the modules leave their input alone."""
    given, running = ({n: t.clone() for n, t in saved.state.items()} for _ in range(2))
    wanted, following = eager(stepper, inputs, given, variant.all_positions)
    got = stepper.interpreter(variant).run(inputs, running)["logits"]
    assert got.isfinite().all()
    assert same_bits(got, wanted)
    assert following.keys() == running.keys() == given.keys()
    assert not [n for n in following if not same_bits(following[n], running[n])]
    assert not [n for n in given if not same_bits(given[n], saved.state[n])]
    rings = [n for n in given if n.endswith(("window", "ring"))]
    assert not [n for n in rings if same_bits(following[n], given[n])], "every layer wrote its rings"


def vectors(**values: list[int] | list[list[int]]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}


@pytest.mark.parametrize("position", POSITIONS)
def test_decode(stepper: Stepper, before: dict[int, Saved], ids: list[int], position: int) -> None:
    """One graph for all positions: nothing of it was fixed while tracing."""
    inputs = vectors(tokens=[[ids[position]]], pos=[position], n_valid=[1], slot=[0])
    check(stepper, Variant(1, 1, CAPACITY), inputs, before[position])


@pytest.mark.parametrize("position", [0, 127, 130])
def test_decode_of_two_slots(
    stepper: Stepper, before: dict[int, Saved], ids: list[int], position: int
) -> None:
    inputs = vectors(tokens=[[9], [ids[position]]], pos=[40, position], n_valid=[1, 1], slot=[1, 0])
    check(stepper, Variant(1, 2, CAPACITY), inputs, before[position])


@pytest.mark.parametrize("all_positions", [False, True])
@pytest.mark.parametrize("position", [0, 5, 127])
def test_a_chunk(
    stepper: Stepper, before: dict[int, Saved], ids: list[int], position: int, all_positions: bool
) -> None:
    inputs = vectors(tokens=[ids[position : position + 20]], pos=[position], n_valid=[17], slot=[0])
    check(stepper, Variant(20, 1, CAPACITY, all_positions), inputs, before[position])
