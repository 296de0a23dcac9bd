"""The device model, on the emulation and on a card: steps, decode loops, generation, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_artifact import CAPACITIES, LIMITS, constant_artifact, expected_logits

from rewright.ir.errors import BadInput, MachineError, UsageError
from rewright.ir.plan import plan_path
from rewright.runtime import _native, card
from rewright.runtime.bench import Case, measure_seconds
from rewright.runtime.card import Card, open_card
from rewright.runtime.decode_loop import AHEAD, Start
from rewright.runtime.device import DeviceModel
from rewright.runtime.engine import Engine
from rewright.runtime.generate import GenerateOptions, Token, generate
from rewright.runtime.load import Artifact
from rewright.runtime.model import Row
from rewright.runtime.sampling import Sampler, SamplingOptions

PLACES = [pytest.param(True, id="emulated"), pytest.param(False, id="card", marks=pytest.mark.gpu)]
GREEDY = SamplingOptions(temperature=0)
WARM = SamplingOptions(temperature=1.5, top_p=0.8, seed=11)


@pytest.fixture(params=PLACES)
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    if request.param:
        monkeypatch.setenv(card.EMULATE, "1")
    return open_card()


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return constant_artifact(tmp_path)


@pytest.fixture
def engine(artifact: Artifact, opened: Card) -> Engine:
    return Engine(artifact, model=DeviceModel(artifact, opened))


class WithoutLoop:
    """The same model with no loop of its own: the host draws every token."""

    def __init__(self, model: DeviceModel):
        self._model = model
        self.step = model.step

    @property
    def precision(self) -> str:
        return self._model.precision

    @precision.setter
    def precision(self, value: str) -> None:
        self._model.precision = value


@pytest.mark.parametrize(("given", "on"), [("", False), ("0", False), ("1", True), ("banana", None)])
def test_the_emulation_is_on_or_off(monkeypatch: pytest.MonkeyPatch, given: str, on: bool | None) -> None:
    monkeypatch.setenv(card.EMULATE, given)
    if on is None:
        with pytest.raises(UsageError, match="REWRIGHT_EMULATE: 'banana' is neither 0 nor 1"):
            card.emulating()
    else:
        assert card.emulating() is on


def test_a_step_gives_the_logits_of_its_variant(artifact: Artifact, opened: Card) -> None:
    model, expected = DeviceModel(artifact, opened), expected_logits(artifact)
    for rows in ([Row((1,), 0, 0)], [Row((1,), 200, 2)], [Row((i,), i, i) for i in range(3)]):
        torch.testing.assert_close(model.step(rows).cpu(), expected[: len(rows)])
    chunk = Row((1, 2, 3), 0, 0)
    torch.testing.assert_close(model.step([chunk, chunk]).cpu(), expected[[0, 0]])
    torch.testing.assert_close(model.step([chunk], all_positions=True).cpu(), expected[None, :3])


def test_the_memory_is_what_the_manifest_says(artifact: Artifact, opened: Card) -> None:
    loaded: list[int] = []
    model = DeviceModel(artifact, opened, loading=loaded.append)
    assert sum(loaded) == model.weight_bytes <= artifact.weight_bytes
    assert model.state.nbytes == model.state_bytes == artifact.manifest.memory.state_bytes


def test_scores_are_those_of_the_logits(engine: Engine, artifact: Artifact) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    rows = expected_logits(artifact)[[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]]
    expected = torch.nn.functional.cross_entropy(rows, torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(engine.score(0, ids), expected)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, SamplingOptions(seed=5)])
def test_a_loop_draws_what_the_host_would(
    engine: Engine, artifact: Artifact, sampling: SamplingOptions
) -> None:
    """Across a boundary of capacities, in two loops."""
    slots = (2, 0)
    for slot in slots:
        engine.prefill(slot, [1] * (CAPACITIES[0] - 2))
    hosts = [Sampler(sampling) for _ in slots]
    logits = expected_logits(artifact)
    for _ in range(2):
        before = [engine.length(s) for s in slots]
        starts = [
            Start(3, engine.length(s), s, 5, sampling, h.draws) for s, h in zip(slots, hosts, strict=True)
        ]
        for drawn in engine.decode_loop(starts):
            assert drawn == {
                s: h.choose(logits[i]) for i, (s, h) in enumerate(zip(slots, hosts, strict=True))
            }
        assert [engine.length(s) for s in slots] == [b + 5 for b in before]


def test_sequences_of_a_loop_end_one_by_one(engine: Engine) -> None:
    engine.prefill(0, [1])
    engine.prefill(1, [1, 1])
    starts = [Start(1, 1, 0, 2, GREEDY), Start(1, 2, 1, 70, GREEDY)]
    drawn = list(engine.decode_loop(starts))
    assert [sorted(step) for step in drawn] == [[0, 1]] * 2 + [[1]] * 68
    assert [engine.length(s) for s in (0, 1)] == [3, 72]
    assert isinstance(engine.model, DeviceModel)
    _ids, pos, n_valid, slot = engine.model._inputs[:8].view(4, 2).tolist()
    assert (pos, n_valid, slot) == ([2, 71], [0, 0], [0, 1])  # of the last token that each was fed


def test_a_loop_that_is_ended_or_closed_counts_what_it_fed(engine: Engine) -> None:
    engine.prefill(0, [1])
    loop = engine.decode_loop([Start(1, 1, 0, 100, GREEDY)])
    steps = iter(loop)
    next(steps)
    loop.end()
    left = sum(1 for _ in steps)
    assert left < 8
    assert engine.length(0) == 2 + left
    loop = engine.decode_loop([Start(1, 2 + left, 0, 100, GREEDY)])
    next(iter(loop))
    loop.close()
    assert engine.length(0) == 2 * (2 + left) - 1


def events(engine: Engine, prompts: list[list[int]], options: GenerateOptions) -> dict[int, list[Token]]:
    found: dict[int, list[Token]] = {i: [] for i in range(len(prompts))}
    for event in generate(engine, prompts, options):
        found[event.request].append(event)
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 9, None])
@pytest.mark.parametrize("stops", [0, 1, 40, 9])
def test_generation_is_the_same_where_the_host_draws(
    artifact: Artifact, opened: Card, count: int | None, stops: int
) -> None:
    """One prompt at a time, since the logits belong to places of the batch."""
    model = DeviceModel(artifact, opened)
    ours, theirs = Engine(artifact, model=model), Engine(artifact, model=WithoutLoop(model))
    assert ours.can_loop()
    assert not theirs.can_loop()
    stop = frozenset(torch.randperm(96, generator=torch.Generator().manual_seed(2))[:stops].tolist())
    options = GenerateOptions(WARM, count, stop)
    for prompt in ([1], [2] * 30, [3] * 255, [3] * 256):
        assert events(ours, [prompt], options) == events(theirs, [prompt], options)
        assert ours.length(0) == theirs.length(0)


@pytest.mark.parametrize(("stop_on_repetition", "count"), [(True, 32), (False, 50)])
def test_a_loop_is_found_where_the_host_draws_or_not(
    artifact: Artifact, opened: Card, stop_on_repetition: bool, count: int
) -> None:
    """One sequence alone gets the same token over and over."""
    model = DeviceModel(artifact, opened)
    options = GenerateOptions(GREEDY, 50, frozenset(), stop_on_repetition)
    for engine in (Engine(artifact, model=model), Engine(artifact, model=WithoutLoop(model))):
        (found,) = events(engine, [[1]], options).values()
        assert [at for at, e in enumerate(found) if e.loop] == [31]
        assert (len(found), found[-1].finish) == (count, "repetition" if stop_on_repetition else "length")
        assert engine.length(0) <= count + AHEAD  # a card is not left to draw for nobody


def test_sequences_end_in_loops_one_by_one(engine: Engine) -> None:
    """Three at a time, two that wait: what was drawn for one that had ended is dropped, the others go on.
    The token depends on the place in the batch, so it changes for those behind one that ends."""
    options = GenerateOptions(GREEDY, 200, stop_on_repetition=True)
    found = events(engine, [[1], [2] * 9, [3] * 17, [4], [5]], options)
    for each in found.values():
        assert each[-1].finish == "repetition"
        assert [at for at, e in enumerate(each) if e.loop or e.finish] == [len(each) - 1]
        assert len({e.token for e in each[-32:]}) == 1


def test_prompts_wait_for_slots(engine: Engine) -> None:
    prompts = [[1] * n for n in (1, 9, 3, 200, 17)]
    found = events(engine, prompts, GenerateOptions(GREEDY, 12))
    assert [len(e) for e in found.values()] == [12] * 5
    assert [e[-1].finish for e in found.values()] == ["length"] * 5


def test_generation_may_be_given_up(engine: Engine) -> None:
    stream = generate(engine, [[1], [1, 2]], GenerateOptions(GREEDY))
    for _ in range(9):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(events(engine, [[1]], GenerateOptions(GREEDY, 4))[0]) == 4


def test_logits_that_are_no_numbers_are_named(tmp_path: Path, opened: Card) -> None:
    artifact = constant_artifact(tmp_path, seed=-1)
    engine = Engine(artifact, model=DeviceModel(artifact, opened))
    engine.prefill(0, [1])
    with pytest.raises(MachineError, match=r"^slot 0, position 2: the logit of token 0 is NaN"):
        list(engine.decode_loop([Start(1, 1, 0, 4, GREEDY)]))
    engine.prefill(1, [1, 1])
    with pytest.raises(MachineError, match=r"^prompt 5, position 3: the logit of token 0 is NaN"):
        list(engine.decode_loop([Start(1, 2, 1, 4, GREEDY, name="prompt 5")]))


@pytest.fixture
def two(tmp_path: Path, opened: Card) -> Engine:
    """An engine of a model with high variants."""
    artifact = constant_artifact(tmp_path, high=True)
    return Engine(artifact, model=DeviceModel(artifact, opened))


def test_steps_switch_between_precisions(two: Engine) -> None:
    model, steps = two.model, [("low", 1), ("high", 1), ("low", 3), ("high", 3), ("low", 1), ("high", 1)]
    assert isinstance(model, DeviceModel)
    for precision, count in steps * 2:
        two.precision = precision
        expected = expected_logits(two.artifact, precision)
        rows = [Row((i,), i, i) for i in range(count)]
        torch.testing.assert_close(model.step(rows).cpu(), expected[:count])
        scored = model.step([Row((1, 2, 3), 0, 0)], all_positions=True).cpu()
        torch.testing.assert_close(scored, expected[None, :3])
    assert len(model._programs) == len(model._steps) == 6  # each is bound, and recorded, once


def test_a_loop_is_of_one_precision(two: Engine) -> None:
    """Across a boundary of capacities; what is chosen while it runs is for the next one."""
    two.prefill(0, [1] * (CAPACITIES[0] - 2))
    for precision in ("high", "low"):
        two.precision = precision
        best = int(expected_logits(two.artifact, precision)[0].argmax())
        loop = two.decode_loop([Start(3, two.length(0), 0, 5, GREEDY)])
        assert [drawn[0] for drawn in loop] == [best] * 5
    assert isinstance(two.model, DeviceModel)
    names = {variant.name for variant, sampled in two.model._steps if sampled}
    shapes = ("decode-b1-c128", "decode-b1-c256")
    assert names == {f"{shapes[0]}-high", f"{shapes[1]}-high", shapes[1]}


def test_prompts_of_several_precisions(two: Engine) -> None:
    """Five for three places, drawn on the card and by the host."""
    precisions = ("high", "low", "high", "low", "low")
    prompts = [[1], [2] * 9, [3] * 17, [4], [5]]
    assert isinstance(two.model, DeviceModel)
    other = Engine(two.artifact, model=WithoutLoop(two.model))
    best = {p: expected_logits(two.artifact, p).argmax(-1).tolist() for p in ("low", "high")}
    for engine in (two, other):
        found: list[list[int | None]] = [[] for _ in prompts]
        for event in generate(engine, prompts, GenerateOptions(GREEDY, 6), precisions):
            found[event.request].append(event.token)
        assert [len(tokens) for tokens in found] == [6] * 5
        for tokens, precision in zip(found, precisions, strict=True):
            assert set(tokens) <= set(best[precision])


def test_a_benchmark_decodes_ahead(engine: Engine) -> None:
    assert measure_seconds(engine, Case(20, 9, 3)) > 0
    assert [engine.length(s) for s in range(3)] == [29] * 3


@pytest.mark.gpu
def test_steps_are_recorded_and_change_nothing(artifact: Artifact) -> None:
    models = [DeviceModel(artifact, open_card(), graphs=graphs) for graphs in (True, False)]
    for rows in ([Row((1,), 0, 0)], [Row((i,), i, i) for i in range(3)]):
        recorded, eager = (m.step(rows).cpu() for m in models)
        assert torch.equal(recorded, eager)
    assert [step.recorded for m in models for step in m._steps.values()] == [True, True, False, False]


def test_what_the_card_cannot_hold_is_refused_before_it_is_loaded(artifact: Artifact, opened: Card) -> None:
    huge = replace(artifact.manifest.memory, state_bytes=1 << 50)
    larger = replace(artifact, manifest=replace(artifact.manifest, memory=huge))
    with pytest.raises(MachineError, match=r"need 1,125,\d+,[\d,]+ bytes, .* has [\d,]+ free"):
        DeviceModel(larger, opened, loading=lambda count: pytest.fail("loaded"))


def test_plans_that_cannot_be_executed(artifact: Artifact, opened: Card) -> None:
    path = artifact.folder / plan_path("decode-b1-c128")
    text = path.read_text()
    for bad, error, message in (
        (text.replace("sm80.rms_norm", "sm80.rms_nrom"), BadInput, r"sm80\.rms_nrom.*no such kernel"),
        (text.replace('"target": "sm80"', '"target": "host"'), BadInput, "target host, this executes sm80"),
    ):
        path.write_text(bad)
        with pytest.raises(error, match=message):
            DeviceModel(artifact, opened).step([Row((1,), 0, 0)])


def test_more_stop_tokens_than_a_row_holds_are_left_to_the_host(engine: Engine) -> None:
    assert engine.can_loop(frozenset(range(_native.MOST_STOPS)))
    assert not engine.can_loop(frozenset(range(_native.MOST_STOPS + 1)))
    assert LIMITS.max_batch <= 8
