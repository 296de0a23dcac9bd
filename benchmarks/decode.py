"""V4-Flash's decode step on a card: the whole step in one CUDA graph, scaled to 43 layers, beside peers.

usage: python benchmarks/decode.py [--layers 2,6,6|full] [--contexts 1024,8192,32768] [--batch 1,8]
                                   [--no-peers] [--dry-run] [--out results.json]

A card of 141 GB does not hold all of V4-Flash, so a model of some of its layers is measured: every layer has
random weights of its own, every step other tokens and so other experts. The same model with fewer layers of
one kind gives the time of a layer of that kind, and the figures are those of
2 window + 21 ratio-4 + 20 ratio-128 layers and the rest of a step (embedding, head). Bytes are the weights
that the step reads, with the experts that the measured steps really chose, and the decode state; the floor
is these bytes at the rate of the read stream measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decode_peers
import torch
from device_bench import (
    Bound,
    Ceilings,
    Inputs,
    Planned,
    Record,
    driver,
    flash,
    graph_of,
    missing_kernels,
    new_state,
    open_device,
    plan_step,
    replay_us,
)
from torch import Tensor

from rewright.frontend.config import ModelConfig
from rewright.ir.launch_bytes import launch_bytes, routed_values
from rewright.ir.plan import Plan
from rewright.ir.stages import layer_of
from rewright.random_model import random_weights, reduced, weight_types
from rewright.runtime import _native

KINDS = (0, 4, 128)
STEPS = 48
"""Steps that are timed."""
COUNTED = 8
"""Steps of which the chosen experts are counted."""
RESERVE = 10 << 30
"""Bytes of the card that weights leave free with `--layers full`."""

Counts = tuple[int, int, int]
"""Window, ratio-4 and ratio-128 layers."""


def ratios_of(counts: Counts) -> list[int]:
    """Compression ratios in the model's order: window layers, then ratio 4 and 128 in turn."""
    window, four, many = counts
    pairs = itertools.zip_longest([4] * four, [128] * many)
    return [0] * window + [ratio for pair in pairs for ratio in pair if ratio is not None]


def part_of(config: ModelConfig, counts: Counts) -> ModelConfig:
    """The model with so many layers; the window layers and the first behind them route by token id."""
    return reduced(config, ratios_of(counts), hash_layers=counts[0] + 1)


def counts_of(ratios: Sequence[int]) -> Counts:
    window, four, many = (list(ratios).count(kind) for kind in KINDS)
    return window, four, many


def with_fewer(counts: Counts) -> dict[int, Counts]:
    """The same model with fewer layers of one kind, by kind."""
    found = {}
    for i, kind in enumerate(KINDS):
        fewer = list(counts)
        fewer[i] = max(1, counts[i] // 2)
        found[kind] = (fewer[0], fewer[1], fewer[2])
    return found


def counts_that_fit(config: ModelConfig, context: int, memory: int) -> Counts:
    """The first layers of the model that leave `RESERVE` of the memory free."""
    ratios = config.compress_ratios
    for layers in range(len(ratios), 0, -1):
        counts = counts_of(ratios[:layers])
        if min(counts) == 0:
            break
        plan = plan_step(part_of(config, counts), context, 1).plan
        held = sum(t.nbytes for t in weight_types([plan]).values()) + plan.state_bytes
        if held + RESERVE <= memory:
            return counts
    raise RuntimeError("not one layer of each kind fits the card")


def layer_names(small: Sequence[int], large: Sequence[int]) -> dict[int, int]:
    """The layer of the large model that stands in for each of the small one: the n-th of its kind."""
    seen: dict[int, int] = defaultdict(int)
    places = {kind: [i for i, ratio in enumerate(large) if ratio == kind] for kind in KINDS}
    found = {}
    for layer, ratio in enumerate(small):
        found[layer] = places[ratio][seen[ratio]]
        seen[ratio] += 1
    return found


def shared_weights(plan: Plan, weights: Mapping[str, Tensor], layers: Mapping[int, int]) -> dict[str, Tensor]:
    """The weights of a smaller model, taken from a larger one."""

    def of(name: str) -> Tensor:
        return weights[re.sub(r"^layers\.(\d+)\.", lambda m: f"layers.{layers[int(m[1])]}.", name)]

    return {name: of(name) for name in weight_types([plan])}


@dataclass(frozen=True)
class Step:
    """A measured model.

    Attributes:
        us: microseconds of a step, one for each step.
        distinct: experts that a layer of each kind read, mean over layers and steps; empty if not counted.
        finite: whether the last logits are.
    """

    us: list[float]
    distinct: dict[int, float]
    finite: bool

    @property
    def median(self) -> float:
        return statistics.median(self.us)


def run_step(
    planned: Planned,
    weights: Mapping[str, Tensor],
    context: int,
    batch: int,
    device: _native.Device,
    *,
    count: bool,
    overlap: bool,
) -> Step:
    """Time steps that end at `context` tokens, and count the experts that some of them choose."""
    plan = planned.plan
    if absent := missing_kernels(plan):
        raise RuntimeError(f"this build has no kernels for {', '.join(absent)}")
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device="cuda")
    inputs, state = Inputs(batch), new_state(plan)
    bound = Bound(plan, weights, arena, state, inputs, device)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, planned.source.config.vocab_size, (STEPS, batch), generator=generator)
    table = inputs.table(tokens, context - STEPS)
    inputs.tensor.copy_(table[0])
    graph = graph_of([bound.run_overlapped if overlap else bound.run])

    def set_step(i: int) -> None:
        inputs.tensor.copy_(table[i % STEPS])

    replay_us(graph, 4, set_step)
    us = replay_us(graph, STEPS, set_step)
    logits = bound.value(plan.results["logits"]).view(torch.float32)
    finite = bool(logits.isfinite().all())
    distinct = (
        count_experts(planned, bound, [lambda i=i: set_step(i) for i in range(COUNTED)]) if count else {}
    )
    return Step(us, distinct, finite)


def count_experts(planned: Planned, bound: Bound, steps: Sequence[Any]) -> dict[int, float]:
    """Distinct experts of a layer by kind: steps are run launch by launch, and ids read as they come up."""
    plan, ratios = planned.plan, planned.source.config.compress_ratios
    routed = routed_values(plan)
    found: dict[int, list[int]] = defaultdict(list)
    for set_step in steps:
        set_step()
        done = 0
        for at, ids in routed.items():
            bound.run(done, at + 1)
            done = at + 1
            chosen = bound.value(ids).view(torch.int32)
            layer = layer_of(plan.launches[at])
            assert layer is not None
            found[ratios[layer]].append(int(chosen[chosen >= 0].unique().numel()))
        bound.run(done)
    torch.cuda.synchronize()
    return {kind: statistics.mean(counts) for kind, counts in found.items()}


def whole_bytes(
    config: ModelConfig, context: int, batch: int, max_context: int, distinct: Mapping[int, float]
) -> dict[str, float]:
    """Bytes of a step of the whole model, with the experts that were counted; expected ones else."""
    plan = plan_step(config, context, batch, max_context).plan
    counted = {}
    for at, ids in routed_values(plan).items():
        layer = layer_of(plan.launches[at])
        assert layer is not None
        if (kind := config.compress_ratios[layer]) in distinct:
            counted[ids] = distinct[kind]
    moved = launch_bytes(plan, context, counted)
    return {
        "weights": sum(m.weights_read for m in moved),
        "state": sum(m.state for m in moved),
        "activations": sum(m.activations for m in moved),
        "launches": len(plan.launches),
    }


def scaled(
    full: Counts, whole: Counts, us: Mapping[str, float], fewer: Mapping[int, Counts]
) -> dict[str, float]:
    """Times of a layer of each kind and of the rest, and those of the whole model, in microseconds.

    Args:
        full: layers of the measured model.
        whole: layers of the model that is asked for.
        us: median step of the model ("full") and of those with fewer layers, by kind.
        fewer: layers of these.
    """
    layer = {}
    for i, kind in enumerate(KINDS):
        taken = full[i] - fewer[kind][i]
        if taken == 0:
            raise ValueError(f"the measured model needs two layers of ratio {kind}")
        layer[kind] = (us["full"] - us[str(kind)]) / taken
    rest = us["full"] - sum(n * layer[kind] for n, kind in zip(full, KINDS, strict=True))
    total = rest + sum(n * layer[kind] for n, kind in zip(whole, KINDS, strict=True))
    return {"t0": layer[0], "t4": layer[4], "t128": layer[128], "rest": rest, "total": total}


def result_of(
    batch: int, times: Mapping[str, float], moved: Mapping[str, float], ceilings: Ceilings
) -> dict[str, Any]:
    """Tokens per second, floor and their ratio."""
    floor = (moved["weights"] + moved["state"]) / ceilings.rate * 1e6
    total = times["total"]
    return {
        "us": dict(times),
        "tokens_per_second": batch / total * 1e6,
        "floor_us": floor,
        "floor_tokens_per_second": batch / floor * 1e6,
        "of_floor": floor / total,
        "gb_per_second": (moved["weights"] + moved["state"]) / total / 1e3,
    }


def measure(
    config: ModelConfig,
    full: Counts,
    context: int,
    batch: int,
    max_context: int,
    weights: Mapping[str, Tensor],
    device: _native.Device,
    ceilings: Ceilings,
    *,
    overlap: bool,
) -> dict[str, Any]:
    """One row: a context and a batch."""
    fewer = with_fewer(full)
    steps: dict[str, Step] = {}
    for name, counts in {"full": full, **{str(kind): c for kind, c in fewer.items()}}.items():
        planned = plan_step(part_of(config, counts), context, batch, max_context)
        layers = layer_names(ratios_of(counts), ratios_of(full))
        mine = shared_weights(planned.plan, weights, layers)
        steps[name] = run_step(planned, mine, context, batch, device, count=name == "full", overlap=overlap)
        gc.collect()
        torch.cuda.empty_cache()
    whole = counts_of(config.compress_ratios)
    times = scaled(full, whole, {name: s.median for name, s in steps.items()}, fewer)
    distinct = steps["full"].distinct
    moved = whole_bytes(config, context, batch, max_context, distinct)
    return {
        "context": context,
        "batch": batch,
        "measured_layers": {"full": full, **{str(kind): c for kind, c in fewer.items()}},
        "measured_us": {
            name: {"median": s.median, "min": min(s.us), "max": max(s.us)} for name, s in steps.items()
        },
        "finite_logits": all(s.finite for s in steps.values()),
        "distinct_experts": {"counted, mean of layers and steps": {str(k): v for k, v in distinct.items()}},
        "bytes": moved,
        **result_of(batch, times, moved, ceilings),
    }


def show(name: str, row: Mapping[str, Any]) -> None:
    us = row["us"]
    print(
        f"{name:<34}{row['context']:>7}{row['batch']:>6}"
        + "".join(f"{us[k]:>10.1f}" for k in ("t0", "t4", "t128", "rest"))
        + f"{us['total'] / 1e3:>9.3f} ms{row['tokens_per_second']:>9.1f} tok/s"
        f"{row['floor_us'] / 1e3:>9.3f} ms{row['of_floor']:>8.1%}",
        flush=True,
    )


def show_bytes(context: int, batch: int, moved: Mapping[str, float], ceilings: Ceilings) -> None:
    read = moved["weights"] + moved["state"]
    print(
        f"context {context:>6}, batch {batch}: {moved['weights'] / 1e9:.3f} GB of weights, "
        f"{moved['state'] / 1e6:.1f} MB of state, {moved['launches']} launches, "
        f"floor {read / ceilings.rate * 1e3:.3f} ms, {batch * ceilings.rate / read:.0f} tok/s"
    )


def counts_from(text: str) -> Counts:
    window, four, many = map(int, text.split(","))
    return window, four, many


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="2,6,6", help="window, ratio-4 and ratio-128 layers, or full")
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--overlap", action="store_true", help="launches that can overlap")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers-only", action="store_true")
    parser.add_argument(
        "--peer-experts", type=int, default=256, help="routed experts that transformers holds"
    )
    parser.add_argument("--dry-run", action="store_true", help="plans and bytes only, without a card")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    contexts, batches = ([int(n) for n in t.split(",")] for t in (options.contexts, options.batch))
    config = flash()
    config = reduced(config, config.compress_ratios)  # without what belongs to no layer of the step
    record = Record("decode", options.out)
    rows: list[dict[str, Any]] = []
    record.data |= {
        "model": "examples/configs/v4-flash.json, faithful, random weights, layer-scaled",
        "driver": None if options.dry_run else driver(),
        "decode": rows,
    }
    if options.dry_run:
        dry_run(config, options.layers, contexts, batches)
        return
    ceilings = None
    with record.section("ceilings"):
        ceilings = Ceilings.measure()
        record.data["ceilings"] = ceilings.record
        print(f"read stream {ceilings.rate / 1e12:.3f} TB/s")
    if ceilings is None:
        record.finish()
        return
    print(f"{'':<34}{'context':>7}{'batch':>6}{'t0 us':>10}{'t4':>10}{'t128':>10}{'rest':>10}", flush=True)
    if not options.peers_only:
        measure_ours(
            record, rows, config, options.layers, contexts, batches, ceilings, overlap=options.overlap
        )
    gc.collect()
    torch.cuda.empty_cache()
    if not options.no_peers:
        measure_peers(record, config, contexts, batches, options.peer_experts, ceilings)
    record.data["memory_peak_bytes"] = torch.cuda.max_memory_allocated()
    print(f"\nscaled to {counts_of(config.compress_ratios)} layers of ratio {KINDS}")
    for row in rows:
        show("rewright, one CUDA graph", row)
    for peer in record.data.get("peers", []):
        show(peer["name"], peer)
    record.finish()


def measure_ours(
    record: Record,
    rows: list[dict[str, Any]],
    config: ModelConfig,
    layers: str,
    contexts: Sequence[int],
    batches: Sequence[int],
    ceilings: Ceilings,
    *,
    overlap: bool,
) -> None:
    """Rows of every context and batch over one set of weights."""
    longest = max(contexts)
    held: tuple[Counts, dict[str, Tensor], _native.Device] | None = None
    with record.section("weights"):
        device = open_device()
        free = torch.cuda.mem_get_info()[0]
        full = counts_that_fit(config, longest, free) if layers == "full" else counts_from(layers)
        planned = plan_step(part_of(config, full), longest, 1)
        if absent := missing_kernels(planned.plan):
            raise RuntimeError(f"this build has no kernels for {', '.join(absent)}")
        weights = random_weights([planned.plan], planned.source, "cuda", seed=11)
        torch.cuda.synchronize()
        nbytes = sum(t.nbytes for t in weights.values())
        record.data["measured"] = {"layers": full, "weight_bytes": nbytes}
        print(f"{full} layers, {nbytes / 1e9:.1f} GB of weights")
        held = full, weights, device
    if held is None:
        return
    full, weights, device = held
    for context in contexts:
        for batch in batches:
            with record.section(f"context {context}, batch {batch}"):
                row = measure(
                    config, full, context, batch, longest, weights, device, ceilings, overlap=overlap
                )
                rows.append(row)
                show("rewright, one CUDA graph", row)
                if not row["finite_logits"]:
                    raise RuntimeError("logits are not finite")


def measure_peers(
    record: Record,
    config: ModelConfig,
    contexts: Sequence[int],
    batches: Sequence[int],
    experts: int,
    ceilings: Ceilings,
) -> None:
    """The peers at the shortest context, scaled and rated as ours."""
    context, whole = min(contexts), counts_of(config.compress_ratios)
    peers: list[dict[str, Any]] = []
    record.data["peers"] = peers
    for name, measure_peer in decode_peers.PEERS.items():
        for batch in batches:
            with record.section(f"{name}, batch {batch}"):
                found = measure_peer(config, context, batch, experts)
                us = dict(found["us"])
                us["total"] = us["rest"] + sum(n * us[f"t{k}"] for n, k in zip(whole, KINDS, strict=True))
                moved = whole_bytes(config, context, batch, max(contexts), {})
                peers.append(
                    {
                        "name": name,
                        "context": context,
                        "batch": batch,
                        "notes": found["notes"],
                        "bytes": "of the packed model with the expected experts: our floor, not the peer's",
                        **result_of(batch, us, moved, ceilings),
                    }
                )
                show(name, peers[-1])
            gc.collect()
            torch.cuda.empty_cache()


def dry_run(config: ModelConfig, layers: str, contexts: Sequence[int], batches: Sequence[int]) -> None:
    """What can be said without a card: layers, bytes and floors with a known card's read stream."""
    longest, ceilings = max(contexts), Ceilings.assumed()
    memory = 150_000_000_000
    full = counts_that_fit(config, longest, memory) if layers == "full" else counts_from(layers)
    plan = plan_step(part_of(config, full), longest, 1).plan
    nbytes = sum(t.nbytes for t in weight_types([plan]).values())
    print(f"layers {full}: {nbytes / 1e9:.1f} GB of weights, {plan.state_bytes / 1e9:.2f} GB of state")
    print(f"floors at {ceilings.rate / 1e12:.2f} TB/s, experts as expected")
    for context in contexts:
        for batch in batches:
            show_bytes(context, batch, whole_bytes(config, context, batch, longest, {}), ceilings)
    absent = missing_kernels(plan)
    print(f"kernels missing in this build: {', '.join(absent) or 'none'}")


if __name__ == "__main__":
    main()
