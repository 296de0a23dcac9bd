"""Calibrated scales on a card: decode steps of some of V4-Flash's layers, with them and without, in turn.

usage: python benchmarks/static_scales.py [--layers 2,3,3] [--context 1024] [--batch 1,8] [--rounds 5]
                                          [--dry-run] [--out results.json]

Both plans read the same random weights and states. The scales are made up, one for 128 values: what a step
takes does not depend on how large they are. Launches, activation bytes and searches for a largest magnitude
are counted in plans and graphs, microseconds are medians over the steps of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from decode import STEPS, Counts, counts_from, part_of
from device_bench import (
    Bound,
    Inputs,
    Planned,
    Record,
    driver,
    flash,
    graph_of,
    new_state,
    open_device,
    plan_step,
    replay_us,
)
from torch import Tensor

from rewright.frontend.config import ModelConfig
from rewright.frontend.source import ModelSource
from rewright.ir.amax import amax_reductions
from rewright.ir.launch_bytes import launch_bytes
from rewright.ir.static_scales import Segment, StaticScales
from rewright.random_model import random_weights, reduced
from rewright.rewriting import facts_of
from rewright.runtime import _native

BLOCK = 128
EXPONENT = -6
"""Values of a random model are near one, and 448 is the largest code."""


def made_up(source: ModelSource) -> StaticScales:
    """Scales for every input of a linear."""
    about, segments = facts_of(source), {}
    for name, type in source.weight_types().items():
        module, _, what = name.rpartition(".")
        if what == "weight" and about.is_scaled(module):
            site = f"{module}.x"
            segments[site] = Segment(site, BLOCK, (EXPONENT,) * (type.shape[-1] // BLOCK))
    return StaticScales("", segments, {name: name for name in segments})


def counted(planned: Planned, context: int) -> dict[str, int]:
    """What can be said of a plan without running it."""
    moved = launch_bytes(planned.plan, context)
    return {
        "launches": len(planned.plan.launches),
        "activation_bytes": int(sum(m.activations for m in moved)),
        "amax_reductions": amax_reductions(planned.graph.ops),
    }


def steps_of(
    plans: Mapping[str, Planned],
    weights: Mapping[str, Tensor],
    context: int,
    batch: int,
    rounds: int,
    device: _native.Device,
) -> dict[str, list[float]]:
    """Microseconds of every step of every plan; plans take turns, round by round."""
    graphs, kept, inputs = {}, [], Inputs(batch)
    generator = torch.Generator().manual_seed(7)
    vocabulary = next(iter(plans.values())).source.config.vocab_size
    table = inputs.table(torch.randint(0, vocabulary, (STEPS, batch), generator=generator), context - STEPS)
    inputs.tensor.copy_(table[0])
    for name, planned in plans.items():
        plan = planned.plan
        mine = {n: weights[n] for n, place in plan.values.items() if place.space == "weight"}
        arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device="cuda")
        bound = Bound(plan, mine, arena, new_state(plan), inputs, device)
        graphs[name] = graph_of([bound.run])
        kept.append(bound)
    found: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, graph in graphs.items():
            replay_us(graph, 4, lambda i: inputs.tensor.copy_(table[i]))
            found[name] += replay_us(graph, STEPS, lambda i: inputs.tensor.copy_(table[i]))
    for bound in kept:
        if not bound.value(bound.plan.results["logits"]).view(torch.float32).isfinite().all():
            raise RuntimeError("logits are not finite")
    return found


def plans_of(config: ModelConfig, layers: Counts, context: int, batch: int) -> dict[str, Planned]:
    part = part_of(config, layers)
    found = plan_step(part, context, batch)
    scales = made_up(found.source)
    return {
        "found": found,
        "calibrated": plan_step(part, context, batch, static_scales=scales),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="2,3,3", help="window, ratio-4 and ratio-128 layers")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="plans only, without a card")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    config = flash()
    config = reduced(config, config.compress_ratios)  # without what belongs to no layer of the step
    layers, record = counts_from(options.layers), Record("static_scales", options.out)
    rows: list[dict[str, Any]] = []
    record.data |= {
        "model": f"examples/configs/v4-flash.json, faithful, random weights, {options.layers} layers",
        "driver": None if options.dry_run else driver(),
        "steps": rows,
    }
    for batch in map(int, options.batch.split(",")):
        with record.section(f"batch {batch}"):
            plans = plans_of(config, layers, options.context, batch)
            row: dict[str, Any] = {"context": options.context, "batch": batch}
            row |= {name: counted(planned, options.context) for name, planned in plans.items()}
            if not options.dry_run:
                device = open_device()
                both = [planned.plan for planned in plans.values()]
                weights = random_weights(both[:1], plans["found"].source, "cuda", seed=11)
                for segment in made_up(plans["found"].source).segments.values():
                    weights[segment.tensor_name] = segment.tensor().cuda()
                us = steps_of(plans, weights, options.context, batch, options.rounds, device)
                for name, times in us.items():
                    row[name] |= {"us": {"median": statistics.median(times), "min": min(times)}}
                row["ratio"] = row["calibrated"]["us"]["median"] / row["found"]["us"]["median"]
            rows.append(row)
            for name in plans:
                print(f"{name:<12}{row[name]}")
            if "ratio" in row:
                print(f"calibrated / found: {row['ratio']:.4f}")
    record.finish()


if __name__ == "__main__":
    main()
