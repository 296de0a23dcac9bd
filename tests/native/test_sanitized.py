"""The native runtime under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewright.runtime import _native
from rewright.runtime.load import Artifact

TOOLS = {
    name: shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name in ("cmake", "ninja", "g++")
}
PLANS = ("decode-b1-c1024", "decode-b4-c128", "chunk128-b1-c128", "score128-b1-c1024")


@pytest.fixture(scope="module")
def tools(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the sanitized programs."""
    if missing := [name for name, path in TOOLS.items() if path is None]:
        pytest.skip(f"no {', '.join(missing)} to build with")
    build = tmp_path_factory.mktemp("sanitized")
    options = ["-DREWRIGHT_TESTS=ON", "-DREWRIGHT_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug"]
    options += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={TOOLS['ninja']}"]
    configure = [
        str(TOOLS["cmake"]),
        "-S",
        str(repo_root / "csrc"),
        "-B",
        str(build),
        "-G",
        "Ninja",
        *options,
    ]
    for command in (configure, [str(TOOLS["cmake"]), "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return build / "tests"


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_parts_without_a_model(tools: Path) -> None:
    assert run(tools / "unit_tests").endswith("all checks passed\n")


@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_clean_and_do_not_depend_on_threads(tools: Path, compiled_tiny: Path, plan: str) -> None:
    """Every weight lies in a block of its own, arena and state begin as NaN."""
    file = compiled_tiny / f"plan-{plan}.json"
    hashes = {run(tools / "plan_tool", "run", compiled_tiny, file, threads, 3) for threads in (1, 2)}
    assert len(hashes) == 1


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("plan", PLANS[:3])
def test_damaged_plans_are_refused_or_run_clean(
    tools: Path, compiled_tiny: Path, plan: str, seed: int
) -> None:
    count = 300 if seed == 1 else 5000
    text = run(tools / "plan_tool", "fuzz", compiled_tiny, compiled_tiny / f"plan-{plan}.json", seed, count)
    loaded, refused = (int(word) for word in text.replace(",", "").split() if word.isdigit())
    assert loaded > 0
    assert refused > loaded


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(st.text() | JSON.map(json.dumps))
def test_whatever_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(_native.PlanError):
        _native.check_plan(text)


@given(st.data())
@settings(deadline=None)
def test_a_plan_with_any_value_replaced_is_read_or_refused(compiled_tiny: Path, data: st.DataObject) -> None:
    variant = min(Artifact.open(compiled_tiny).manifest.variants)
    plan = json.loads(Artifact.open(compiled_tiny).plan_text(variant))
    place = plan
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(JSON)
    with suppress(_native.PlanError):  # and nothing else
        _native.check_plan(json.dumps(plan))
