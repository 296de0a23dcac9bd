"""The parts of the card's benchmarks that need no card: plans of single launches, bytes, scaling, figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # (behind the helpers)

import decode
import decode_peers
import device_bench
import plot
import projection
import sm80_kernels

from rewright.frontend.config import ModelConfig, load_config
from rewright.ir.formats import dequantize_weight
from rewright.ir.plan_part import launches_alone
from rewright.ir.types import DType, ValueType
from rewright.random_model import Maker, random_weights, reduced
from rewright.runtime import _native

CONTEXT = 256


@pytest.fixture(scope="module")
def config(repo_root: Path) -> ModelConfig:
    tiny = load_config(repo_root / "examples" / "tiny-v4")[0]
    return reduced(tiny, [0, 0, 4, 128], hash_layers=2)


@pytest.fixture(scope="module")
def planned(config: ModelConfig) -> device_bench.Planned:
    return device_bench.plan_step(config, CONTEXT, 2)


def test_every_launch_is_a_plan_of_its_own(planned: device_bench.Planned) -> None:
    plan = planned.plan
    for at in range(len(plan.launches)):
        _native.check_plan(launches_alone(plan, [at]).to_text())


def test_what_a_launch_finds_is_valid(planned: device_bench.Planned) -> None:
    plan = planned.plan
    arena = torch.full((plan.arena_bytes,), 0xFF, dtype=torch.uint8)
    for at, launch in enumerate(plan.launches):
        device_bench.fill_activations(plan, at, arena, CONTEXT)
        for name in launch.reads:
            place = None if name is None else plan.values[name]
            if place is None or place.space != "arena":
                continue
            found = arena[place.offset : place.end].view(place.type.dtype.torch_dtype)
            if place.type.dtype is DType.I32:
                assert found.min() >= 0
                rows = found.view(-1, place.type.shape[-1])
                assert all(len(row.unique()) == len(row) for row in rows)
            else:
                assert found.float().isfinite().all()


def test_a_state_is_full_of_numbers(planned: device_bench.Planned) -> None:
    state = device_bench.new_state(planned.plan, "cpu")
    for place in planned.plan.values.values():
        if place.space == "state":
            values = state[place.offset : place.end].view(place.type.dtype.torch_dtype).float()
            assert values.isfinite().all()
            assert values.std() > 0.5


def test_measured_launches_are_those_of_a_layer_of_each_kind(planned: device_bench.Planned) -> None:
    rows = sm80_kernels.rows_of(planned)
    assert [kind for kind, _ in rows].count("start") == 1
    assert {kind for kind, _ in rows} == {"start", "window", "ratio 4", "ratio 128", "head"}


def test_products_have_the_bytes_of_the_weights(planned: device_bench.Planned) -> None:
    symbol = "sm80.experts_in"
    at = next(i for i, launch in enumerate(planned.plan.launches) if launch.symbol == symbol)
    assert sm80_kernels.products(planned.plan, at, 3.0) == [(1, 256, 128), (3, 128, 256), (3, 128, 256)]


def test_sets_exceed_the_cache() -> None:
    from rewright.ir.launch_bytes import LaunchBytes

    assert sm80_kernels.sets_of(LaunchBytes(33_000_000, 0, 0, 0, 0)) == 7
    assert sm80_kernels.sets_of(LaunchBytes(10**9, 0, 0, 0, 0)) == 2
    assert sm80_kernels.sets_of(LaunchBytes(0, 0, 0, 0, 10**6)) == 1


def test_inputs_of_steps() -> None:
    inputs = device_bench.Inputs(2, "cpu")
    table = inputs.table(torch.tensor([[5, 6], [7, 8]]), 100)
    assert table.tolist() == [[5, 6, 100, 100, 1, 1, 0, 1], [7, 8, 101, 101, 1, 1, 0, 1]]


def test_interpolation_of_the_read_stream() -> None:
    ceilings = device_bench.Ceilings(
        {
            "empty_node_us": 1.0,
            "read": [
                {"bytes": 10, "us": 2.0, "bytes_per_second": 5e6},
                {"bytes": 30, "us": 4.0, "bytes_per_second": 7.5e6},
            ],
        }
    )
    assert ceilings.read_us(0) == 1.0
    assert ceilings.read_us(20) == 3.0
    assert ceilings.read_us(75) == pytest.approx(10.0)


def test_a_layer_costs_what_it_adds() -> None:
    full, whole, fewer = (2, 6, 6), (2, 21, 20), decode.with_fewer((2, 6, 6))
    assert fewer == {0: (1, 6, 6), 4: (2, 3, 6), 128: (2, 6, 3)}

    def us(counts: tuple[int, int, int]) -> float:
        return 300 + 50 * counts[0] + 60 * counts[1] + 55 * counts[2]

    times = decode.scaled(full, whole, {"full": us(full), **{str(k): us(c) for k, c in fewer.items()}}, fewer)
    assert times == pytest.approx({"t0": 50, "t4": 60, "t128": 55, "rest": 300, "total": us(whole)})


def test_order_of_layers_is_the_model_s() -> None:
    flash = device_bench.flash()
    ratios = flash.compress_ratios
    assert tuple(decode.ratios_of(decode.counts_of(ratios))) == ratios
    assert tuple(decode.ratios_of(decode.counts_of(ratios[:20]))) == ratios[:20]


def test_a_smaller_model_takes_layers_of_its_kinds(config: ModelConfig) -> None:
    large, small = (2, 2, 1), (1, 1, 1)
    plan = device_bench.plan_step(decode.part_of(config, large), CONTEXT, 1)
    weights = random_weights([plan.plan], plan.source)
    part = device_bench.plan_step(decode.part_of(config, small), CONTEXT, 1).plan
    layers = decode.layer_names(decode.ratios_of(small), decode.ratios_of(large))
    assert layers == {0: 0, 1: 2, 2: 3}
    mine = decode.shared_weights(part, weights, layers)
    for name, tensor in mine.items():
        assert tensor.nbytes == part.values[name].type.nbytes, name
    assert mine["layers.1.attn.wq_b.weight"] is weights["layers.2.attn.wq_b.weight"]


@pytest.mark.parametrize("dtype", [DType.F8E4M3, DType.E2M1])
def test_the_peer_dequantises_right(dtype: DType) -> None:
    scale = (2, 4) if dtype is DType.F8E4M3 else (256, 16)
    types = {"a.weight": ValueType(dtype, (256, 512)), "a.scale": ValueType(DType.E8M0, scale)}
    maker = Maker("cpu", 0, experts=4)
    codes, factors = maker.make("a.weight", types), maker.make("a.scale", types)
    found = decode_peers.dequantize(codes, factors, dtype)
    assert torch.equal(found.float(), dequantize_weight(codes, factors).float())


def test_transformers_decodes(config: ModelConfig) -> None:
    small = reduced(config, (0, 4, 128), hash_layers=1)
    model = decode_peers.transformers_model(small, 8, "cpu", "eager")
    logits = decode_peers.decode_steps(model, 140, 2, 3, "cpu", config.vocab_size)
    assert logits.shape == (2, 1, config.vocab_size)
    assert logits.isfinite().all()


def measured() -> dict[str, Any]:
    """Results of launches that cost 2 us and their bytes at 80 % of 4 TB/s."""
    rows = []
    for nbytes in (6_000_000, 20_000_000, 60_000_000):
        us = 2 + nbytes / (0.8 * 4e12) * 1e6
        rows.append({"kind": "window", "symbol": "s", "batch": 1, "bytes": nbytes, "us": us})
    rows.append({"kind": "window", "symbol": "sm80.attention_split", "batch": 1, "bytes": 1e5, "us": 3.0})
    read = [{"bytes": 1 << 30, "us": 268.4, "bytes_per_second": 4e12}]
    head = {"card": "NVIDIA H200", "date": "", "command": "", "versions": {}}
    return {**head, "ceilings": {"read": read, "empty_node_us": 0.8}, "launches": rows}


def test_the_fit_finds_what_launches_cost() -> None:
    found = projection.fit(measured()["launches"], 4e12, 1)
    assert found.efficiency == pytest.approx(0.8)
    assert found.exposed_us == pytest.approx(2.0)
    assert found.short_us == {"sm80.attention_split": 3.0}
    with pytest.raises(ValueError, match="no two measured launches"):
        projection.fit(measured()["launches"], 4e12, 8)


def test_projection(capsys: pytest.CaptureFixture[str]) -> None:
    rows = projection.projections(measured(), [1], 8192)
    assert len(rows) == 12
    one = next(r for r in rows if (r["card"], r["cards"]) == ("a100-80g-sxm", 1))
    assert not one["fits"]
    assert one["bytes"] == pytest.approx(11.24e9, rel=0.01)
    assert one["all_reduce_us"] == 0
    eight = next(r for r in rows if (r["card"], r["cards"]) == ("a100-80g-sxm", 8))
    assert eight["fits"]
    assert eight["all_reduce_us"] == 86 * projection.ALL_REDUCE["NVLink"]
    assert one["floor_us"] < one["us"]
    projection.show(rows)
    assert capsys.readouterr().out.startswith("PROJECTION, not measured")


def test_bars() -> None:
    row = {"context": 8192, "batch": 1, "tokens_per_second": 250.0, "floor_tokens_per_second": 386.0}
    peer = {"name": "transformers, eager", "context": 1024, "batch": 1, "tokens_per_second": 3.8}
    bars = plot.bars_of({"decode": [row], "peers": [peer]})
    assert bars == {1: [("transformers, eager, 1 K", 3.8, 0.0), ("Rewright, 8 K", 250.0, 386.0)]}


def test_a_failed_section_is_recorded(tmp_path: Path) -> None:
    record = device_bench.Record("test", tmp_path / "out.json")
    with record.section("good"):
        pass
    with record.section("bad"):
        raise RuntimeError("on purpose")
    assert "on purpose" in record.data["errors"]["bad"]
    with pytest.raises(SystemExit) as exit:
        record.finish()
    assert exit.value.code == 1
    assert "on purpose" in (tmp_path / "out.json").read_text()
