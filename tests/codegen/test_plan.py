"""Plans of whole models: every launch of every variant on both targets, and their text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import BASE_CONFIG, QUANTIZATION
from configs import CONFIGS
from graphs import Net, rewrite_all
from plans import tiny_plans, trouble, variant_of

from rewright.codegen.kernels.host_workspace import ARRAY_ALIGN
from rewright.codegen.memory_table import memory_table, render
from rewright.codegen.plan import make_plan
from rewright.codegen.plan_text import print_plan
from rewright.codegen.targets import TARGETS
from rewright.codegen.units import Program
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import Refused
from rewright.ir.graph import Graph, op_named
from rewright.ir.op import op_of, registry
from rewright.ir.plan import ALIGN, PLAN_FORMAT, SPACES, Launch, Plan, parse_plan
from rewright.ir.variant import Variant
from rewright.rewriting import facts_of
from rewright.runtime import _native

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("tiny-v4", *CONFIGS)
BEYOND_SM80 = {"mixed"}
"""Models that sm80 refuses: 3 streams, heads of 192."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json for every random model."""
    folder = tmp_path_factory.mktemp("configs")
    for name, keys in CONFIGS.items():
        config = {**BASE_CONFIG, "quantization_config": QUANTIZATION, "expert_dtype": "fp4", **keys}
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


@cache
def graphs_of(folder: Path, model: str) -> list[tuple[Variant, str, Graph]]:
    """Every variant of a model, of random ones those of the largest capacity, traced and after all passes."""
    tiny = model == "tiny-v4"
    path = ROOT / "examples" / model if tiny else folder / f"{model}.json"
    source = ModelSource.open(path, Numerics.FAITHFUL, max_context=256, max_batch=2, chunk=16)
    found = []
    for variant in source.variants():
        if tiny or variant.capacity == 256:
            graph = source.graph(variant)
            found += [(variant, "traced", graph), (variant, "layout", rewrite_all(graph, facts_of(source)))]
    return found


@cache
def plans_of(folder: Path, model: str, target: str) -> list[tuple[str, Graph, Plan]]:
    """Stage, graph and plan of every variant."""
    found = graphs_of(folder, model)
    return [(stage, graph, make_plan(graph, variant, TARGETS[target])) for variant, stage, graph in found]


def problems(plan: Plan, graph: Graph) -> Iterator[str]:
    """What is wrong with names, places and launches of a plan."""
    for name, place in plan.values.items():
        if place.space not in SPACES or (place.space in ("weight", "input") and place.offset):
            yield f"{name} lies at {place.space} {place.offset}"
        if place.space in ("arena", "state") and place.offset % ALIGN:
            yield f"{name} is not aligned"
    for at, launch in enumerate(plan.launches):
        yield from (f"launch {at}, {launch.symbol}: {p}" for p in _launch_problems(launch, plan))
    reached = {unit.partition("/")[0] for launch in plan.launches for unit in launch.nodes}
    reached |= Program.of(graph).aliases.keys()
    for node in graph.ops:
        if node.meta["names"][0] not in reached:
            yield f"no launch computes {node.meta['names'][0]}"


def _launch_problems(launch: Launch, plan: Plan) -> Iterator[str]:
    for value in (*launch.reads, *launch.writes, *plan.results.values()):
        if value is not None and value not in plan.values:
            yield f"{value} has no place"
    for value in launch.writes:
        if plan.values[value].space not in ("arena", "state"):
            yield f"writes {value}"
    start, size = launch.workspace
    if start % ALIGN or (plan.target == "host" and size % ARRAY_ALIGN):
        yield f"workspace {launch.workspace}"
    word = launch.symbol.partition(".")[2]
    if word in registry() and len(launch.nodes) == 1:
        yield from _call_problems(launch, plan, word)


def _call_problems(launch: Launch, plan: Plan, name: str) -> Iterator[str]:
    """Where a launch of a one-op kernel is no call of the op."""
    op = op_named(name)
    if launch.attrs != op.bind_attrs(dict(launch.attrs)):
        yield f"attributes {launch.attrs}"
    operands = tuple(None if v is None else plan.values[v].type for v in launch.reads)
    results = tuple(plan.values[v].type.dense for v in launch.writes)
    if op.infer_types(operands, dict(launch.attrs)) != results:
        yield f"results are {results}"
    for result, operand in op.updated(dict(launch.attrs)).items():
        before = launch.reads[operand]
        if before is None or plan.values[before] != plan.values[launch.writes[result]]:
            yield "the next value of a state lies elsewhere"
    for operand, value in zip(op.operands, launch.reads, strict=True):
        if operand in ("pos", "n_valid", "slot", "tokens") and value not in (None, operand):
            yield f"{operand} is {value}"


@pytest.mark.parametrize(
    ("model", "target"), [(m, t) for m in MODELS for t in TARGETS if t == "host" or m not in BEYOND_SM80]
)
def test_every_launch_of_every_variant(folder: Path, model: str, target: str) -> None:
    for stage, graph, plan in plans_of(folder, model, target):
        where = (plan.variant.name, stage)
        assert (where, list(problems(plan, graph))) == (where, [])
        assert (where, trouble(graph, plan, TARGETS[target])) == (where, [])
        assert plan.results.keys() == {"logits"}
        assert plan.abi == TARGETS[target].abi
        assert (where, parse_plan(plan.to_text())) == (where, plan)
        if target == "host":
            _native.check_plan(plan.to_text())
            assert plan.refusals == {}
            moves = [n for n in graph.ops if op_of(n.target).name == "reshape"]
            assert len(plan.launches) == len(graph.ops) - len(moves), "no reshape of a model moves anything"


class Memory:
    """Zeros for everything that a host plan needs."""

    def __init__(self, plan: Plan):
        weights = {n: p.type for n, p in plan.values.items() if p.space == "weight"}
        self._held = {n: torch.zeros(t.nbytes, dtype=torch.uint8) for n, t in weights.items()}
        self._spaces = [self._space(plan.arena_bytes), self._space(plan.state_bytes)]

    @staticmethod
    def _space(nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes + ALIGN, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGN
        return memory[start : start + nbytes]

    def bind(self, plan: Plan) -> None:
        """Make every kernel of a plan; `_native.PlanError` tells which cannot be."""
        weights = {n: (t.data_ptr(), t.numel()) for n, t in self._held.items()}
        _native.Program(plan.to_text(), weights, *((s.data_ptr(), s.numel()) for s in self._spaces))


@pytest.mark.parametrize("model", MODELS)
def test_kernels_take_what_the_plan_gives_them(folder: Path, model: str) -> None:
    """All that the host kernels check: types, layouts, attributes, and enough working memory."""
    for stage, _, plan in plans_of(folder, model, "host"):
        if plan.variant.batch == 1 or stage == "traced":
            Memory(plan).bind(plan)


@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_working_memory_is_what_the_kernels_take(folder: Path, kind: str) -> None:
    """None of them would do with 64 bytes less."""
    made = [
        p
        for stage, _, p in plans_of(folder, "tiny-v4", "host")
        if stage == "layout" and p.variant.kind == kind
    ]
    plan = max(made, key=lambda p: len(p.launches))
    memory = Memory(plan)
    seen: set[str] = set()
    for launch in plan.launches:
        offset, size = launch.workspace
        if size and launch.symbol not in seen:
            seen.add(launch.symbol)
            short = replace(launch, workspace=(offset, size - ARRAY_ALIGN))
            with pytest.raises(_native.PlanError, match="too little workspace"):
                memory.bind(replace(plan, launches=(short,)))
    assert {"host.moe", "host.linear", "host.hc_post_pre", "host.grouped_linear_quant"} <= seen


@pytest.mark.parametrize("model", sorted(BEYOND_SM80))
def test_what_sm80_refuses(folder: Path, model: str) -> None:
    for variant, _, graph in graphs_of(folder, model):
        with pytest.raises(Refused, match="3 streams are not 2 or 4"):
            make_plan(graph, variant, TARGETS["sm80"])


def test_all_variants_have_the_state_in_one_place(folder: Path) -> None:
    """A sequence goes on from one variant to another."""
    for model in MODELS:
        found = set()
        for _, graph, plan in plans_of(folder, model, "host"):
            states = [name for name, kind in Program.of(graph).leaves.items() if kind == "state"]
            found.add((plan.state_bytes, *((name, plan.values[name]) for name in states)))
        assert len(found) == 1


def test_another_process_makes_the_same_plans() -> None:
    """With other hashes of strings."""
    script = "import sys; sys.path.append('tests/helpers'); import plans; print(plans.tiny_plans(), end='')"
    command, environment = [sys.executable, "-c", script], {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert done.stdout.decode() == tiny_plans()


class TestText:
    @pytest.fixture
    def plan(self) -> Plan:
        net = Net()
        x, ring = net.input("x", "bf16[1,1,64]"), net.state("ring", "bf16[1,8,64]")
        w = net.weight("w", "bf16[64]")
        normed = net.rms_norm("normed", x, w, eps=1e-6)
        graph = net.graph(out=net.reshape("split", net.hadamard("h", normed), tail=[2, 32]), ring=ring)
        return make_plan(graph, variant_of(graph), TARGETS["host"])

    def test_it_is_json_with_a_line_for_every_value_and_launch(self, plan: Plan) -> None:
        text = plan.to_text()
        value = json.loads(text)
        assert value["format"] == PLAN_FORMAT
        assert value["values"]["split"] == {"type": "bf16[1,1,2,32]", "space": "arena", "offset": 128}
        assert value["values"]["w"] == {"type": "bf16[64]", "space": "weight"}
        assert value["values"]["x"] == {"type": "bf16[1,1,64]", "space": "input"}
        assert [launch["symbol"] for launch in value["launches"]] == ["host.rms_norm", "host.hadamard"]
        assert value["launches"][0] == {
            "symbol": "host.rms_norm",
            "phase": "normed",
            "nodes": ["normed"],
            "reads": ["x", "w"],
            "writes": ["normed"],
            "attrs": {"eps": 1e-6},
            "workspace": [0, 0],
        }
        assert len(text.splitlines()) == 3 + 6 + len(plan.values) + len(plan.launches) + 5

    def test_another_format_is_not_read(self, plan: Plan) -> None:
        text = plan.to_text().replace(f'"format": {PLAN_FORMAT}', '"format": 99')
        with pytest.raises(ValueError, match="plan format 99"):
            parse_plan(text)


class TestPhases:
    """The text of `graph dump X@planned`."""

    @pytest.fixture
    def texts(self, folder: Path) -> dict[str, str]:
        def text(target: str, kind: str) -> str:
            made = [p for stage, _, p in plans_of(folder, "tiny-v4", target) if stage == "layout"]
            return print_plan(next(p for p in made if p.variant.kind == kind and p.variant.batch == 1))

        return {
            "host": text("host", "decode"),
            "sm80": text("sm80", "decode"),
            "chunk": text("sm80", "chunk"),
        }

    def test_a_node_with_a_kernel_of_its_own(self, texts: dict[str, str]) -> None:
        assert "\n  layers.0.ffn.y = host.moe\n" in texts["host"]
        assert "\n  layers.0.ffn.y -> layers.0.ffn.y\n" in texts["host"]
        assert texts["host"].endswith("\nrefusals:\n")

    def test_a_node_whose_parts_lie_in_several_phases(self, texts: dict[str, str]) -> None:
        lines = texts["sm80"].splitlines()
        node, inner = "layers.0.hc_attn.streams", "layers.0.attn.wo_b.x/quantize"
        assert f"  {node} -> {inner}, {node}/hc_split" in lines
        assert "  layers.0.attn.o.groups = sm80.attention_split + sm80.attention_combine" in lines
        units = (inner, "layers.0.attn.wo_b", f"{node}/hc_combine", f"{node}/hc_mix")
        assert f"  {inner} = sm80.attn_out {{{', '.join(units)}}}" in lines

    def test_refusals_have_a_line_each(self, texts: dict[str, str]) -> None:
        refusals = texts["chunk"].partition("\nrefusals:\n")[2].splitlines()
        assert "  embed: sm80.start: 16 tokens of a step are more than 8" in refusals
        assert all(line.count(": ") >= 2 for line in refusals)


class TestMemoryTable:
    def test_the_parts_add_up(self, folder: Path) -> None:
        plans = [row for t in TARGETS for row in plans_of(folder, "tiny-v4", t) if row[0] == "layout"]
        for _, graph, plan in plans:
            table = memory_table(plan)
            weights = sum(p.type.nbytes for p in plan.values.values() if p.space == "weight")
            states = [name for name, kind in Program.of(graph).leaves.items() if kind == "state"]
            assert sum(table.weights.values()) == weights
            assert sum(table.state.values()) == sum(plan.values[name].type.nbytes for name in states)
            assert table.peak <= table.arena == plan.arena_bytes
            assert table.total == weights + sum(table.state.values()) + plan.arena_bytes
            sizes = [size for _, size in table.largest]
            assert sizes == sorted(sizes, reverse=True)
            assert 0 < len(sizes) <= 5

    def test_components_and_kinds(self, folder: Path) -> None:
        table = memory_table(plans_of(folder, "tiny-v4", "host")[-1][2])
        assert list(table.weights) == [
            "routed experts", "shared experts", "gates", "indexers", "compressors", "attention",
            "hyper-connections", "embedding", "head", "RoPE tables", "other",
        ]  # fmt: skip
        assert list(table.state) == ["window rings", "compressor rings", "index keys", "compressed entries"]
        assert table.weights["routed experts"] == 6 * 16 * 3 * 256 * 128 * (4 * 32 + 8) // (8 * 32)
        assert table.weights["embedding"] == 4096 * 256 * 2
        assert table.state["window rings"] == 6 * 2 * 128 * 128 * 2
        assert table.weights["other"] < 20_000, "norms and mixing coefficients of the head"

    def test_the_peak_is_found(self) -> None:
        """Sizes in bytes: a 512, b 512 and their sum; then only the narrow one."""
        net = Net()
        x = net.input("x", "bf16[1,1,256]")
        total = net.add("sum", net.hadamard("a", x), net.hadamard("b", x))
        codes, scale = net.quantize("q", total, fmt="e4m3", block=128)
        graph = net.graph(codes=codes, scale=scale)
        table = memory_table(make_plan(graph, variant_of(graph), TARGETS["host"]))
        assert (table.peak, table.peak_phase) == (1536, "sum")
        assert table.largest == (("a", 512), ("b", 512), ("sum", 512))

    def test_rendered_side_by_side(self, folder: Path) -> None:
        made = [p for stage, _, p in plans_of(folder, "tiny-v4", "host") if stage == "layout"]
        plans = {p.variant.name: p for p in made if p.variant.batch == 1}
        text = render({name: memory_table(plan) for name, plan in plans.items()})
        lines = text.splitlines()
        assert lines[0].split() == ["MB", *plans]
        assert any(line.startswith("weights: routed experts") for line in lines)
        assert sum(line.startswith("peak of ") for line in lines) == len(plans)
        assert len({len(line) for line in lines[: lines.index("")]}) == 1
