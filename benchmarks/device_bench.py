"""What a card's benchmarks share: plans bound to random weights, timed CUDA graphs, ceilings, records."""

from __future__ import annotations

import itertools
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rewright
from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.config import ModelConfig, load_config
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph
from rewright.ir.layout import stored_bytes
from rewright.ir.plan import Plan
from rewright.ir.static_scales import StaticScales
from rewright.ir.types import DType
from rewright.ir.variant import Variant
from rewright.passes.manager import PassOptions
from rewright.random_model import Maker, open_config
from rewright.rewriting import rewrite
from rewright.runtime import _native

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "configs" / "v4-flash.json"
CEILINGS = Path(__file__).with_name("sm80_ceilings.cu")
SLOTS = 8
"""Sequences that the state of a measured model is for."""

# The reference figures for --dry-run, so that a table without a card shows floors: one H200, 2026-11-30.
_ASSUMED_READ = ((16_777_216, 5.695), (33_554_432, 9.485), (67_108_864, 17.27), (268_435_456, 64.29))
_ASSUMED_READ += ((1_073_741_824, 247.5),)


def flash() -> ModelConfig:
    """The configuration of V4-Flash."""
    return load_config(CONFIG)[0]


@dataclass(frozen=True)
class Planned:
    """A model that has a plan for one variant."""

    source: ModelSource
    graph: Graph
    plan: Plan


def plan_step(
    config: ModelConfig,
    context: int,
    batch: int,
    max_context: int | None = None,
    static_scales: StaticScales | None = None,
) -> Planned:
    """The decode step of `batch` sequences at up to `context` tokens; the state holds `max_context`."""
    source = open_config(config, max_context=max_context or context, max_batch=SLOTS)
    capacity = min(c for c in source.limits.capacities(config.index_topk) if c >= context)
    variant = Variant(1, batch, capacity)
    graph = rewrite(source, variant, PassOptions(), static_scales=static_scales).graph
    return Planned(source, graph, make_plan(graph, variant, TARGETS["sm80"]))


def open_device(ordinal: int = 0) -> _native.Device:
    """The card with the kernels of this build."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # the primary context is torch's
    kernels = Path(_native.__file__).parent / "kernels"
    return _native.open_cuda(ordinal, sorted(map(str, kernels.glob("*.fatbin"))))


def missing_kernels(plan: Plan) -> list[str]:
    """Symbols of a plan that this build has no kernel for."""
    return sorted({launch.symbol for launch in plan.launches} - _native.device_kernels().keys())


class Inputs:
    """Tokens, pos, n_valid and slot of a step on the card.

    Attributes:
        tensor: what programs read.
    """

    def __init__(self, batch: int, device: str = "cuda"):
        self.batch = batch
        self.tensor = torch.zeros(4 * batch, dtype=torch.int32, device=device)

    def table(self, tokens: Tensor, first_pos: int) -> Tensor:
        """Inputs of one step after the other, i32[steps, 4 * batch], of tokens [steps, batch]."""
        steps = len(tokens)
        pos = torch.arange(first_pos, first_pos + steps, dtype=torch.int32)[:, None].expand(steps, self.batch)
        slot = torch.arange(self.batch, dtype=torch.int32).expand(steps, self.batch)
        rows = torch.cat([tokens.int(), pos, torch.ones_like(pos), slot], dim=1)
        return rows.contiguous().to(self.tensor.device)


class Bound:
    """A plan bound to weights, an arena, a state and inputs that the caller keeps alive."""

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, Tensor],
        arena: Tensor,
        state: Tensor,
        inputs: Inputs,
        device: _native.Device,
    ):
        self.plan, self.arena = plan, arena
        self._kept = (dict(weights), state, inputs)
        self.program = _native.DeviceProgram(
            plan.to_text(),
            {name: (t.data_ptr(), t.numel() * t.element_size()) for name, t in weights.items()},
            (arena.data_ptr(), arena.numel()),
            (state.data_ptr(), state.numel()),
            inputs.tensor.data_ptr(),
            device,
        )

    def run(self, begin: int = 0, end: int | None = None) -> None:
        """Launches of the plan on torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream if self.arena.is_cuda else 0
        self.program.run(stream, begin, end)

    def run_overlapped(self) -> None:
        """The whole plan on torch's current stream, launches that can overlapping."""
        self.program.run_overlapped(torch.cuda.current_stream().cuda_stream if self.arena.is_cuda else 0)

    def value(self, name: str) -> Tensor:
        """Bytes of a value in the arena."""
        place = self.plan.values[name]
        return self.arena[place.offset : place.end]


def new_state(plan: Plan, device: str = "cuda", seed: int = 1) -> Tensor:
    """A state full of random values, so that no entry equals another."""
    state = torch.zeros(plan.state_bytes, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    done = set()
    for place in plan.values.values():
        if place.space == "state" and place.offset not in done and place.type.dtype.is_float:
            done.add(place.offset)
            region = state[place.offset : place.offset + stored_bytes(place.type)]
            region.view(place.type.dtype.torch_dtype).normal_(generator=generator)
    return state


def fill_activations(plan: Plan, at: int, arena: Tensor, context: int, seed: int = 2) -> None:
    """Random values of the right kind where a launch finds what others have left it."""
    launch = plan.launches[at]
    generator = torch.Generator(arena.device).manual_seed(seed)
    routed = _experts_of(plan, at)
    for name in dict.fromkeys(v for v in launch.reads if v is not None):
        place = plan.values[name]
        if place.space != "arena":
            continue
        region = arena[place.offset : place.end]
        if place.layout:  # partial sums: f32, the last of 32 columns sums of squares
            partial = region.view(torch.float32).view(-1, 32)
            partial.normal_(0, 0.01, generator=generator)
            partial[:, 31] = 128.0
        elif name in routed:
            rows, k = place.type.numel // place.type.shape[-1], place.type.shape[-1]
            keys = torch.rand(rows, routed[name], generator=generator, device=arena.device)
            region.view(torch.int32).copy_(keys.topk(k, dim=-1).indices.int().flatten())
        elif place.type.dtype is DType.I32:  # chosen entries of a context
            rows, k = place.type.numel // place.type.shape[-1], place.type.shape[-1]
            entries = max(context // 4, k)
            keys = torch.rand(rows, entries, generator=generator, device=arena.device)
            region.view(torch.int32).copy_(keys.topk(k, dim=-1).indices.int().flatten())
        elif place.type.dtype.is_float:
            region.view(place.type.dtype.torch_dtype).normal_(generator=generator)
        elif place.type.dtype is DType.E8M0:
            region.fill_(127 - 6)
        else:
            region.random_(0, 256, generator=generator)
            region.bitwise_and_(0xFE)


def _experts_of(plan: Plan, at: int) -> dict[str, int]:
    """Values with ids of chosen experts that a launch reads, and of how many experts."""
    found = {}
    for part in plan.launches[at].parts:
        if part.op == "expert_linear":
            weight, ids = part.reads[2], part.reads[4]
            assert weight is not None
            assert ids is not None
            found[ids] = plan.values[weight].type.shape[0]
    return found


def launch_weights(plan: Plan, at: int) -> list[str]:
    """Weights that a launch reads."""
    launch = plan.launches[at]
    names = dict.fromkeys(v for v in launch.reads if v is not None)
    return [n for n in names if plan.values[n].space == "weight"]


def draw(plan: Plan, names: Iterable[str], source: ModelSource, maker: Maker) -> dict[str, Tensor]:
    """Random weights of these names; RoPE tables are tables of turns."""
    types = {n: p.type for n, p in plan.values.items() if p.space == "weight"}
    found = {}
    for name in names:
        if name.startswith("rope."):
            angles = torch.arange(types[name].numel, device=maker.device).view(types[name].shape)
            found[name] = angles.float().cos() if name.endswith("cos") else angles.float().sin()
        else:
            found[name] = maker.make(name, types, plan.values[name].layout)
    return found


def graph_of(nodes: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """The nodes captured one after the other; each has run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for node in nodes:
            node()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for node in nodes:
            node()
    torch.cuda.synchronize()
    return graph


def replay_us(
    graph: torch.cuda.CUDAGraph, replays: int, before: Callable[[int], None] | None = None
) -> list[float]:
    """Microseconds of each replay; what `before` does ahead of one is not in them."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for i, (begin, end) in enumerate(marks):
        if before is not None:
            before(i)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


def node_us(nodes: Sequence[Callable[[], None]], replays: int = 9) -> float:
    """Microseconds of a node in a graph of them all, median over replays."""
    graph = graph_of(nodes)
    replay_us(graph, 2)
    found = statistics.median(replay_us(graph, replays)) / len(nodes)
    del graph
    return found


@dataclass(frozen=True)
class Ceilings:
    """What the card does at best, as `sm80_ceilings.cu` measured it.

    Attributes:
        record: its JSON.
    """

    record: dict[str, Any]

    @classmethod
    def measure(cls) -> Ceilings:
        """Compile the program, as the kernels are compiled, and run it."""
        major, minor = torch.cuda.get_device_capability()
        code = f"arch=compute_80,code=sm_{major}{minor}" if major < 10 else "arch=compute_80,code=compute_80"
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(folder) / "ceilings")
            _checked(["nvcc", "-O3", "-std=c++17", "-gencode", code, "-o", program, str(CEILINGS)])
            return cls(json.loads(_checked([program])))

    @classmethod
    def assumed(cls) -> Ceilings:
        """Of one H200, for tables that are made without a card."""
        read = [{"bytes": b, "us": us, "bytes_per_second": b / us * 1e6} for b, us in _ASSUMED_READ]
        return cls({"card": "none; figures of an H200", "read": read, "empty_node_us": 0.76})

    @property
    def rate(self) -> float:
        """Bytes per second of the largest read stream."""
        return max(self.record["read"], key=lambda r: r["bytes"])["bytes_per_second"]

    def read_us(self, nbytes: float) -> float:
        """Microseconds of a launch that reads so much, interpolated; an empty launch reads nothing."""
        points = [(0, self.record["empty_node_us"]), *((r["bytes"], r["us"]) for r in self.record["read"])]
        points.sort()
        for (b0, u0), (b1, u1) in itertools.pairwise(points):
            if nbytes <= b1:
                return u0 + (u1 - u0) * (nbytes - b0) / (b1 - b0)
        return nbytes / self.rate * 1e6


def _checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Record:
    """What a benchmark writes: sections, of which one that fails is written down and fails the run.

    Attributes:
        data: the JSON.
    """

    def __init__(self, benchmark: str, out: Path | None):
        self._out = out
        self.failed: list[str] = []
        self.data: dict[str, Any] = {
            "benchmark": benchmark,
            "date": date.today().isoformat(),
            "command": shlex.join(
                ["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_out(sys.argv[1:])]
            ),
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": {
                "rewright": rewright.__version__,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "python": platform.python_version(),
            },
            "errors": {},
        }

    @contextmanager
    def section(self, name: str):
        """A part of the run; its failure is kept with the traceback, and the run goes on."""
        print(f"\n== {name}", flush=True)
        try:
            yield
        except Exception:  # the run goes on to the other sections, and fails in the end
            self.fail(name)
        self.write()

    def fail(self, name: str) -> None:
        """Write down the exception that is being handled."""
        text = traceback.format_exc().replace(f"{ROOT}/", "")
        self.failed.append(name)
        self.data["errors"][name] = text
        print(text, flush=True)

    def write(self) -> None:
        if self._out is not None:
            self._out.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Write the record; exit code 1 if a section failed."""
        self.write()
        if self.failed:
            print(f"failed: {', '.join(self.failed)}")
            sys.exit(1)


def _without_out(arguments: list[str]) -> list[str]:
    """A command line without where its results went."""
    found, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--out="):
            skip = False
        elif argument == "--out":
            skip = True
        else:
            found.append(argument)
    return found


def driver() -> str | None:
    """Version of the driver, None where nvidia-smi does not say."""
    try:
        text = _checked(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    except (OSError, RuntimeError):
        return None
    match = re.search(r"[\d.]+", text)
    return match[0] if match else None
