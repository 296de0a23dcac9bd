"""Decode speed to be expected on 1 to 8 A100 or A800 cards. A projection, not a measurement.

usage: python benchmarks/projection.py RESULTS.json [--batch 1,8] [--context 8192] [--out results.json]

RESULTS.json is what sm80_kernels.py wrote on a card. A straight line through the launches that stream weights
gives their efficiency (share of the read stream that a byte more costs) and their exposed time (what a launch
costs beside its bytes); launches that stream next to nothing keep the time that was measured. Bytes of a card
are those of tensor parallelism as ir/tensor_parallel.py splits weights, the state whole on every card.

Assumed: efficiency, exposed times and short launches carry over to an A100; its read stream is the same share
of its data sheet's bandwidth as on the measured card; two all-reduces a layer, at the times in ALL_REDUCE.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_bench import Planned, Record, flash, plan_step

from rewright.ir.errors import UsageError
from rewright.ir.launch_bytes import launch_bytes
from rewright.ir.roofline import CARDS, Card, card_bytes, card_named

STREAMS = 4e6
"""Bytes from which on a launch counts as one that streams weights."""
CARD_COUNTS = (1, 2, 4, 8)
ALL_REDUCE = {"NVLink": 7.0, "PCIe": 22.0}
"""Microseconds of an all-reduce of 8 to 64 KB inside a graph. NVLink: measured on two H200 with PyTorch's
one-shot all-reduce. PCIe: an estimate for NCCL, not measured."""
LINKS = {"a100-80g-sxm": "NVLink", "a100-80g-pcie": "PCIe", "a800-80g-pcie": "PCIe"}
REDUCES_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class Fit:
    """What launches cost on the measured card.

    Attributes:
        efficiency: rate of a byte more, of the read stream's.
        exposed_us: microseconds of a launch that streams nothing.
        short_us: of a launch of less than `STREAMS` bytes, mean by symbol.
    """

    efficiency: float
    exposed_us: float
    short_us: Mapping[str, float]


def fit(rows: Sequence[Mapping[str, Any]], rate: float, batch: int) -> Fit:
    """The line through measured launches of a batch.

    Args:
        rows: launches as sm80_kernels.py writes them.
        rate: bytes per second of the read stream of the same run.
        batch: sequences of a step.
    """
    mine = [r for r in rows if r["us"] and r["batch"] == batch]
    long = [r for r in mine if r["bytes"] >= STREAMS and r["kind"] != "head"]
    if len({r["bytes"] for r in long}) < 2:
        raise ValueError(f"no two measured launches of batch {batch} that stream weights")
    count = len(long)
    mean_x, mean_y = sum(r["bytes"] for r in long) / count, sum(r["us"] for r in long) / count
    slope = sum((r["bytes"] - mean_x) * (r["us"] - mean_y) for r in long)
    slope /= sum((r["bytes"] - mean_x) ** 2 for r in long)
    if slope <= 0:
        raise ValueError("launches of more bytes take no more time: these are no measurements of streams")
    short: dict[str, list[float]] = {}
    for r in mine:
        if r["bytes"] < STREAMS:
            short.setdefault(r["symbol"], []).append(r["us"])
    means = {symbol: sum(us) / len(us) for symbol, us in short.items()}
    return Fit(1e6 / slope / rate, mean_y - slope * mean_x, means)


def read_rate(card: Card, measured_share: float) -> float:
    """Bytes per second of a card's read stream, as far as it is not measured."""
    return card.measured or card.nominal * measured_share


def project(
    planned: Planned, card: Card, cards: int, context: int, found: Fit, share: float
) -> dict[str, Any]:
    """Time of a step on so many cards."""
    moved = card_bytes(planned.graph, cards, context)
    nbytes = moved.split + moved.replicated + moved.constants + moved.state
    rate = read_rate(card, share)
    stream_us = nbytes / (found.efficiency * rate) * 1e6
    launch_us = 0.0
    for launch, one in zip(planned.plan.launches, launch_bytes(planned.plan, context), strict=True):
        streams = one.total >= STREAMS
        launch_us += found.exposed_us if streams else found.short_us.get(launch.symbol, found.exposed_us)
    layers = planned.source.config.num_hidden_layers
    reduces = REDUCES_PER_LAYER * layers if cards > 1 else 0
    reduce_us = reduces * ALL_REDUCE[LINKS[card.name]]
    total = stream_us + launch_us + reduce_us
    batch = planned.plan.variant.batch
    return {
        "card": card.name,
        "cards": cards,
        "batch": batch,
        "context": context,
        "bytes": nbytes,
        "assumed_read_rate": rate,
        "stream_us": stream_us,
        "launch_us": launch_us,
        "all_reduce_us": reduce_us,
        "us": total,
        "tokens_per_second": batch / total * 1e6,
        "floor_us": nbytes / rate * 1e6,
        "fits": moved.resident <= card.memory,
    }


def measured_share(card_name: str | None, rate: float) -> float:
    """The read stream of the measured card, of its data sheet's bandwidth."""
    for card in CARDS:
        if card_name and card.name in card_name.lower().replace(" ", "-"):
            return rate / card.nominal
    raise UsageError(f"there is no data sheet of {card_name!r}")


def projections(results: Mapping[str, Any], batches: Sequence[int], context: int) -> list[dict[str, Any]]:
    """Every card, number of cards and batch."""
    rate = max(results["ceilings"]["read"], key=lambda r: r["bytes"])["bytes_per_second"]
    share = measured_share(results["card"], rate)
    rows = []
    for batch in batches:
        planned = plan_step(flash(), context, batch)
        found = fit(results["launches"], rate, batch)
        for name in LINKS:
            rows += [project(planned, card_named(name), n, context, found, share) for n in CARD_COUNTS]
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print("PROJECTION, not measured. us of a step: streams + launches + all-reduces")
    for r in rows:
        print(
            f"{r['cards']} x {r['card']:<15} batch {r['batch']}  {r['bytes'] / 1e9:6.2f} GB a card "
            f"{r['stream_us']:8.0f} + {r['launch_us']:5.0f} + {r['all_reduce_us']:5.0f} = {r['us']:8.0f} us "
            f"{r['tokens_per_second']:8.1f} tok/s {r['floor_us'] / r['us']:6.1%} of the bytes' floor"
            + ("" if r["fits"] else "  (does not fit: layer-scaled)")
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="what sm80_kernels.py wrote")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="write the projection as JSON")
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    rows = projections(results, [int(b) for b in options.batch.split(",")], options.context)
    show(rows)
    record = Record("projection", options.out)
    record.data |= {
        "projection": "computed from measurements on another card; nothing here was measured on these cards",
        "from": {k: results[k] for k in ("card", "date", "command", "versions")},
        "rows": rows,
    }
    record.data["card"] = None
    record.write()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
