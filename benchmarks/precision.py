"""What numerics, calibrated scales and blocks cost in perplexity: the example, and one with outliers.

usage: python benchmarks/precision.py [--out results.json]

Everything is compiled for the host and scored on the evaluation texts; scales come from the calibration
texts. The second model is the example with one channel 512 times as large (`outlier_model.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from origin import origin
from outlier_model import FACTOR, largest_channels, write_outlier_model

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny-v4"
CALIBRATION, EVALUATION = (TINY / "text" / f"{name}.jsonl" for name in ("calibration", "evaluation"))
BLOCKS = ("32", "128", "tensor")
NUMERICS = ("fp32", "faithful", "bf16")
LIMITS = ("--target", "host", "--max-context", "1024")


def command(*arguments: str | Path) -> str:
    """Standard output of a `rewright` command in a process of its own."""
    code = "from rewright.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def nll(folder: Path, checkpoint: Path, name: str, *options: str | Path) -> float:
    """Mean negative log-likelihood of the evaluation texts, nats a token."""
    print(f"{checkpoint.name}: {name}", file=sys.stderr)
    out = folder / "out"
    command("compile-model", checkpoint, "-o", out, "--force", *LIMITS, *options)
    return json.loads(command("score", out, "--text", EVALUATION, "--json"))["all"]["nll"]


def measure(folder: Path, checkpoint: Path, headrooms: tuple[int, ...]) -> dict[str, float]:
    """NLL of a checkpoint in every numerics mode, and with calibrated scales in every block."""
    found = {name: nll(folder, checkpoint, name, "--numerics", name) for name in NUMERICS}
    for headroom, block in itertools.product(headrooms, BLOCKS):
        scales = folder / f"{checkpoint.name}.json"
        how = ("--block", block, "--headroom", str(headroom))
        command("calibrate", checkpoint, "--text", CALIBRATION, "-o", scales, *how)
        name = f"static {block}, headroom {headroom}"
        found[name] = nll(folder, checkpoint, name, "--static-scales", scales)
    return found


def table(found: dict[str, float]) -> list[str]:
    """Lines of a Markdown table: NLL, perplexity, and its distance from the two references."""
    lines = ["| | NLL | perplexity | to fp32 | to faithful |", "|---|---|---|---|---|"]
    for name, value in found.items():
        away = (math.expm1(value - found[to]) for to in ("fp32", "faithful"))
        cells = " | ".join(f"{100 * x:+.2f} %" for x in away)
        lines.append(f"| {name} | {value:.4f} | {math.exp(value):.3f} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outliers = folder / "outliers"
        channels = largest_channels(TINY, CALIBRATION)
        write_outlier_model(TINY, outliers, channels)
        found: dict[str, Any] = {
            "tiny-v4": measure(folder, TINY, (1,)),
            "outliers": measure(folder, outliers, (0, 1)),
        }
    for model, results in found.items():
        print(f"\n{model}\n")
        print("\n".join(table(results)))
    if given.out is not None:
        record = {
            **origin("precision"),
            "factor": FACTOR,
            "channels": channels,
            "nll": found,
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
