"""What a launch of a plan belongs to: its stage (the kernel, whatever the layer), its layer, its module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rewright.ir.plan import Launch, Plan

_HALVES = ("attn", "ffn")


def stages_of(plan: Plan) -> list[str]:
    """The stage of every launch.

    Launches of one phase are one stage, named after what their symbols have in common: `attention` of
    `attention_split` and `attention_combine`. A kernel that stands before both halves of a layer is two
    stages, such as `sublayer_in attn` and `sublayer_in ffn`.
    """
    symbols: dict[str, list[list[str]]] = {}
    for launch in plan.launches:
        symbols.setdefault(launch.phase, []).append(launch.symbol.partition(".")[2].split("_"))
    kernels = {phase: "_".join(_common(words) or words[0]) for phase, words in symbols.items()}
    halves: dict[str, set[str]] = {}
    for launch in plan.launches:
        halves.setdefault(kernels[launch.phase], set()).add(_half(launch))
    found = []
    for launch in plan.launches:
        kernel = kernels[launch.phase]
        found.append(f"{kernel} {_half(launch)}".strip() if len(halves[kernel]) > 1 else kernel)
    return found


def layer_of(launch: Launch) -> int | None:
    """The layer of a launch. One that takes parts of two layers ends a layer and begins the next, whose
    it is."""
    modules = (node.split(".") for node in launch.nodes)
    return max((int(parts[1]) for parts in modules if parts[0] == "layers"), default=None)


def module_of(launch: Launch) -> str:
    """Path of the innermost module that has all of a launch's nodes, of those of the layer whose it is; that
    of the first where there is none."""
    layer = layer_of(launch)
    paths = [node.partition("/")[0].split(".") for node in launch.nodes]
    if layer is not None:
        paths = [path for path in paths if path[:2] == ["layers", str(layer)]]
    return ".".join(_common(paths) or paths[0])


def _common(lists: Sequence[list[str]]) -> list[str]:
    """What all lists begin with."""
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*lists, strict=False))
    return [parts[0] for parts in alike]


def _half(launch: Launch) -> str:
    """Half of a layer that a launch computes in the end; "" outside of layers."""
    parts = (part for node in reversed(launch.nodes) for part in node.split(".")[2:3])
    return next((part for part in parts if part in _HALVES), "")
