"""The sampling kernel against the host's sampler: the same token for the same logits, seed and draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rewright.runtime import _native
from rewright.runtime.sampling import Sampler, SamplingOptions

RING, RING_ROWS = 5, 8
PLACES = [pytest.param("cpu", id="emulated"), pytest.param("cuda", id="card", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=PLACES)
def device(request: pytest.FixtureRequest) -> tuple[_native.Device, str]:
    if request.param == "cpu":
        return _native.open_emulation(2), "cpu"
    from rewright.runtime.card import open_card

    return open_card().device, "cuda"


@dataclass
class Rig:
    """Logits of some rows, and a sampler on them."""

    logits: Tensor
    inputs: Tensor
    ring: Tensor
    sampler: _native.DeviceSampler
    kept: tuple[Tensor, ...]

    def draw(self, at: int = 0) -> list[int]:
        """The tokens of one step, which go to place `at` of the ring; a row that is over shows none."""
        self.ring[at % RING] = _native.NOTHING_YET
        stream = torch.cuda.current_stream().cuda_stream if self.inputs.is_cuda else 0
        self.sampler.run(stream)
        if self.inputs.is_cuda:
            torch.cuda.synchronize()
        return self.ring[at % RING, : len(self.logits)].tolist()


@pytest.fixture
def rig(device: tuple[_native.Device, str]) -> Callable[..., Rig]:
    def make(
        logits: Tensor,
        options: Sequence[SamplingOptions],
        *,
        draw: int = 0,
        left: int = 1 << 20,
        stop: Sequence[int] = (),
        valid: Sequence[int] | None = None,
    ) -> Rig:
        card, where = device
        count, vocabulary = logits.shape
        logits = logits.to(where)
        rows = b"".join(
            _native.sample_row(o.temperature, o.top_p, o.seed, draw, left, list(stop)) for o in options
        )
        state = torch.frombuffer(bytearray(rows), dtype=torch.uint8).to(where)
        weights = torch.zeros(count, vocabulary, dtype=torch.int64, device=where)
        inputs = torch.zeros(4, count, dtype=torch.int32)
        inputs[1], inputs[2] = 7, torch.tensor(valid or [1] * count)
        inputs = inputs.to(where)
        ring = torch.full(
            (RING, RING_ROWS), _native.NOTHING_YET, dtype=torch.int32, pin_memory=where == "cuda"
        )
        sampler = _native.DeviceSampler(
            card,
            (logits.data_ptr(), logits.nbytes),
            count,
            state.data_ptr(),
            weights.data_ptr(),
            inputs.data_ptr(),
            ring.data_ptr(),
            RING,
            RING_ROWS,
        )
        return Rig(logits, inputs, ring, sampler, (state, weights))

    return make


def random_logits(seed: int, vocabulary: int, kind: str) -> Tensor:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    match kind:
        case "ties":
            return logits.round()
        case "bf16":
            return logits.bfloat16().float()
        case "peaked":
            logits[seed % vocabulary] += 30
        case "masked":
            logits[torch.arange(vocabulary) % 3 == seed % 3] = -torch.inf
        case "zeros":
            return torch.where(torch.arange(vocabulary) % 2 == 0, 0.0, -0.0)
        case "wide":
            logits *= 1000
    return logits


KINDS = ("plain", "ties", "bf16", "peaked", "masked", "zeros", "wide")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [1, 31, 1000, 4096])
def test_draws_are_the_host_samplers(rig: Callable[..., Rig], kind: str, vocabulary: int) -> None:
    if kind == "masked" and vocabulary == 1:
        pytest.skip("nothing would be left")
    options = [
        SamplingOptions(temperature, top_p, seed)
        for seed, (temperature, top_p) in enumerate(
            [(0, 1), (1, 1), (0.7, 1), (1, 0.9), (0.6, 0.95), (2.5, 0.3), (1, 1e-6), (1.3, 0.999)]
        )
    ]
    logits = torch.stack([random_logits(i, vocabulary, kind) for i in range(len(options))])
    hosts = [Sampler(o) for o in options]
    sampler = rig(logits, options)
    for at in range(6):
        assert sampler.draw(at) == [h.choose(row) for h, row in zip(hosts, logits, strict=True)]


def test_greedy_takes_the_lower_of_equal_logits(rig: Callable[..., Rig]) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [70, 4000]] = 1.0
    logits[1, [1023, 1024, 4999]] = -0.0
    logits[2] = -3.0
    assert rig(logits, [SamplingOptions(0)] * 3).draw() == [70, 0, 0]


def test_a_step_prepares_the_next(rig: Callable[..., Rig]) -> None:
    logits = torch.zeros(2, 40)
    logits[:, 9] = 1
    sampler = rig(logits, [SamplingOptions(0)] * 2, valid=[1, 0])
    assert [sampler.draw(at) for at in range(7)] == [[9, _native.NOTHING_YET]] * 7
    assert sampler.inputs.tolist() == [[9, 0], [14, 7], [1, 0], [0, 0]]


@pytest.mark.parametrize(("left", "stop", "steps"), [(3, (), 3), (9, (8, 9), 1), (2, (5,), 2)])
def test_a_row_masks_itself_when_it_is_over(
    rig: Callable[..., Rig], left: int, stop: tuple[int, ...], steps: int
) -> None:
    logits = torch.zeros(1, 40)
    logits[0, 9] = 1
    sampler = rig(logits, [SamplingOptions(0)], left=left, stop=stop)
    assert [sampler.draw(at)[0] for at in range(4)] == [9] * steps + [_native.NOTHING_YET] * (4 - steps)
    assert sampler.inputs[1:3, 0].tolist() == [7 + steps - 1, 0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers(rig: Callable[..., Rig], temperature: float) -> None:
    logits = torch.zeros(4, 3000)
    logits[0, [2000, 77]] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    sampler = rig(logits, [SamplingOptions(temperature, 0.5)] * 4)
    nan, *infinite, fine = sampler.draw()
    assert (nan, infinite) == (_native.NAN_FIRST - 77, [_native.NONE_FINITE] * 2)
    assert fine >= 0
    assert sampler.inputs[2].tolist() == [0, 0, 0, 1]


def test_what_a_sampler_does_not_take(rig: Callable[..., Rig]) -> None:
    with pytest.raises(_native.PlanError, match="at most 8 stop tokens"):
        _native.sample_row(1, 1, 0, 0, 1, list(range(9)))
    with pytest.raises(_native.PlanError, match="ring is too small"):
        rig(torch.zeros(9, 4), [SamplingOptions()] * 9)
    with pytest.raises(_native.PlanError, match="from 1 to 262144 logits"):
        rig(torch.zeros(1, (1 << 18) + 1), [SamplingOptions()])
