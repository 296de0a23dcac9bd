"""A figure of a decode benchmark: tokens per second of Rewright, its floor and its peers.

usage: python benchmarks/plot.py RESULTS.json docs/images/decode.svg

RESULTS.json is what decode.py wrote. Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def bars_of(results: Mapping[str, Any]) -> dict[int, list[tuple[str, float, float]]]:
    """By batch: label, tokens per second, and tokens per second at the floor (0 for peers)."""
    found: dict[int, list[tuple[str, float, float]]] = {}
    for peer in results.get("peers", []):
        label = f"{peer['name']}, {peer['context'] // 1024} K"
        found.setdefault(peer["batch"], []).append((label, peer["tokens_per_second"], 0.0))
    for row in results["decode"]:
        label = f"Rewright, {row['context'] // 1024} K"
        bar = (label, row["tokens_per_second"], row["floor_tokens_per_second"])
        found.setdefault(row["batch"], []).append(bar)
    return found


def draw(results: Mapping[str, Any], out: Path) -> None:
    """Write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "rewright"  # the same results give the same file
    by_batch = bars_of(results)
    figure, axes = pyplot.subplots(len(by_batch), 1, figsize=(8, 1 + 2.2 * len(by_batch)), squeeze=False)
    for axis, (batch, bars) in zip(axes[:, 0], sorted(by_batch.items()), strict=True):
        labels = [label for label, _, _ in bars]
        speeds = [speed for _, speed, _ in bars]
        colors = ["#1f6feb" if label.startswith("Rewright") else "#9aa4b2" for label in labels]
        axis.barh(labels, speeds, color=colors)
        for i, (_, speed, floor) in enumerate(bars):
            if floor:
                axis.plot([floor, floor], [i - 0.4, i + 0.4], color="#d1242f")
            note = f" {speed:.1f}" + (f" ({speed / floor:.0%} of the floor)" if floor else "")
            axis.text(speed, i, note, va="center", fontsize=8)
        axis.set_title(f"batch {batch}", loc="left", fontsize=10)
        axis.set_xlabel("tokens/s, layer-scaled; red: bytes read at the measured read stream", fontsize=8)
        axis.set_xlim(right=1.25 * max(max(speed, floor) for _, speed, floor in bars))
        axis.tick_params(labelsize=8)
    figure.suptitle(f"DeepSeek-V4-Flash decode, {results['card']}, {results['date']}", fontsize=11)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="what decode.py wrote")
    parser.add_argument("out", type=Path, help=".svg or .png")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text(encoding="utf-8")), options.out)


if __name__ == "__main__":
    main()
