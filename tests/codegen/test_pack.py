"""Packed weights: a layout for every weight, and the same bytes whether a weight comes in parts or whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Net, rewrite_all
from plans import variant_of
from torch import Tensor

from rewright.codegen.pack import PackedWeights, layouts_of
from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import CompilerBug
from rewright.ir.plan import Plan
from rewright.ir.types import DType, ValueType
from rewright.ir.weight_layout import LAYOUTS, TILE, packable
from rewright.rewriting import facts_of

STORED: dict[str, dict[str, Any]] = {
    "fp4": {},
    "fp8": {"experts": "fp8", "scale_dtype": "f32"},
    "bf16": {"experts": "bf16", "dense": "bf16"},
}
OVERRIDES = {"num_hidden_layers": 2, "compress_ratios": [0, 4], "n_routed_experts": 4, "vocab_size": 100}


class Whole:
    """A reader that gives every weight in one part."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def parts(self, name: str) -> Iterator[Tensor]:
        yield self._tensors[name]


def stored_bytes_of(parts: Iterator[Tensor]) -> bytes:
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def plans_of(source: ModelSource) -> list[Plan]:
    found = []
    for variant in source.variants():
        graph = rewrite_all(source.graph(variant), facts_of(source))
        found.append(make_plan(graph, variant, TARGETS["host"]))
    return found


@pytest.mark.parametrize("stored", STORED)
def test_parts_and_wholes_give_the_same_bytes(
    make_checkpoint: Callable[..., Path], tmp_path: Path, stored: str
) -> None:
    path = make_checkpoint(tmp_path / "ckpt", OVERRIDES, **STORED[stored])
    source = ModelSource.open(path, Numerics.FAITHFUL, max_context=128, max_batch=1, chunk=8)
    plans, weights = plans_of(source), source.weights()
    layouts = layouts_of(plans)
    assert layouts.keys() == set(weights.names())
    packed = PackedWeights(weights, layouts)
    several = 0
    for name, layout in layouts.items():
        whole = weights.load(name)
        several += len(list(weights.parts(name))) > 1
        together = PackedWeights(Whole({name: whole}), layouts)
        assert stored_bytes_of(packed.parts(name)) == stored_bytes_of(together.parts(name))
        (tensor,) = together.parts(name)
        assert (tensor.shape, tensor.dtype) == (whole.shape, whole.dtype)
        back = LAYOUTS[layout].unpack(tensor)
        assert stored_bytes_of(iter([back])) == stored_bytes_of(iter([whole]))
    assert several >= 2 * 3, "experts come one by one"
    experts = layouts["layers.0.ffn.experts.w1.weight"], layouts.get("layers.0.ffn.experts.w1.scale", "")
    assert experts == ("tile16", "tile16" if stored == "fp4" else "")
    assert {layouts[n] for n in ("embed.weight", "norm.weight", "layers.1.attn.compressor.ape")} == {""}
    assert {layouts[n] for n in ("head.weight", "layers.0.hc_attn_fn", "layers.1.ffn.gate.weight")} == {
        "tile16"
    }


def test_weights_that_no_plan_names_stay_as_they_are() -> None:
    tensor = torch.arange(64.0).view(32, 2)
    (found,) = PackedWeights(Whole({"w": tensor}), {}).parts("w")
    assert found is tensor


def test_elements_of_a_tile_stand_side_by_side() -> None:
    """Element k of all sixteen rows, then the next; the last tile is as wide as what is left."""
    matrix = torch.arange(20 * 3.0).view(20, 3)
    flat = LAYOUTS["tile16"].pack(matrix).flatten()
    assert flat[:TILE].tolist() == matrix[:TILE, 0].tolist()
    assert flat[TILE : 2 * TILE].tolist() == matrix[:TILE, 1].tolist()
    assert flat[3 * TILE :].tolist() == matrix[TILE:].T.flatten().tolist()


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32]
)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_packing_is_undone(rows: int, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(rows)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*lead, rows, 6 * size), generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype)
    packed = LAYOUTS["tile16"].pack(tensor)
    assert (packed.shape, packed.dtype) == (tensor.shape, dtype)
    assert torch.equal(LAYOUTS["tile16"].unpack(packed).view(torch.uint8), raw)


def test_plans_that_disagree_are_a_bug() -> None:
    """One variant looks the table up, the other multiplies with it."""
    plans = []
    for multiplies in (False, True):
        net = Net(tokens=1 + multiplies)
        tokens, x = net.input("tokens", "i32[1,1]"), net.input("x", "bf16[1,1,64]")
        table = net.weight("table", "bf16[64,64]")
        if multiplies:
            graph = net.graph(out=net.linear("y", x, None, table, out="f32"))
        else:
            graph = net.graph(out=net.embed("y", tokens, table, out="bf16"))
        plans.append(make_plan(graph, variant_of(graph), TARGETS["host"]))
    assert layouts_of(plans[:1]) == {"table": ""}
    first, second = (plan.variant.name for plan in plans)
    told = f"weight table: plan {first} reads it row by row and plan {second} reads it tile16"
    with pytest.raises(CompilerBug, match=told):
        layouts_of(plans)


def test_tiles_need_matrices() -> None:
    assert packable("tile16", ValueType(DType.BF16, (4, 4)))
    assert not packable("tile16", ValueType(DType.BF16, (4,)))
    assert packable("", ValueType(DType.BF16, (4,)))


@pytest.mark.parametrize("layout", ["mma8", "mma4", "mma16", "mma4_scale"])
def test_fragments_are_a_permutation_of_bits(layout: str) -> None:
    """Every code comes back; e4m3 and e2m1 codes share words, so bytes may differ."""
    generator = torch.Generator().manual_seed(2)
    stored = torch.randint(0, 256, (2, 48, 256), dtype=torch.uint8, generator=generator)
    dtype = {"mma8": torch.float8_e4m3fn, "mma4": torch.uint8, "mma16": torch.bfloat16}
    tensor = stored.view(dtype.get(layout, torch.float8_e8m0fnu))
    packed = LAYOUTS[layout].pack(tensor)
    assert (packed.shape, packed.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(LAYOUTS[layout].unpack(packed).contiguous().view(torch.uint8), stored)
    assert not torch.equal(packed.view(torch.uint8), stored)


def test_a_lane_finds_its_codes() -> None:
    """Lane 4g + t holds rows g and g + 8 of columns 8t .. 8t + 7 of each 32, as mma8 words say."""
    codes = torch.arange(16 * 128).remainder(127).to(torch.uint8).view(16, 128)
    packed = LAYOUTS["mma8"].pack(codes.view(torch.float8_e4m3fn)).view(torch.uint8)
    words = packed.flatten().view(torch.int32).view(4, 32, 2, 2)
    g, t = 3, 1
    for chunk, step, pair, high in ((0, 0, 0, 0), (2, 1, 1, 1), (3, 1, 0, 1)):
        half = words[chunk, 4 * g + t, step, pair].item() >> 16 * high
        column = 32 * chunk + 8 * t + 4 * step + 2 * pair + high
        assert (half >> 7 & 0x7F, half & 0x7F) == (codes[g, column], codes[g + 8, column])


def test_what_has_fragments() -> None:
    assert packable("mma8", ValueType(DType.F8E4M3, (32, 64)))
    assert not packable("mma8", ValueType(DType.F8E4M3, (24, 64)))
    assert not packable("mma4", ValueType(DType.F8E4M3, (32, 64)))
    assert packable("mma4", ValueType(DType.E2M1, (4, 32, 128)))
    assert packable("mma16", ValueType(DType.BF16, (16, 32)))
    assert not packable("mma16", ValueType(DType.BF16, (4, 256)))
