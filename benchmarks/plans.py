"""The plans of V4-Flash: launches by kind of layer, and memory by context. Computed, not timed.

usage: python benchmarks/plans.py [--out results.json]

Only the configuration is read: a plan needs no weights. Each context is the --max-context of a model of
its own; the plans are those of its largest decode step for one sequence and of its largest chunk.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from origin import origin

from rewright.codegen.memory_table import MemoryTable, memory_table, render
from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.plan import Launch, Plan
from rewright.ir.stages import layer_of
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "configs" / "v4-flash.json"
CONTEXTS = (4 << 10, 128 << 10, 1 << 20)
KINDS = ("decode", "chunk")
OUTSIDE = "outside"
"""Launches that belong to no layer: the embedding and the head."""


def by_layer(plan: Plan) -> dict[int | None, list[Launch]]:
    """Launches by layer, in order."""
    found: dict[int | None, list[Launch]] = {}
    for launch in plan.launches:
        found.setdefault(layer_of(launch), []).append(launch)
    return found


def launches_by_kind(plan: Plan, ratios: list[int]) -> dict[str, dict[str, int]]:
    """How many layers have how many launches, by compression ratio: {"4": {"11": 21}}."""
    found: dict[str, Counter[str]] = {}
    for layer, launches in by_layer(plan).items():
        kind = OUTSIDE if layer is None else str(ratios[layer])
        found.setdefault(kind, Counter())[str(len(launches))] += 1
    return {kind: dict(counts) for kind, counts in found.items()}


def phases_of(plan: Plan, layer: int | None) -> list[dict[str, Any]]:
    """The phases of a layer: symbols and units, of a unit what follows the name of the layer."""
    found: dict[str, dict[str, Any]] = {}
    for launch in by_layer(plan)[layer]:
        phase = found.setdefault(launch.phase, {"symbols": [], "units": list(launch.nodes)})
        phase["symbols"].append(launch.symbol)
    return list(found.values())


def examples(ratios: list[int]) -> dict[int, int]:
    """A layer of every kind, by ratio: the first but layer 0, which begins as no other does."""
    return {ratio: ratios.index(ratio, 1) for ratio in dict.fromkeys(ratios)}


def plans_of(context: int) -> tuple[list[int], dict[tuple[str, str], Plan]]:
    """Compression ratio of every layer, and plans by kind of variant and target."""
    source = ModelSource.open(CONFIG, Numerics.FAITHFUL, max_context=context)
    ratios = list(source.config.compress_ratios)[: source.config.num_hidden_layers]
    found = {}
    for kind in KINDS:
        variants = [v for v in source.variants() if v.kind == kind]
        variant = max(variants, key=lambda v: v.capacity)
        graph = rewrite(source, variant, PassOptions()).graph
        for name, target in TARGETS.items():
            found[kind, name] = make_plan(graph, variant, target)
    return ratios, found


def show_launches(rows: list[dict[str, Any]]) -> None:
    print(f"{'plan':<22}{'target':<8}{'launches':>8}  by kind of layer: layers x launches")
    for row in rows:
        kinds = [
            f"{kind if kind == OUTSIDE else 'ratio ' + kind}: "
            + ", ".join(f"{layers} x {launches}" for launches, layers in counts.items())
            for kind, counts in row["by_kind"].items()
        ]
        print(f"{row['variant']:<22}{row['target']:<8}{row['launches']:>8}  {'; '.join(kinds)}")


def show_phases(ratios: list[int], plans: Mapping[tuple[str, str], Plan]) -> dict[str, Any]:
    """Print and return the phases of one layer of each kind, of the decode step on every target."""
    found: dict[str, Any] = {}
    for target in TARGETS:
        for ratio, layer in examples(ratios).items():
            phases = phases_of(plans["decode", target], layer)
            found[f"{target}, ratio {ratio}, layer {layer}"] = phases
            print(f"\n{target}, ratio {ratio}: layer {layer}")
            for phase in phases:
                units = ", ".join(phase["units"])
                print(f"  {' + '.join(phase['symbols'])}: {units}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    tables: dict[str, dict[str, MemoryTable]] = {kind: {} for kind in KINDS}
    first: tuple[list[int], dict[tuple[str, str], Plan]] | None = None
    for context in CONTEXTS:
        ratios, plans = plans_of(context)
        first = first or (ratios, plans)
        for (kind, target), plan in plans.items():
            table = memory_table(plan)
            tables[kind][f"{target} {context:,}"] = table
            rows.append(
                {
                    "variant": plan.variant.name,
                    "max_context": context,
                    "target": target,
                    "launches": len(plan.launches),
                    "by_kind": launches_by_kind(plan, ratios),
                    "memory": {**asdict(table), "total": table.total},
                }
            )
    show_launches(rows)
    for kind in KINDS:
        ordered = sorted(tables[kind].items(), key=lambda item: item[0].split()[0])
        print(f"\nmemory, {kind}\n{render(dict(ordered))}", end="")
    assert first is not None
    phases = show_phases(*first)
    record = {
        **origin("plans"),
        "model": "examples/configs/v4-flash.json, faithful, all passes, chunk 128, one sequence",
        "rows": rows,
        "phases of a decode step": phases,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
