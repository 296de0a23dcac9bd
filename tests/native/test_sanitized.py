"""The native runtime under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_launch import one_launch

from rewright.compiler import CompileOptions, compile_model
from rewright.ir.op import registry
from rewright.passes.manager import PassOptions
from rewright.runtime import _native
from rewright.runtime.load import Artifact

TOOLS = {
    name: shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name in ("cmake", "ninja", "g++")
}
PLANS = ("decode-b1-c1024", "decode-b4-c128", "chunk128-b1-c128", "score128-b1-c1024")


def build(sanitizers: str, repo_root: Path, folder: Path) -> Path:
    """Folder of the native test programs, built with sanitizers."""
    if missing := [name for name, path in TOOLS.items() if path is None]:
        pytest.skip(f"no {', '.join(missing)} to build with")
    cmake, ninja = str(TOOLS["cmake"]), str(TOOLS["ninja"])
    options = ["-DREWRIGHT_TESTS=ON", f"-DREWRIGHT_SANITIZE={sanitizers}"]
    options += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    run(cmake, "-S", repo_root / "csrc", "-B", folder, "-G", "Ninja", *options)
    run(cmake, "--build", folder, "--parallel", 2)
    return folder / "tests"


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tools(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("address,undefined", repo_root, tmp_path_factory.mktemp("sanitized"))


@pytest.fixture(scope="module")
def unfused(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-v4 without passes: it runs on other kernels."""
    out = tmp_path_factory.mktemp("unfused") / "out"
    options = CompileOptions(max_context=1024, max_batch=4, target="host", passes=PassOptions(to="traced"))
    compile_model(tiny_v4, out, options)
    return out


def test_parts_without_a_model(tools: Path) -> None:
    assert run(tools / "unit_tests").endswith("all checks passed\n")


RUN = [("compiled_tiny", plan) for plan in PLANS] + [("unfused", plan) for plan in PLANS[1:3]]


@pytest.mark.parametrize(("model", "plan"), RUN)
def test_steps_are_clean_and_do_not_depend_on_threads(
    tools: Path, request: pytest.FixtureRequest, model: str, plan: str
) -> None:
    """Every weight lies in a block of its own size, arena and state begin as NaN."""
    out = request.getfixturevalue(model)
    steps = 2 if "128-b1" in plan else 20  # of a chunk the second has masked tokens
    hashes = {run(tools / "plan_tool", "run", out, out / f"plan-{plan}.json", n, steps) for n in (1, 2)}
    assert len(hashes) == 1


@pytest.mark.full
def test_threads_do_not_race(repo_root: Path, compiled_tiny: Path, unfused: Path, tmp_path: Path) -> None:
    tools = build("thread", repo_root, tmp_path)
    assert run(tools / "unit_tests").endswith("all checks passed\n")
    for out in (compiled_tiny, unfused):
        for plan in PLANS:
            run(tools / "plan_tool", "run", out, out / f"plan-{plan}.json", 3, 2)


FUZZED = [("compiled_tiny", plan) for plan in PLANS[:3]] + [("unfused", PLANS[1])]


@pytest.mark.parametrize(("seed", "count"), [(1, 50), pytest.param(2, 3000, marks=pytest.mark.full)])
@pytest.mark.parametrize(("model", "plan"), FUZZED)
def test_spoiled_plans_are_refused_or_run_clean(
    tools: Path, request: pytest.FixtureRequest, model: str, plan: str, seed: int, count: int
) -> None:
    """Texts with damaged bytes, then plans with one plausible value in place of another."""
    out = request.getfixturevalue(model)
    text = run(tools / "plan_tool", "fuzz", out, out / f"plan-{plan}.json", seed, count)
    found = {line.split(":")[0]: [int(n) for n in re.findall(r"\d+", line)] for line in text.splitlines()}
    assert set(found) == {"damaged", "edited"}
    assert found["damaged"][1] > count / 2
    for runs, refused in found.values():
        assert 0 < runs + refused <= count
    assert min(found["edited"]) > count / 10


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(st.text() | JSON.map(json.dumps))
def test_whatever_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(_native.PlanError):
        _native.check_plan(text)


def spoil(data: st.DataObject, plan: Any) -> str:
    """The text of a plan in which one value, at any depth, is another."""
    place = plan
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(JSON)
    return json.dumps(plan)


@given(st.data())
@settings(deadline=None)
def test_a_plan_with_any_value_replaced_is_read_or_refused(compiled_tiny: Path, data: st.DataObject) -> None:
    variant = min(Artifact.open(compiled_tiny).manifest.variants)
    plan = json.loads(Artifact.open(compiled_tiny).plan_text(variant))
    with suppress(_native.PlanError):  # and nothing else
        _native.check_plan(spoil(data, plan))


@given(st.data(), st.sampled_from(sorted(registry())))
@settings(deadline=None, max_examples=400)
def test_a_launch_with_any_value_replaced_is_bound_or_refused(data: st.DataObject, name: str) -> None:
    """Every kernel's own checks; where the plan as a whole is read, little of it is theirs."""
    op = registry()[name]
    launch = one_launch(op, *op.example_calls(0)[0])
    with suppress(_native.PlanError):
        launch.program(spoil(data, json.loads(launch.plan.to_text())))


@pytest.mark.parametrize(
    ("batch", "tokens"), [(1 << 20, 1 << 20), (1 << 24, 2), (0, 1), (1, 0), (1 << 40, 1)]
)
def test_sizes_of_a_step_whose_product_is_too_large(batch: int, tokens: int) -> None:
    op = registry()["add"]
    launch = one_launch(op, *op.example_calls(0)[0])
    plan = json.loads(launch.plan.to_text())
    plan["variant"].update(batch=batch, tokens=tokens)
    with pytest.raises(_native.PlanError, match="batch or tokens are out of range"):
        launch.program(json.dumps(plan))


@pytest.mark.parametrize("value", ["x", "experts", "result.0"])
def test_a_workspace_over_a_value_is_refused(value: str) -> None:
    """Kernels keep indices in it, so nothing else may write there."""
    op = registry()["expert_linear"]
    launch = one_launch(op, *op.example_calls(0)[0])
    plan = json.loads(launch.plan.to_text())
    offset = plan["values"][value]["offset"]
    plan["launches"][0]["workspace"] = [offset, 64]
    with pytest.raises(_native.PlanError, match=f"workspace overlaps {value}"):
        launch.program(json.dumps(plan))
