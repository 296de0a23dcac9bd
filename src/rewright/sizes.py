"""Sizes of a compiled model that is not made: what `compile-model --dry-run` prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewright.compiler import CompileOptions, Progress, plan_all, rewrite_all
from rewright.ir.graph import kind_of
from rewright.ir.kv_memory import KeyMemory, key_memory
from rewright.ir.kv_memory import render as render_keys
from rewright.ir.traffic import traffic
from rewright.passes.report import Report


@dataclass(frozen=True)
class Sizes:
    """All bytes.

    Attributes:
        weights: stored weights and constants, by component.
        state: decode state, by kind of tensor (`attn.window`, `attn.compressor.cache`, ...).
        slots: sequences that the state is for.
        variants: of each variant its nodes when traced and at the last stage, the launches of its plan,
            bytes read and written by one step at its full capacity, and bytes of its activations.
        target: what the plans are for.
        keys: what the keys of one sequence take, as long as the largest decode step allows.
    """

    weights: dict[str, int]
    state: dict[str, int]
    slots: int
    variants: dict[str, dict[str, int]]
    target: str
    keys: KeyMemory

    @property
    def total_weights(self) -> int:
        return sum(self.weights.values())

    @property
    def total_state(self) -> int:
        return sum(self.state.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "weight_bytes": self.total_weights,
            "state": self.state,
            "state_bytes": self.total_state,
            "slots": self.slots,
            "target": self.target,
            "keys": self.keys.to_json(),
            "variants": self.variants,
        }


def measure(
    path: Path, options: CompileOptions, progress: Progress
) -> tuple[Sizes, dict[str, Report], list[str]]:
    """Sizes of what a checkpoint folder or a config.json would become, pass reports, and notes.

    Only the configuration and tensor headers are read, no model is written.
    """
    target = options.choose_target()
    source = options.open(path, target)
    model = rewrite_all(source, options, progress=progress)
    plans = {plan.variant: plan for plan in plan_all(model.graphs, target, progress)}
    weights: dict[str, int] = {}
    for name, type in model.weights.items():
        weights[_component(name)] = weights.get(_component(name), 0) + type.nbytes
    state: dict[str, int] = {}
    for node in next(iter(model.graphs.values())).of_kind("state"):
        kind = _without_layer(node.meta["names"][0])
        state[kind] = state.get(kind, 0) + node.meta["types"][0].nbytes
    variants = {}
    for variant, graph in model.graphs.items():
        moved = traffic(graph)
        traced = model.reports[variant.name].passes
        variants[variant.name] = {
            "nodes_traced": traced[0].before.nodes if traced else len(graph.ops),
            "nodes": len([n for n in graph.nodes if kind_of(n) == "op"]),
            "launches": len(plans[variant].launches),
            "bytes_read": sum(moved.reads.values()),
            "bytes_written": moved.written,
            "arena_bytes": plans[variant].arena_bytes,
        }
    ordered = dict(sorted(weights.items(), key=lambda item: -item[1]))
    longest = max(v for v in model.graphs if v.kind == "decode" and v.batch == 1)
    keys = key_memory(model.graphs[longest], longest.capacity)
    sizes = Sizes(ordered, dict(sorted(state.items())), source.limits.max_batch, variants, target.name, keys)
    return sizes, model.reports, source.notes


def _without_layer(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[2:]) if parts[0] == "layers" else name


def _component(name: str) -> str:
    """Weights of one kind over all layers: `ffn.experts`, `attn`, `embed`, ..."""
    parts = _without_layer(name).split(".")
    if parts[0] == "ffn" and len(parts) > 2:
        return ".".join(parts[:2])
    if parts[0] == "attn" and parts[1] in ("indexer", "compressor"):
        return ".".join(parts[:2])
    return "hyper-connections" if parts[0].startswith("hc_") else parts[0]


def render(sizes: Sizes) -> str:
    """The sizes as aligned text."""
    lines = ["weights"]
    lines += [f"  {name:<20} {amount:>18,}" for name, amount in sizes.weights.items()]
    lines.append(f"  {'total':<20} {sizes.total_weights:>18,}")
    lines.append(f"state of {sizes.slots} sequence{'s' if sizes.slots > 1 else ''}")
    lines += [f"  {name:<32} {amount:>18,}" for name, amount in sizes.state.items()]
    lines.append(f"  {'total':<32} {sizes.total_state:>18,}")
    lines += render_keys(sizes.keys).splitlines()
    width = max(24, *(len(name) + 1 for name in sizes.variants))
    lines.append(
        f"{'plans for ' + sizes.target:<{width + 2}}{'nodes traced':>13} {'nodes':>7} {'launches':>9} "
        f"{'bytes read':>18} {'bytes written':>16} {'activations':>14}"
    )
    for name, v in sizes.variants.items():
        lines.append(
            f"  {name:<{width}}{v['nodes_traced']:>13,} {v['nodes']:>7,} {v['launches']:>9,} "
            f"{v['bytes_read']:>18,} {v['bytes_written']:>16,} {v['arena_bytes']:>14,}"
        )
    most = max(v["arena_bytes"] for v in sizes.variants.values())
    total = sizes.total_weights + sizes.total_state + most
    lines.append(f"to run it: {total:,} bytes (weights, state, activations of the largest variant)")
    return "\n".join(lines) + "\n"
