"""Every kernel of target sm80 under compute-sanitizer, on a card.

usage: python tests/device/sanitize.py [--tool memcheck,racecheck] [--out FILE] [--timeout SECONDS]
                                       [--emulate]

Writes a JSON object: by kernel the number of its launches and what each tool found in it, by tool the sums.
The tools' own reports lie beside it, FILE with the tool in its name. Exit status: 0 clean, 1 something was
found or a kernel was not launched, 2 a tool could not run to its end. With --emulate, or REWRIGHT_EMULATE=1,
the same launches run on this CPU without a tool; only the launches are counted then.

memcheck first has to find a planted fault, so that a clean report is not the silence of a tool that looks at
nothing. racecheck follows shared memory only; races of blocks over the card's memory are beyond both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "helpers"))

from kernel_sources import kernel_sources  # noqa: E402  (found through the line above)

TOOLS = ("memcheck", "racecheck", "synccheck")
DEFAULT_TOOLS = "memcheck,racecheck"
# Allocations are padded so that a step over the end of one does not land in the next. Calls of the driver
# that fail are no findings: a kernel is looked for in one module after the other.
OPTIONS = {
    "memcheck": ("--padding", "1024", "--report-api-errors", "no", "--destroy-on-device-error", "kernel"),
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
}
SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed .*)\s*$", re.MULTILINE
)
# Behind "at" or the name of a device function's frame, with an offset, parameters or the end of the line
# behind it: some kernels are called as ordinary words are.
PLACE = re.compile(r"(?:\bat (?:0x[0-9a-f]+ in )?|Device Frame: ?)(\w+)(?=\+0x|\(|\s*$)", re.MULTILINE)
FINDING = re.compile(r"Error|Invalid|Race|Barrier|Divergent|Misaligned|Fatal|Internal|Target application")
EXPECTED: dict[tuple[str, str], str] = {}
"""Findings that are none, by tool and kernel, each with its reason. They are still counted and written."""
EMULATED_MULTIPROCESSORS = 4


class Unusable(Exception):
    """A tool is missing or did not come to its end."""


@dataclass
class Report:
    """What a tool said.

    Attributes:
        total: findings by its own count.
        by_kernel: reports that name a kernel, by kernel.
        elsewhere: the first lines of those that name none.
        seconds: that it took.
        trouble: why it did not come to its end; empty if it did.
    """

    total: int = 0
    by_kernel: Counter[str] = field(default_factory=Counter)
    elsewhere: list[str] = field(default_factory=list)
    seconds: float = 0.0
    trouble: str = ""

    def unexpected(self, tool: str) -> bool:
        """Whether there is a finding that no reason stands for."""
        named = sum(self.by_kernel.values())
        excused = all((tool, kernel) in EXPECTED for kernel in self.by_kernel)
        return bool(self.elsewhere) or not excused or self.total > named


def read_report(text: str, kernels: Sequence[str]) -> Report:
    """The text that a tool writes. A finding begins with a line that has no blanks behind the prefix."""
    summaries = SUMMARY.findall(text)
    if not summaries:
        raise Unusable(f"the tool wrote no summary: {text.strip()[-400:] or 'its report is empty'}")
    report = Report(sum(int(errors or hazards) for errors, hazards in summaries))
    for block in re.split(r"^=+ (?=\S)", text, flags=re.MULTILINE)[1:]:
        if "SUMMARY:" in block.split("\n")[0] or block.startswith("COMPUTE-SANITIZER"):
            continue
        if named := next((name for name in PLACE.findall(block) if name in kernels), None):
            report.by_kernel[named] += 1
        elif FINDING.match(block):
            report.elsewhere.append(block.split("\n")[0])
    return report


def find_sanitizer() -> str:
    """The command, on PATH or in a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{home}/{part}" for home in homes if home for part in ("bin", "compute-sanitizer")]
    for path in (None, os.pathsep.join(folders)):
        if found := shutil.which("compute-sanitizer", path=path):
            return found
    raise Unusable(
        f"compute-sanitizer is neither on PATH nor in {', '.join(folders)}: install the CUDA toolkit's "
        "compute-sanitizer, or set CUDA_HOME"
    )


def launch(folder: Path, prefix: Sequence[str], arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run the cases of a folder; what `run_cases` wrote, nothing if it did not come to its end."""
    from rewright.runtime import _native

    out = folder / "launched.json"
    out.unlink(missing_ok=True)
    # Isolated and without site-packages: the process imports nothing but the standard library.
    program = [sys.executable, "-I", "-S", str(HERE / "run_cases.py"), str(folder)]
    command = [*prefix, *program, "--native", str(_native.__file__), "--out", str(out), *arguments]
    child = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        child.wait(timeout)
    except BaseException as e:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if isinstance(e, subprocess.TimeoutExpired):
            raise Unusable(f"stopped after {timeout:.0f} s: {' '.join(prefix[:3]) or 'run_cases'}") from e
        raise
    return json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}


def under_tool(
    tool: str, sanitizer: str, folder: Path, log: Path, arguments: Sequence[str], timeout: float
) -> tuple[Report, dict[str, Any]]:
    """The report of a tool, which stays in `log`, and what was launched under it."""
    log.unlink(missing_ok=True)
    options = ("--target-processes", "application-only", "--print-limit", "10000", *OPTIONS[tool])
    prefix = [sanitizer, "--tool", tool, "--log-file", str(log), *options]
    launched = launch(folder, prefix, arguments, timeout)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return read_report(text, sorted(kernel_sources())), launched


def run_tool(
    tool: str, sanitizer: str, folder: Path, log: Path, timeout: float
) -> tuple[Report, dict[str, Any]]:
    """`under_tool` for all launches; what goes wrong stands in the report."""
    begin = time.monotonic()
    try:
        if tool == "memcheck":
            say("memcheck: a planted fault")
            if not under_tool(tool, sanitizer, folder, log, ("--plant",), timeout)[0].by_kernel:
                raise Unusable("it does not find a planted fault")
        say(f"{tool}: all launches")
        report, launched = under_tool(tool, sanitizer, folder, log, (), timeout)
        if not launched:
            report.trouble = "the launches did not come to their end"
    except Unusable as e:
        report, launched = Report(trouble=str(e)), {}
    report.seconds = round(time.monotonic() - begin, 1)
    return report, launched


def sanitize(tools: Sequence[str], out: Path, timeout: float, emulate: int) -> dict[str, Any]:
    """Run everything; the object that is written to `out`."""
    sanitizer = "" if emulate else find_sanitizer()
    from launch_cases import launch_cases, write_cases  # (torch, which takes its time)

    reports: dict[str, Report] = {}
    launched: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("preparing the launches")
        symbols = write_cases(launch_cases(), folder)
        if emulate:
            launched = launch(folder, (), ("--emulate", str(emulate)), timeout)
        for tool in () if emulate else tools:
            log = out.with_suffix(f".{tool}.log")
            reports[tool], ran = run_tool(tool, sanitizer, folder, log, timeout)
            launched = ran or launched
    return {
        "device": "emulation" if emulate else "card",
        "symbols": sorted(symbols),
        **summary_of(reports, launched.get("launches", {})),
    }


def summary_of(reports: Mapping[str, Report], launches: Mapping[str, int]) -> dict[str, Any]:
    """What each tool found, in all and by kernel, and whether that is nothing."""
    missing = [kernel for kernel in sorted(kernel_sources()) if kernel not in launches]
    found = any(report.trouble or report.unexpected(tool) for tool, report in reports.items())
    return {
        "clean": not missing and not found,
        "missing": missing,
        "tools": {
            tool: {
                "findings": report.total,
                "elsewhere": report.elsewhere,
                "seconds": report.seconds,
                "trouble": report.trouble,
            }
            for tool, report in reports.items()
        },
        "kernels": {
            kernel: {
                "launches": count,
                **{tool: report.by_kernel[kernel] for tool, report in reports.items()},
            }
            for kernel, count in launches.items()
        },
    }


def say(text: str) -> None:
    print(f"sanitize: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every kernel of target sm80 under compute-sanitizer.")
    parser.add_argument("--tool", default=DEFAULT_TOOLS, help=f"of {', '.join(TOOLS)}; several with commas")
    parser.add_argument("--out", type=Path, default=Path("build/sanitize.json"))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run of a tool")
    parser.add_argument("--emulate", action="store_true", help="on this CPU, without a tool")
    options = parser.parse_args()
    tools = options.tool.split(",")
    if unknown := [tool for tool in tools if tool not in TOOLS]:
        parser.error(f"there is no tool {unknown[0]}: {', '.join(TOOLS)}")
    emulate = options.emulate or os.environ.get("REWRIGHT_EMULATE", "") not in ("", "0")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # The tool runs in a session of its own: who ends this program must end that too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(2))
    try:
        result = sanitize(tools, options.out, options.timeout, EMULATED_MULTIPROCESSORS * emulate)
    except Unusable as e:
        print(f"sanitize: {e}", file=sys.stderr)
        return 2
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for tool, summary in result["tools"].items():
        say(f"{tool}: {summary['trouble'] or str(summary['findings']) + ' findings'}; {summary['seconds']} s")
        for kernel, counts in result["kernels"].items():
            if counts[tool]:
                say(f"{tool}: {counts[tool]} in {kernel}")
    if result["missing"]:
        say(f"not launched: {', '.join(result['missing'])}")
    say(f"{len(result['kernels'])} kernels, {'clean' if result['clean'] else 'not clean'}: {options.out}")
    if any(tool["trouble"] for tool in result["tools"].values()):
        return 2
    return 0 if result["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
