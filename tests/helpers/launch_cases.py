"""Launches that reach every kernel of target sm80, and their form on disk for `tests/device/run_cases.py`.

Three kinds: each op alone on its examples, each op alone at the sizes of real models, and whole steps of the
example model in its fused phases and as single ops. Results are not looked at: other tests do that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from device_takes import takes
from one_launch import INPUTS, one_launch
from tiny_plan import tiny_plan, tiny_scales, tiny_source
from torch import Tensor
from wide_calls import Operands, vector, wide_calls

from rewright.codegen.kernels.sm80 import SINGLE
from rewright.ir.op import Examples, registry
from rewright.ir.plan import Plan
from rewright.passes.manager import PassOptions

STEPS = 2
"""Steps of a whole plan, one behind the other."""


@dataclass(frozen=True)
class LaunchCase:
    """A plan with the memory it runs on.

    Attributes:
        weights: as they lie in an artifact.
        arena, state: what they hold before the first step.
        steps: tokens, pos, n_valid and slot of each step, as one i32 vector.
    """

    name: str
    plan: Plan
    weights: dict[str, Tensor]
    arena: Tensor
    state: Tensor
    steps: tuple[Tensor, ...]


def launch_cases() -> Iterator[LaunchCase]:
    """All of them; the smallest first."""
    for name in sorted(kernel.covers[0].ops[0] for kernel in SINGLE):
        for operands, attrs in registry()[name].example_calls(0):
            if takes(registry()[name], operands):
                yield from _alone(name, operands, attrs)
    for name, operands, attrs in (*wide_calls(Examples(7)), *_keys_calls(Examples(8))):
        yield from _alone(name, operands, registry()[name].bind_attrs(attrs))
    for kind, batch in (("decode", 1), ("decode", 8), ("chunk", 1)):
        yield _step("faithful", kind, batch)
    yield _step("bf16", "decode", 1)
    yield _step("bf16", "decode", 8)
    yield _step("faithful", "decode", 1, calibrated=True)
    yield _step("faithful", "decode", 8, calibrated=True)
    yield _step("faithful", "decode", 1, to="traced")
    yield _step("faithful", "chunk", 1, to="traced")


def _alone(name: str, operands: Operands, attrs: dict[str, Any]) -> Iterator[LaunchCase]:
    """An op's kernel, with dense and with padded rows; as one launch too where there are two of it."""
    seen = set()
    for pad, whole in ((False, False), (True, False), (True, True)):
        launch = one_launch(registry()[name], operands, attrs, pad=pad, target="sm80", whole=whole)
        symbols = tuple(planned.symbol for planned in launch.plan.launches)
        if (pad, symbols) not in seen:
            seen.add((pad, symbols))
            inputs = torch.cat([launch.step[vector].flatten() for vector in INPUTS])
            title = f"{name}, {'padded' if pad else 'dense'} rows"
            yield LaunchCase(title, launch.plan, launch.weights, launch.arena, launch.state, (inputs,))


def _keys_calls(gen: Examples) -> Iterator[tuple[str, Operands, dict[str, Any]]]:
    """Attention and the indexer at head dims that have kernels of their own: one tile of keys for each block,
    and of many rows several."""
    f32 = torch.float32
    for dim in (128, 256, 512):
        for tokens, pos, n_valid in ((1, (90, 7), (1, 0)), (130, (70,), (3,))):
            batch, heads = len(pos), 20
            steps = (vector(*pos), vector(*n_valid), vector(*reversed(range(batch))))
            q = gen.randn(batch, tokens, heads, dim)
            keys = (gen.randn(batch, tokens, dim), gen.randn(batch + 1, 40, dim))
            entries = (gen.randn(batch + 1, 128, dim), gen.integers(-1, 128, batch, tokens, 60))
            sink, tables = gen.randn(heads, dtype=f32), [gen.randn(512, 32, dtype=f32) for _ in range(2)]
            attrs = {"ratio": 4, "capacity": 512, "scale": dim**-0.5}
            yield "sparse_attention", (q, *keys, *entries, sink, *steps), attrs
            fused = {**attrs, "heads": heads, "eps": 1e-6, "tail": [2, heads * dim // 2]}
            yield "attention", (q.flatten(2), *keys, *entries, sink, *tables, *steps), fused
    pos, n_valid, slot = vector(30, 411), vector(2, 3), vector(1, 0)
    scored = (gen.randn(2, 3, 20, 128), gen.randn(2, 3, 20), gen.randn(3, 256, 128), pos, n_valid, slot)
    attrs = {"ratio": 4, "capacity": 1024, "weight_scale": 0.25}
    yield "index_score", scored, attrs
    yield "index_select", scored, {**attrs, "k": 40}
    for dtype in (torch.bfloat16, f32):
        scores = gen.randn(1, 1, 9000, dtype=dtype)
        yield "index_topk", (scores, vector(35_999), vector(1)), {"ratio": 4, "k": 512}


def _step(
    numerics: str, kind: str, batch: int, to: str | None = None, calibrated: bool = False
) -> LaunchCase:
    """Steps of the example model. One of several sequences is masked, and the end of the last chunk."""
    source = tiny_source(numerics)
    scales = tiny_scales(source) if calibrated else None
    plan, weights = tiny_plan(source, kind, batch, PassOptions(to=to) if to else None, scales)
    generator = torch.Generator().manual_seed(1)
    shape = (batch, plan.variant.tokens)
    steps = []
    for at in range(STEPS):
        tokens = torch.randint(0, source.config.vocab_size, shape, generator=generator, dtype=torch.int32)
        n_valid = torch.full((batch,), shape[1] - (3 * at if shape[1] > 3 else 0), dtype=torch.int32)
        if batch > 1:
            n_valid[-2] = 0
        pos = torch.full((batch,), at * shape[1], dtype=torch.int32)
        slot = torch.arange(batch, dtype=torch.int32)
        steps.append(torch.cat([tokens.flatten(), pos, n_valid, slot]))
    arena = torch.full((plan.arena_bytes,), 0xFF, dtype=torch.uint8)
    state = torch.zeros(plan.state_bytes, dtype=torch.uint8)
    title = (
        f"{kind} step of {batch}, {numerics}{f', {to}' if to else ''}{', calibrated' if calibrated else ''}"
    )
    return LaunchCase(title, plan, weights, arena, state, tuple(steps))


def write_cases(cases: Iterator[LaunchCase], folder: Path) -> set[str]:
    """Write cases.json, and memory.bin that it points into; returns the symbols of all launches."""
    symbols: set[str] = set()
    index = []
    with (folder / "memory.bin").open("wb") as file:
        content = _Content(file)
        for case in cases:
            symbols |= {launch.symbol for launch in case.plan.launches}
            index.append(
                {
                    "name": case.name,
                    "plan": case.plan.to_text(),
                    "weights": {name: content.add(tensor) for name, tensor in case.weights.items()},
                    "arena": content.add(case.arena),
                    "state": content.add(case.state),
                    "steps": [content.add(step) for step in case.steps],
                }
            )
    (folder / "cases.json").write_text(json.dumps(index), encoding="utf-8")
    return symbols


class _Content:
    """A file of tensors, each piece of bytes once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._spans: dict[bytes, tuple[int, int]] = {}

    def add(self, tensor: Tensor) -> tuple[int, int]:
        """Where the tensor's bytes lie: offset and number."""
        flat = tensor.contiguous().flatten()
        content = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        if content not in self._spans:
            self._spans[content] = (self._file.tell(), len(content))
            self._file.write(content)
        return self._spans[content]
