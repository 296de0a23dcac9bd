"""How fast the host target runs tiny-v4, beside the interpreter, torch bf16 eager and the memory.

usage: python benchmarks/host.py [--threads N] [--out results.json]

One run: compiles the example for a context of 1,024 tokens, then `rewright bench --peers`, and measures
what a process that decodes holds in memory beyond its imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from origin import origin

import rewright
from rewright.runtime.load import Artifact
from rewright.runtime.threads import thread_count

ROOT = Path(__file__).resolve().parent.parent
BENCH = ["-p", "256", "-n", "64", "-b", "1,4", "-r", "5", "--peers", "--json"]

_MEMORY_PROBE = """
import sys
import torch, rewright, rewright.runtime.engine

def kilobytes(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

before = kilobytes("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew: importing has one of its own
engine = rewright.load(sys.argv[1])
logits = engine.prefill(0, [i % 1000 for i in range(256)])
for _ in range(32):
    logits = engine.decode({0: int(logits.argmax())})[0]
print((kilobytes("VmHWM") - before) * 1024)
"""


def command(*arguments: str) -> str:
    """Standard output of a `rewright` command in a process of its own."""
    code = "from rewright.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    ).stdout


def memory(out: Path) -> dict[str, int]:
    """Peak resident bytes beyond imports of a process that prefills and decodes, and what was planned."""
    probe = [sys.executable, "-c", _MEMORY_PROBE, str(out)]
    found = int(subprocess.run(probe, check=True, capture_output=True, text=True).stdout)
    manifest = Artifact.open(out).manifest
    weights = sum(entry.bytes for name, entry in manifest.files.items() if name.endswith(".safetensors"))
    return {
        "peak_beyond_imports": found,
        "weights": weights,
        "arena": manifest.memory.arena_bytes,
        "state": manifest.memory.state_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    threads = thread_count(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        rewright.compile_model(
            ROOT / "examples" / "tiny-v4",
            out,
            rewright.CompileOptions(max_context=1024, max_batch=4, target="host"),
        )
        measured = json.loads(command("bench", str(out), *BENCH, "--threads", str(threads)))
        held = memory(out)
    record: dict[str, Any] = {
        **origin("host", f"--threads {threads}"),
        "memory": held,
        **measured,
    }
    report(record)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def report(record: dict[str, Any]) -> None:
    """A table of the record, ratios first."""
    bandwidth = record["read_bytes_per_second"]
    host = {r["case"]: r for r in record["results"]["host"]}
    print(f"{record['vector']}, {record['threads']} threads, memory read at {bandwidth / 1e9:.1f} GB/s")
    for name, results in record["results"].items():
        for r in results:
            ratio = host[r["case"]]["tokens_per_second"] / r["tokens_per_second"]
            share = r["bytes_per_second"] / bandwidth
            print(
                f"{name:<18} {r['case']:<16} {r['tokens_per_second']:>9.1f} tok/s  host is {ratio:5.1f} x  "
                f"{share:6.1%} of memory"
            )
    held = record["memory"]
    allowed = held["weights"] + held["arena"] + held["state"] + (32 << 20)
    print(
        f"peak beyond imports {held['peak_beyond_imports']:,} of {allowed:,} bytes "
        f"(weights {held['weights']:,}, arena {held['arena']:,}, state {held['state']:,}, 32 MB)"
    )


if __name__ == "__main__":
    main()
