"""Every launch of V4-Flash's decode step alone on a card: time, bytes, share of the read stream.

usage: python benchmarks/sm80_kernels.py [--batch 1,2,4,8] [--only SYMBOL,..] [--dry-run] [--out results.json]

A launch is a node of a CUDA graph of at least twenty, which go through sets of weights and states of 200 MB
in all, so that no node finds its own in the L2 cache. Beside it torch's bf16 product of matrices of the same
shapes, rotated likewise, and the read stream of the same run interpolated at the launch's bytes. One layer
of each kind; the context is 8 K tokens, at the last of which every compressor completes an entry.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from device_bench import (
    SLOTS,
    Bound,
    Ceilings,
    Inputs,
    Planned,
    Record,
    draw,
    driver,
    fill_activations,
    flash,
    launch_weights,
    new_state,
    node_us,
    open_device,
    plan_step,
)
from torch import Tensor

from rewright.ir.launch_bytes import LaunchBytes, launch_bytes, ops_of
from rewright.ir.plan import Plan
from rewright.ir.plan_part import launches_alone
from rewright.ir.stages import layer_of
from rewright.random_model import Maker, reduced
from rewright.runtime import _native

CONTEXT = 8192
RATIOS = (0, 0, 4, 128)
"""Layer 0 begins as no other does; a layer of each kind follows."""
HASH_LAYERS = 2
KINDS = {1: "window", 2: "ratio 4", 3: "ratio 128", None: "head"}
ROTATED = 200e6
MOST_SETS = 160
NODES = 20


def rows_of(planned: Planned) -> list[tuple[str, int]]:
    """The launches that are measured: kind of layer and position; of layer 0 only how it begins."""
    found = []
    for at, launch in enumerate(planned.plan.launches):
        layer = layer_of(launch)
        if layer in KINDS:
            found.append((KINDS[layer], at))
        elif launch.symbol == "sm80.start":
            found.append(("start", at))
    return found


def products(plan: Plan, at: int, distinct: float) -> list[tuple[int, int, int]]:
    """Matrices that a launch multiplies with: how many, rows, columns."""
    found = []
    for planned in ops_of(plan.launches[at]):
        named = [v for v in planned.reads if v is not None and plan.values[v].space == "weight"]
        shapes = [plan.values[v].type.shape for v in named if v.endswith((".weight", "_fn"))]
        match planned.op:
            case "expert_linear":
                found += [(max(1, round(distinct)), *s[1:]) for s in shapes]
            case "linear" | "grouped_linear" | "hc_mix":
                found += [(1, *s) for s in shapes]
    return found


def sets_of(moved: LaunchBytes) -> int:
    """How many sets of weights and states come to enough bytes."""
    cold = moved.weights_read + moved.state
    return 1 if cold < 1000 else max(2, min(MOST_SETS, math.ceil(ROTATED / cold)))


class Bench:
    """The launches of one step on a card."""

    def __init__(self, planned: Planned, batch: int, device: _native.Device, states: list[Tensor]):
        self.planned, self.plan, self.batch = planned, planned.plan, batch
        self._device, self._states = device, states
        self._arena = torch.zeros(self.plan.arena_bytes, dtype=torch.uint8, device="cuda")
        self._inputs = Inputs(batch)
        tokens = torch.randint(0, planned.source.config.vocab_size, (1, batch))
        self._inputs.tensor.copy_(self._inputs.table(tokens, CONTEXT - 1)[0])

    def measure(self, at: int) -> tuple[float, LaunchBytes, int]:
        """Microseconds of a launch, its bytes with the experts that it really read, and the sets used."""
        plan = self.plan
        phase = plan.launches[at].phase
        before = [i for i in range(at) if plan.launches[i].phase == phase]
        ready = [i for i in before if plan.launches[i].symbol in _native.device_kernels()]
        alone = launches_alone(plan, [*ready, at])
        fill_activations(plan, at, self._arena, CONTEXT)
        sets = sets_of(launch_bytes(plan, CONTEXT)[at])
        maker = Maker("cuda", at, experts=self.planned.source.config.n_routed_experts)
        names = launch_weights(plan, at)
        bound = []
        for i in range(sets):
            weights = draw(plan, names, self.planned.source, maker)
            bound.append(Bound(alone, weights, self._arena, self._state(i), self._inputs, self._device))
        bound[0].run()
        torch.cuda.synchronize()
        moved = launch_bytes(plan, CONTEXT, self._distinct(at))[at]
        place = len(ready)
        nodes = [lambda b=bound[i % sets]: b.run(place, place + 1) for i in range(max(NODES, sets))]
        return node_us(nodes), moved, sets

    def _state(self, i: int) -> Tensor:
        while len(self._states) <= i:
            self._states.append(new_state(self.plan, seed=len(self._states)))
        return self._states[i]

    def _distinct(self, at: int) -> dict[str, float]:
        """Experts that the launch read: ids that it chose, or was given."""
        found = {}
        for planned in ops_of(self.plan.launches[at]):
            ids = planned.reads[4] if planned.op == "expert_linear" else None
            if ids is not None and (place := self.plan.values[ids]).space == "arena":
                chosen = self._arena[place.offset : place.end].view(torch.int32)
                found[ids] = float(chosen[chosen >= 0].unique().numel())
        return found


def torch_us(shapes: Sequence[tuple[int, int, int]], batch: int) -> tuple[float, int]:
    """Microseconds and bytes of torch's bf16 products of these shapes, in a graph over rotated weights."""
    nbytes = sum(2 * count * n * k for count, n, k in shapes)
    sets = max(2, min(MOST_SETS, math.ceil(ROTATED / nbytes)))

    def operands(count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()

        return normal(count, batch, k), normal(count, n, k).mT

    drawn = [[operands(*shape) for shape in shapes] for _ in range(sets)]

    def node(i: int) -> None:
        for x, w in drawn[i]:
            if len(w) == 1:
                torch.mm(x[0], w[0])
            else:
                torch.bmm(x, w)

    return node_us([lambda i=i % sets: node(i) for i in range(max(NODES, sets))]), nbytes


def measure_row(
    kind: str, at: int, planned: Planned, batch: int, bench: Bench | None, ceilings: Ceilings
) -> dict[str, Any]:
    """A row of the table; without a card only what can be computed."""
    launch = planned.plan.launches[at]
    moved = launch_bytes(planned.plan, CONTEXT)[at]
    row: dict[str, Any] = {
        "kind": kind,
        "symbol": launch.symbol,
        "phase": launch.phase,
        "batch": batch,
        "us": None,
        "kernel": launch.symbol in _native.device_kernels(),
    }
    if bench is not None and row["kernel"]:
        row["us"], moved, row["sets"] = bench.measure(at)
    row |= {
        "bytes": moved.total,
        "weight_bytes": moved.weights_read,
        "state_bytes": moved.state,
        "activation_bytes": moved.activations,
        "distinct_experts": moved.distinct,
        "read_us": ceilings.read_us(moved.total),
    }
    if row["us"]:
        row["bytes_per_second"] = moved.total / row["us"] * 1e6
        row["of_read_stream"] = row["read_us"] / row["us"]
    return row


def show(row: dict[str, Any]) -> None:
    us = f"{row['us']:8.2f}" if row["us"] else "    none" if not row["kernel"] else "       -"
    rate = f"{row['bytes_per_second'] / 1e9:7.0f} {row['of_read_stream']:6.1%}" if row["us"] else " " * 14
    peer = (
        f"{row['torch_us']:8.2f} {row['torch_bytes'] / row['torch_us'] / 1e3:6.0f}"
        if "torch_us" in row
        else ""
    )
    print(
        f"{row['kind']:<10}{row['symbol']:<26}M={row['batch']}{row['bytes'] / 1e6:10.2f} MB"
        f"{row['read_us']:9.2f}{us} {rate}  {peer}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", default="1,2,4,8", help="sequences of a step")
    parser.add_argument("--only", help="symbols, all by default")
    parser.add_argument("--no-torch", action="store_true", help="without torch's products")
    parser.add_argument("--dry-run", action="store_true", help="plans and bytes only, without a card")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    batches = [int(b) for b in options.batch.split(",")]
    if max(batches) > SLOTS:
        parser.error(f"the state is for {SLOTS} sequences")
    record = Record("sm80 kernels", options.out)
    config = reduced(flash(), RATIOS, HASH_LAYERS)
    only = set(options.only.split(",")) if options.only else None
    rows: list[dict[str, Any]] = []
    record.data |= {
        "model": f"examples/configs/v4-flash.json, layers {list(RATIOS)}, faithful, context {CONTEXT}",
        "driver": None if options.dry_run else driver(),
        "launches": rows,
    }
    ceilings, device = Ceilings.assumed(), None
    if not options.dry_run:
        with record.section("ceilings"):
            ceilings = Ceilings.measure()
        with record.section("device"):
            device = open_device()
    record.data["ceilings"] = ceilings.record
    states: list[Tensor] = []
    peers: dict[tuple[Any, ...], tuple[float, int]] = {}
    for batch in batches:
        planned = None
        with record.section(f"batch {batch}: MB, us of the read stream, us, GB/s, share; torch us, GB/s"):
            planned = plan_step(config, CONTEXT, batch)
        if planned is None:
            continue
        bench = None if device is None else Bench(planned, batch, device, states)
        for kind, at in rows_of(planned):
            symbol = planned.plan.launches[at].symbol
            if only is not None and symbol not in only:
                continue
            name = f"{kind}, {symbol}, batch {batch}"
            row = {}
            try:
                row = measure_row(kind, at, planned, batch, bench, ceilings)
                shapes = products(planned.plan, at, row["distinct_experts"])
                first = [lau.phase for lau in planned.plan.launches].index(planned.plan.launches[at].phase)
                if shapes and at == first and not (options.dry_run or options.no_torch):
                    key = (batch, *shapes)
                    if key not in peers:
                        peers[key] = torch_us(shapes, batch)
                    row["torch_us"], row["torch_bytes"] = peers[key]
            except Exception:  # written down; the other launches are measured all the same
                record.fail(name)
            if row:
                rows.append(row)
                show(row)
            if not options.dry_run:
                gc.collect()
                torch.cuda.empty_cache()
        record.write()
    record.finish()


if __name__ == "__main__":
    main()
