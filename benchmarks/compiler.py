"""How long the compiler takes, and how much memory: budgets of the first version.

usage: python benchmarks/compiler.py [--out results.json]

Whole processes are measured, imports included. The V4-Flash checkpoint is made of files with real
headers and holes for data, since a dump reads nothing else. The peer of opening it is reading and
parsing the same headers with the json module alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from origin import origin

import rewright
from rewright.compiler import CompileOptions, rewrite_all
from rewright.frontend.checkpoint import Checkpoint
from rewright.frontend.config import load_config
from rewright.frontend.layers import Builder
from rewright.frontend.model import Model
from rewright.frontend.numerics import Numerics
from rewright.frontend.storage import ReleaseSource, Storage
from rewright.ir.types import DType
from rewright.ir.variant import Limits

ROOT = Path(__file__).resolve().parent.parent
SHARDS = 46
_NAMES = {
    DType.F32: "F32",
    DType.BF16: "BF16",
    DType.F8E4M3: "F8_E4M3",
    DType.E8M0: "F8_E8M0",
    DType.E2M1: "I8",
    DType.I64: "I64",
}


def run(
    arguments: list[str], code: str = "from rewright.cli.main import main; main()"
) -> tuple[float, float]:
    """Wall seconds and peak resident gigabytes of a command in a process of its own."""
    probe = (
        "import resource, subprocess, sys, time; t = time.monotonic(); "
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "print(time.monotonic() - t, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", probe, sys.executable, "-c", code, *arguments]
    wall, peak_kb = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(wall), float(peak_kb) * 1024 / 1e9


def make_release_shaped(folder: Path, config_path: Path) -> int:
    """A checkpoint with the tensors of a configuration and no data; returns their number."""
    config, _ = load_config(config_path)
    storage = Storage(ReleaseSource(config), Numerics.FAITHFUL)
    Model(Builder(config, storage, Numerics.FAITHFUL, Limits()))
    tensors: dict[str, tuple[str, list[int], int]] = {}
    for binding in storage.bindings.values():
        shape = binding.type.storage_shape[1:] if len(binding.parts) > 1 else binding.type.storage_shape
        size = binding.type.nbytes // len(binding.parts)
        for part in binding.parts:
            tensors[part.tensor] = (_NAMES[binding.type.dtype], list(shape), size)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header, at = {}, 0
        for name in names[shard::SHARDS]:
            dtype, shape, size = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    total = sum(size for _, _, size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(tensors)


def parse_headers(folder: Path) -> None:
    """The peer: read and parse every header, nothing more."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as f:
            json.loads(f.read(int.from_bytes(f.read(8), "little")))


def best(action: Any, *arguments: Any, repeat: int = 3) -> float:
    """Shortest wall time of several runs."""
    times = []
    for _ in range(repeat):
        begin = time.monotonic()
        action(*arguments)
        times.append(time.monotonic() - begin)
    return min(times)


def rewrite_tiny(path: Path) -> None:
    """Every variant of a checkpoint, from trace to the last stage."""
    options = CompileOptions(target="host")
    rewrite_all(options.open(path, options.choose_target()), options)


def measure(folder: Path) -> list[dict[str, Any]]:
    """Every measurement as a row: name, value, unit, and the budget or peer beside it."""
    rows: list[dict[str, Any]] = []

    def row(name: str, value: float, unit: str, against: float, what: str) -> None:
        rows.append({"name": name, "value": value, "unit": unit, what: against, "ratio": value / against})
        print(f"{name:<52} {value:9.3f} {unit:<3} {what} {against:g} {unit}, ratio {value / against:.3f}")

    tiny, out = ROOT / "examples" / "tiny-v4", folder / "tiny"
    runs = [run(["compile-model", str(tiny), "-o", str(out), "--force"]) for _ in range(3)]
    row("compile tiny-v4, whole process", statistics.median(r[0] for r in runs), "s", 10, "budget")
    flash = ROOT / "examples" / "configs" / "v4-flash.json"
    wall, peak = run(["graph", "dump", str(flash)])
    row("dump V4-Flash, 43 layers, from config.json", wall, "s", 20, "budget")
    row("  peak memory", peak, "GB", 1.5, "budget")
    wall, peak = run(["graph", "dump", f"{flash}@layout"])
    row("the same after all passes", wall, "s", 20, "budget")
    row("  peak memory", peak, "GB", 1.5, "budget")
    wall, peak = run(["compile-model", str(flash), "--dry-run"])
    row("all variants of V4-Flash through all passes", wall, "s", 20, "budget")
    row("  peak memory", peak, "GB", 1.5, "budget")
    row("trace and passes of all variants of tiny-v4", best(rewrite_tiny, tiny), "s", 2, "budget")
    release = folder / "flash"
    release.mkdir()
    count = make_release_shaped(release, flash)
    row(
        f"open headers of {count} tensors",
        best(Checkpoint.open, release),
        "s",
        best(parse_headers, release),
        "peer",
    )
    wall, peak = run(["graph", "dump", str(release)])
    row("dump V4-Flash, 43 layers, from its headers", wall, "s", 20, "budget")
    row("  peak memory", peak, "GB", 1.5, "budget")
    return rows + measure_interpreter(out)


def measure_interpreter(out: Path) -> list[dict[str, Any]]:
    """Speed of the reference interpreter, which later targets are compared with."""
    engine = rewright.load(out)
    ids = torch.randint(3, 4096, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    engine.prefill(0, ids[:8])
    engine.decode({0: 5})
    engine.reset(0)
    begin = time.monotonic()
    engine.prefill(0, ids)
    prefill = 256 / (time.monotonic() - begin)
    times = []
    for token in ids[:50]:
        begin = time.monotonic()
        engine.decode({0: token})
        times.append(time.monotonic() - begin)
    decode = 1 / statistics.median(times)
    print(f"interpreter, tiny-v4: prefill {prefill:.1f} tok/s, decode {decode:.1f} tok/s")
    return [
        {"name": "interpreter prefill, 256 tokens", "value": prefill, "unit": "tok/s"},
        {"name": "interpreter decode, context 256", "value": decode, "unit": "tok/s"},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    record = {
        **origin("compiler"),
        "own_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "rows": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
