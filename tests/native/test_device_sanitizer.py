"""tests/device/sanitize.py: that it launches every kernel, and reads what compute-sanitizer writes.

The tool itself needs a card; here the same launches run under the emulation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_sources import kernel_sources

sys.path.append(str(Path(__file__).resolve().parents[1] / "device"))  # (behind the helpers)

import sanitize

from rewright.runtime import _native

SCRIPT = Path(__file__).resolve().parents[1] / "device" / "sanitize.py"
KERNELS = sorted(kernel_sources())


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script writes without a card."""
    out = tmp_path_factory.mktemp("sanitize") / "launched.json"
    assert run("--emulate", "--out", str(out)).returncode == 0
    return json.loads(out.read_text(encoding="utf-8"))


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})


def test_every_kernel_is_launched(emulated: dict[str, Any]) -> None:
    """A new KERNEL that nothing launches here would never be seen by a tool."""
    assert emulated["device"] == "emulation"
    assert sorted(emulated["kernels"]) == KERNELS
    assert all(kernel["launches"] > 0 for kernel in emulated["kernels"].values())
    assert emulated["clean"]


def test_every_symbol_is_launched(emulated: dict[str, Any]) -> None:
    assert emulated["symbols"] == sorted(_native.device_kernels())


@pytest.mark.gpu
def test_on_a_card(tmp_path: Path) -> None:
    try:
        sanitize.find_sanitizer()
    except sanitize.Unusable as e:
        pytest.skip(str(e))
    out = tmp_path / "sanitized.json"
    done = run("--out", str(out), env={"REWRIGHT_EMULATE": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(json.loads(out.read_text(encoding="utf-8"))["kernels"]) == KERNELS


def test_without_the_tool_it_says_what_is_missing(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "CUDA_PATH": "", "REWRIGHT_EMULATE": ""}
    if Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        pytest.skip("this machine has the tool where it is looked for last")
    done = run("--out", str(tmp_path / "out.json"), env=env)
    assert done.returncode == 2
    assert "compute-sanitizer is neither on PATH nor in" in done.stderr


MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at rms_norm+0x490
=========     by thread (1,0,0) in block (0,0,0)
=========     Access at 0x7f71b9e01360 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f71b9e00a00 of size 2400 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2d725e] in libcuda.so.1
=========
========= Invalid __shared__ write of size 2 bytes
=========     at rms_norm+0x10
=========
========= Error: process didn't terminate successfully
=========     The application may have hit an error when dereferencing Unified Memory from the host.
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
"""

RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at stream_any_one+0x140
=========     and Read access at stream_any_one+0xe0 [4 hazards]
=========     and Write access at stream_any_one+0x140 [5 hazards]
=========
========= Warning: Race reported between Read access at add+0x140
=========     and Write access at add+0xe0 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_findings_are_counted_by_kernel() -> None:
    report = sanitize.read_report(MEMCHECK, KERNELS)
    assert (report.total, report.by_kernel) == (3, {"rms_norm": 2})
    assert report.elsewhere == [
        "Error: process didn't terminate successfully",
        "Target application returned an error",
    ]
    report = sanitize.read_report(RACECHECK, KERNELS)
    assert (report.total, report.by_kernel) == (2, {"stream_any_one": 1, "add": 1})
    assert report.elsewhere == []


def test_a_clean_report_is_clean() -> None:
    for tool, summary in {
        "memcheck": "ERROR SUMMARY: 0 errors",
        "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    }.items():
        report = sanitize.read_report(f"========= COMPUTE-SANITIZER\n========= {summary}\n", KERNELS)
        assert (report.total, report.unexpected(tool)) == (0, False)


TOOL = """\
import json, pathlib, sys
given = dict(zip(sys.argv, sys.argv[1:]))
tool, out, planted = given["--tool"], pathlib.Path(given["--out"]), "--plant" in sys.argv
pathlib.Path(given["--log-file"]).write_text({
    ("memcheck", True): MEMCHECK,
    ("memcheck", False): "========= ERROR SUMMARY: 0 errors\\n",
    ("racecheck", False): RACECHECK,
    ("synccheck", False): "========= COMPUTE-SANITIZER\\n",
}[tool, planted])
if not planted:
    out.write_text(json.dumps({"launches": dict.fromkeys(KERNELS, 2)}))
"""


def test_tools_are_run_and_summed_up(tmp_path: Path) -> None:
    """With a program in the place of compute-sanitizer."""
    stand_in = tmp_path / "compute-sanitizer"
    texts = f"MEMCHECK, RACECHECK, KERNELS = {MEMCHECK!r}, {RACECHECK!r}, {KERNELS!r}\n"
    stand_in.write_text(f"#!{sys.executable}\n{texts}{TOOL}")
    stand_in.chmod(0o755)
    reports, launched = {}, {}
    for tool in sanitize.TOOLS:
        log = tmp_path / f"{tool}.log"
        reports[tool], launched = sanitize.run_tool(tool, str(stand_in), tmp_path, log, 60)
        clean = sanitize.summary_of(reports, launched.get("launches", {}))["clean"]
        assert clean == (tool == "memcheck")
    assert "no summary" in reports["synccheck"].trouble
    summary = sanitize.summary_of(reports, dict.fromkeys(KERNELS[1:], 2))
    assert summary["missing"] == KERNELS[:1]
    assert summary["kernels"]["add_position_bias"] == {
        "launches": 2,
        "memcheck": 0,
        "racecheck": 0,
        "synccheck": 0,
    }
    assert summary["kernels"]["stream_any_one"]["racecheck"] == 1


def test_a_tool_that_finds_nothing_anywhere_is_not_believed(tmp_path: Path) -> None:
    stand_in = tmp_path / "compute-sanitizer"
    blind = TOOL.replace(": MEMCHECK,", ": '========= ERROR SUMMARY: 0 errors',").replace("RACECHECK", "''")
    stand_in.write_text(f"#!{sys.executable}\nKERNELS = []\n{blind}")
    stand_in.chmod(0o755)
    report, _ = sanitize.run_tool("memcheck", str(stand_in), tmp_path, tmp_path / "log", 60)
    assert "planted" in report.trouble


def test_a_tool_that_hangs_is_stopped(tmp_path: Path) -> None:
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text("#!/bin/sh\nsleep 100\n")
    stand_in.chmod(0o755)
    report, _ = sanitize.run_tool("racecheck", str(stand_in), tmp_path, tmp_path / "log", 0.3)
    assert "stopped after" in report.trouble


def test_a_report_without_its_end_is_no_report() -> None:
    for text in ("", MEMCHECK.rpartition("========= ERROR")[0]):
        with pytest.raises(sanitize.Unusable, match="no summary"):
            sanitize.read_report(text, KERNELS)


def test_only_what_has_a_reason_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sanitize.read_report(RACECHECK, KERNELS)
    assert report.unexpected("racecheck")
    monkeypatch.setitem(sanitize.EXPECTED, ("racecheck", "add"), "why")
    assert report.unexpected("racecheck")
    monkeypatch.setitem(sanitize.EXPECTED, ("racecheck", "stream_any_one"), "why")
    assert not report.unexpected("racecheck")
    report.total += 1  # one that was not printed
    assert report.unexpected("racecheck")


def test_reasons_are_for_kernels_that_there_are() -> None:
    assert {kernel for _, kernel in sanitize.EXPECTED} <= set(KERNELS)
    assert {tool for tool, _ in sanitize.EXPECTED} <= set(sanitize.TOOLS)
