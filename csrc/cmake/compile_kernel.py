"""Compiles one kernel source and writes down what its machine code takes.

usage: compile_kernel.py RESOURCES.json nvcc OPTION.. SOURCE

RESOURCES.json has the PTX's target and, by kernel, its launch bounds and, by architecture, what ptxas says:
registers of a thread, bytes of its stack and of spilled registers, bytes of static shared memory. The tests
check them (tests/native/test_kernel_code.py), and `rewright doctor` shows them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_BOUNDS = re.compile(r"\.entry (\w+)\([^)]*\)\s*(?:\.maxntid (\d+)[^\n]*\n)?(?:\.minnctapersm (\d+)\s*\n)?\{")


def code_of(report: str) -> dict[str, dict[str, dict[str, int]]]:
    """What `ptxas -v` reported, by kernel and architecture; functions that it calls count as its own."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    code: dict[str, int] = {}
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            code = {"registers": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0}
            found.setdefault(entry[1], {})[entry[2]] = code
        elif code and (frame := _FRAME.search(line)):
            code["stack"] = max(code["stack"], int(frame[1]))
            code["spill_stores"] += int(frame[2])
            code["spill_loads"] += int(frame[3])
        elif code and (used := _USED.search(line)):
            shared = _SHARED.search(line)
            code.update(registers=int(used[1]), shared=int(shared[1]) if shared else 0)
    return found


def ptx_of(folder: Path) -> dict[str, Any]:
    """Target of the PTX that nvcc left in a folder, and launch bounds of its kernels; of several, all."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.ptx"))]
    return {
        "targets": sorted(
            {target for text in texts for target in re.findall(r"^\.target (\S+)", text, re.M)}
        ),
        "bounds": {
            name: {"threads": int(threads or 0), "blocks": int(blocks or 0)}
            for text in texts
            for name, threads, blocks in _BOUNDS.findall(text)
        },
    }


def main() -> int:
    resources, nvcc, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        # The files that are kept have the PTX which all machine code is made from.
        command = [nvcc, "-Xptxas", "-v", "--keep", "--keep-dir", folder, *options]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        ptx = ptx_of(Path(folder))
    for line in done.stderr.splitlines():
        if not line.startswith("ptxas info") and not _FRAME.search(line):
            print(line, file=sys.stderr)
    if done.returncode == 0:
        code = code_of(done.stderr)
        names = {*code, *ptx["bounds"]}
        kernels = {name: {**ptx["bounds"].get(name, {}), "code": code.get(name, {})} for name in names}
        text = json.dumps({"ptx": ptx["targets"], "kernels": kernels}, indent=1, sort_keys=True)
        Path(resources).write_text(text + "\n", encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
