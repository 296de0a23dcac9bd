"""What a switch between the precisions of one compiled model costs, and what the second one adds to it.

usage: python benchmarks/switch.py [--target host|sm80] [--threads N] [--out results.json]

Compiles tiny-v4 with and without high variants, decodes 300 tokens and switches the precision every 7: time
of the first step behind a switch, beside that of the other steps. One pass comes before the clock, in which
every plan is bound. The first use of a precision is told apart: there its plan is read and bound, on a card
also recorded as a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from origin import origin

import rewright
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.threads import thread_count

ROOT = Path(__file__).resolve().parent.parent
PROMPT, TOKENS, EVERY, PASSES = 200, 300, 7, 5
PRECISIONS = ("high", "low")


def compiled(folder: Path, target: str, *precisions: str) -> Path:
    """tiny-v4 with the default limits."""
    out = folder / "-".join(precisions)
    options = rewright.CompileOptions(target=target, precisions=precisions)
    rewright.compile_model(ROOT / "examples" / "tiny-v4", out, options)
    return out


def folder_bytes(out: Path) -> int:
    return sum(p.stat().st_size for p in out.rglob("*") if p.is_file())


def growth(low: Path, both: Path) -> dict[str, Any]:
    """Bytes of the artifact, its weights, and the state that a run holds beside."""
    manifest = Artifact.open(both).manifest
    before, after = folder_bytes(low), folder_bytes(both)
    weights = Artifact.open(low).weight_bytes
    more = after - before
    return {
        "artifact_low": before,
        "artifact_both": after,
        "added": more,
        "weights": weights,
        "state": manifest.memory.state_bytes,
        "share_of_weights": more / weights,
        "share_of_artifact": more / before,
        "share_of_artifact_and_state": more / (before + manifest.memory.state_bytes),
    }


def decode(engine: Engine, ids: list[int], every: int | None) -> tuple[list[float], list[float]]:
    """Seconds of each step right behind a switch, the switch included, and of each other step.

    Args:
        engine: whose slot 0 is used.
        ids: the prompt and the tokens behind it.
        every: tokens between two switches; None switches nothing.
    """
    engine.reset(0)
    engine.prefill(0, ids[:PROMPT])
    switched, others = [], []
    for at, token in enumerate(ids[PROMPT:]):
        switches = every is not None and at % every == 0
        begin = time.perf_counter()
        if switches:
            engine.precision = PRECISIONS[at // every % 2]  # type: ignore[operator]
        engine.decode({0: token})
        (switched if switches else others).append(time.perf_counter() - begin)
    return switched, others


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "steps": len(seconds),
        "median_ms": statistics.median(seconds) * 1e3,
        "max_ms": max(seconds) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", choices=("host", "sm80"), default="host")
    parser.add_argument("--threads", type=int, help="of target host")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_host = options.target == "host"
    threads = thread_count(options.threads) if on_host else None
    arguments = f"--threads {threads}" if on_host else f"--target {options.target}"
    with tempfile.TemporaryDirectory() as name:
        low, both = (compiled(Path(name), options.target, *p) for p in (("low",), ("low", "high")))
        engine = Engine(Artifact.open(both), threads=threads)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(engine.vocab_size, (PROMPT + TOKENS,), generator=generator).tolist()
        first, _ = decode(engine, ids, EVERY)
        switched, others, alone = [], [], {}
        for _ in range(PASSES):
            behind, rest = decode(engine, ids, EVERY)
            switched += behind
            others += rest
        for precision in PRECISIONS:
            engine.precision = precision
            alone[precision] = milliseconds([s for _ in range(PASSES) for s in decode(engine, ids, None)[1]])
        sizes = growth(low, both)
    record: dict[str, Any] = {
        **origin("switch", arguments),
        "card": None if on_host or not torch.cuda.is_available() else torch.cuda.get_device_name(),
        "threads": threads,
        "tokens": TOKENS,
        "switch_every": EVERY,
        "passes": PASSES,
        "first_use_of_high_ms": first[0] * 1e3,
        "behind_a_switch": milliseconds(switched),
        "other_steps": milliseconds(others),
        "without_switches": alone,
        "bytes": sizes,
    }
    report(record)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def report(record: dict[str, Any]) -> None:
    rows = {
        "behind a switch": record["behind_a_switch"],
        "other steps": record["other_steps"],
        **{f"{p} alone": times for p, times in record["without_switches"].items()},
    }
    for name, times in rows.items():
        median, most = times["median_ms"], times["max_ms"]
        print(f"{name:<16} {times['steps']:>6} steps  median {median:.3f} ms  max {most:.3f} ms")
    print(f"first use of high {record['first_use_of_high_ms']:.2f} ms (its plan is read and bound)")
    sizes = record["bytes"]
    print(
        f"high variants add {sizes['added']:,} bytes: {sizes['share_of_weights']:.2%} of the weights, "
        f"{sizes['share_of_artifact']:.2%} of the artifact"
    )


if __name__ == "__main__":
    main()
