"""Steps taken apart: launches, bytes, stages, traces."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from rewright.compiler import CompileOptions
from rewright.ir.launch_bytes import launch_bytes
from rewright.ir.stages import module_of, stages_of
from rewright.random_artifact import compile_random
from rewright.runtime import card
from rewright.runtime.bench import Case, measure_seconds
from rewright.runtime.device import DeviceModel
from rewright.runtime.engine import Engine
from rewright.runtime.host import HostModel
from rewright.runtime.model import Row
from rewright.runtime.profile import Profile, profile
from rewright.runtime.trace_events import trace_events

CASE = Case(12, 3, 2)
PLACES = [
    "host",
    pytest.param("emulated", id="emulated"),
    pytest.param("card", id="card", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLACES, scope="module")
def engine(request: pytest.FixtureRequest, tiny_v4: Path):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "emulated":
            patch.setenv(card.EMULATE, "1")
        where = torch.device("cuda" if request.param == "card" else "cpu")
        target = "host" if request.param == "host" else "sm80"
        options = CompileOptions(max_context=256, max_batch=2, target=target)
        config = tiny_v4 / "config.json"
        yield Engine(compile_random(config, options, where, layers=4, batches=(1, 2), context=64), threads=1)


@pytest.fixture(scope="module")
def found(engine: Engine) -> Profile:
    measure_seconds(engine, CASE)
    return profile(engine, CASE, 3)


def test_launches_one_by_one_are_the_step(engine: Engine) -> None:
    model = engine.model
    assert isinstance(model, DeviceModel | HostModel)
    engine.reset(0)
    engine.prefill(0, [3, 1, 4])
    rows = [Row((5,), 3, 0)]
    state = model.state.clone()
    expected = model.step(rows)
    model.state.copy_(state)
    step = model.open_step(rows)
    place = step.plan.values[step.plan.results["logits"]]
    step.arena[place.offset : place.end].zero_()
    for at in range(len(step.plan.launches)):
        step.run(at, at + 1)
    logits = step.arena[place.offset : place.end].view(torch.float32)
    assert torch.equal(logits.view(1, -1), expected)


def test_chosen_experts_are_counted_of_rows_that_there_are(engine: Engine) -> None:
    """A sequence chooses as many as the configuration says, two of them together more."""
    model = engine.model
    assert isinstance(model, DeviceModel | HostModel)
    if isinstance(model, HostModel):
        pytest.skip("experts are chosen and used within one kernel")
    one = model.open_step([Row((5,), 0, 0)]).chosen_experts()
    assert list(one.values()) == [4.0] * 4
    two = model.open_step([Row((5,), 0, 0), Row((900,), 0, 1)]).chosen_experts()
    assert all(4 <= count <= 8 for count in two.values())
    assert max(two.values()) > 4


def test_stages_are_all_launches_of_the_plan(found: Profile) -> None:
    plan = found.plan
    counts = Counter(stages_of(plan))
    assert {stage.name: stage.count for stage in found.by_stage()} == counts
    record = found.to_json()
    assert sum(stage["count"] for stage in record["stages"]) == record["launches"] == len(plan.launches)
    assert sum(stage["share"] for stage in record["stages"]) == pytest.approx(1)
    assert [s["us"] for s in record["stages"]] == sorted((s["us"] for s in record["stages"]), reverse=True)
    for stage in record["stages"]:
        assert stage["us_each"] == pytest.approx(stage["us"] / stage["count"])
        assert stage["gb_per_second"] == pytest.approx(stage["bytes"] / stage["us"] / 1e3)


def test_bytes_are_the_plan_s(engine: Engine, found: Profile) -> None:
    """Of the step in the middle, with the experts that its tokens chose."""
    model = engine.model
    assert isinstance(model, DeviceModel | HostModel)
    tokens = torch.randint(4096, (2,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [Row((token,), CASE.middle - 1, slot) for slot, token in enumerate(tokens)]
    chosen = model.open_step(rows).chosen_experts()
    expected = sum(moved.total for moved in launch_bytes(found.plan, CASE.middle, chosen))
    assert sum(stage.bytes for stage in found.by_stage()) == found.to_json()["bytes"] == expected
    longer = sum(moved.total for moved in launch_bytes(found.plan, 64, chosen))
    assert longer > expected


def test_times_are_those_of_the_repetitions(found: Profile) -> None:
    assert len(found.marks) == 3
    for marks in found.marks:
        assert marks[0] == 0
        assert len(marks) == len(found.plan.launches) + 1
        assert list(marks) == sorted(marks)
    assert found.typical[-1] == sorted(marks[-1] for marks in found.marks)[1]
    slowest = max(marks[-1] for marks in found.marks)
    assert 0 < found.to_json()["us"] <= slowest


def test_a_trace_has_every_launch(found: Profile) -> None:
    trace = json.loads(json.dumps(trace_events(found)))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names) == len(set(found.stages))
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"X", "M"}
    assert [e["args"]["launch"] for e in complete] == list(range(len(found.plan.launches)))
    for at, event in enumerate(complete):
        launch = found.plan.launches[at]
        assert event["name"] == event["args"]["symbol"] == launch.symbol
        assert event["args"]["module"] == module_of(launch)
        assert names[event["tid"]] == event["cat"] == found.stages[at]
        assert event["ts"] == pytest.approx(found.typical[at])
        assert event["ts"] + event["dur"] == pytest.approx(found.typical[at + 1])
        parts = ("weight_bytes", "state_bytes", "activation_bytes")
        assert event["args"]["bytes"] == sum(event["args"][part] for part in parts)
    assert sum(e["args"]["bytes"] for e in complete) == found.to_json()["bytes"]
