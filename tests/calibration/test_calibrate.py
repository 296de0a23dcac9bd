"""Calibration: what is collected, the scales that follow, the file, and models compiled with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rewright.calibration.calibrate import CalibrationOptions, calibrate, to_json, to_text
from rewright.calibration.errors import saturated
from rewright.calibration.model import CalibrationModel
from rewright.calibration.segments import exponents_of, share
from rewright.calibration.sites import Site, find_sites
from rewright.calibration.statistics import KEPT_ROWS, SiteStatistics
from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.numerics import Numerics
from rewright.ir.amax import amax_reductions
from rewright.ir.diff import diff_graphs
from rewright.ir.diff_stat import stat_rows
from rewright.ir.errors import BadInput, Refused, UsageError
from rewright.ir.formats import dequantize_blocks, quantize_fixed
from rewright.ir.static_scales import Segment, StaticScales, read_scales
from rewright.passes.manager import PassOptions
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact

Cli = Callable[..., Any]


def site(name: str = "layers.0.attn.wq_a.x", columns: int = 128) -> Site:
    return Site(name, (name,), "x", None, "e4m3", 128, (0, columns))


def statistics_of(rows: torch.Tensor, name: str = "layers.0.attn.wq_a.x") -> SiteStatistics:
    found = SiteStatistics(site(name, rows.shape[1]))
    found.add(rows)
    return found


def test_rows_are_kept_evenly_and_the_same_every_time() -> None:
    rows = torch.arange(10_000.0)[:, None].expand(-1, 32)
    both = [SiteStatistics(site(columns=32)) for _ in range(2)]
    for part in rows.split(37):
        both[0].add(part)
    for part in rows.split(1000):
        both[1].add(part)
    for found in both:
        assert found.rows == 10_000
        assert found.kept.shape == (KEPT_ROWS, 32)
        assert abs(float(found.kept.mean()) - 5000) < 500  # 3.9 standard errors
        assert float(found.channel_amax.min()) == 9999
    again = SiteStatistics(site(columns=32))
    for part in rows.split(37):
        again.add(part)
    assert torch.equal(again.kept, both[0].kept)


def test_outliers_are_the_channels_that_stand_out() -> None:
    rows = torch.ones(4, 64)
    rows[2, 5], rows[1, 9] = -100.0, 7.9
    assert statistics_of(rows).outliers() == [(5, 100.0)]


@pytest.mark.parametrize("headroom", [0, 1, 3])
@pytest.mark.parametrize("block", [32, 128])
def test_headroom_is_in_powers_of_two(block: int, headroom: int) -> None:
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    found = statistics_of(rows)
    segment = Segment("a", block, tuple(exponents_of(found, block, headroom).tolist()))
    assert saturated(rows * 2.0**headroom, "e4m3", segment) == 0
    assert saturated(rows * 2.0 ** (headroom + 1), "e4m3", segment) > 0


def test_layers_share_scales_as_long_as_that_costs_little() -> None:
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    layers = [statistics_of(rows * s, f"layers.{i}.attn.wq_a.x") for i, s in enumerate((1, 2, 1, 64, 64, 1))]
    cut = [[m.site.layer for m in members] for _, members in share(layers, 32, 1, 2)]
    assert cut == [[0, 1, 2], [3, 4], [5]]
    assert len(share(layers, 32, 1, 16)) == 1
    alone = [[m.site.layer for m in members] for _, members in share(layers, 32, 1, 0)]
    assert alone == [[0], [1], [2], [3, 4], [5]]
    for segment, members in share(layers, 32, 0, 2):
        assert all(saturated(m.kept, "e4m3", segment) == 0 for m in members)


def test_an_outlier_costs_its_block_only() -> None:
    rows = 0.01 * torch.randn(256, 128, generator=torch.Generator().manual_seed(3))
    rows[:, 0] *= 4e6
    errors = {}
    for block in (32, 128):
        segment, _ = share([statistics_of(rows)], block, 1, 2)[0]
        scale = segment.tensor()
        back = dequantize_blocks(quantize_fixed(rows, scale, "e4m3"), scale, block)
        errors[block] = ((back - rows)[:, 32:].norm(dim=-1) / rows[:, 32:].norm(dim=-1)).median()
    assert errors[32] < 0.03
    assert errors[128] > 0.5


@pytest.fixture(scope="module")
def model(tiny_v4: Path) -> CalibrationModel:
    return CalibrationModel.open(tiny_v4)


def few(model: CalibrationModel, tiny_v4: Path, count: int = 3) -> list[list[int]]:
    return [e.ids for e in model.read_texts(tiny_v4 / "text/calibration.jsonl")][-count:]


def quiet(what: str, done: int, total: int) -> None:
    assert 0 < done <= total


def test_every_quantisation_is_a_site(model: CalibrationModel) -> None:
    sites = find_sites(model.graph)
    assert len(sites) == amax_reductions(model.graph.ops)
    inputs = {s.kind for s in sites if s.readers}
    assert inputs == {
        "attn.wq_a.x",
        "attn.wq_b.x",
        "attn.wo_b.x",
        "ffn.experts.w1.x",
        "ffn.experts.w2.x",
        "ffn.shared_experts.w2.x",
    }
    shared = next(s for s in sites if s.name == "layers.3.ffn.experts.w1.x")
    assert len(shared.readers) == 4
    apart = {s.kind for s in sites if not s.readers}
    assert apart == {
        "attn.kv",
        "attn.compressor.entries",
        "attn.indexer.q",
        "attn.indexer.compressor.entries",
    }
    assert all(s.count is not None for s in sites if s.kind.endswith("entries"))


def test_a_calibrated_model(model: CalibrationModel, tiny_v4: Path, tmp_path: Path) -> None:
    """The decode step looks for no magnitude before linears and moves fewer bytes; logits hardly change."""
    long, *_ = (e.ids for e in model.read_texts(tiny_v4 / "text/calibration.jsonl"))
    texts = [long[:200], *few(model, tiny_v4, 2)]  # entries of both ratios are finished
    found = calibrate(model, texts, CalibrationOptions(), check=texts[:1], progress=quiet)
    assert found.saturated == 0
    assert found.checked > 0
    assert {r.segment for r in found.sites} == found.scales.segments.keys()
    assert all(r.segment is None and not r.static and r.dynamic for r in found.attention)
    for report in found.sites:
        assert report.static.keys() == {"32", "128", "tensor"}
        assert abs(report.static["32"].median - report.dynamic["32"].median) < 1e-3
    value = to_json(found, b"texts", CalibrationOptions())
    path = tmp_path / "scales.json"
    path.write_text(to_text(value))
    scales = read_scales(path)
    assert scales == found.scales

    graphs, logits = {}, {}
    for name, given in (("dynamic", None), ("static", scales)):
        out = tmp_path / name
        options = CompileOptions(max_context=256, target="host", static_scales=given)
        compile_model(tiny_v4, out, options)
        artifact = Artifact.open(out)
        assert artifact.manifest.static_scales == ("" if given is None else scales.digest())
        decode = max(v for v in artifact.manifest.variants if v.kind == "decode")
        graphs[name] = artifact.graph(decode)
        logits[name] = [
            Engine(artifact, reference=reference, threads=1).prefill(0, texts[0][:40])
            for reference in (False, True)
        ]
    rows = {row.label: row for row in stat_rows(diff_graphs(graphs["dynamic"], graphs["static"]))}
    apart = len(found.attention)
    assert (rows["amax reductions"].before, rows["amax reductions"].after) == (36 + apart, apart)
    for label in ("activation bytes read", "activation bytes written"):
        assert rows[label].after < rows[label].before
    host, reference = logits["static"]
    assert torch.cosine_similarity(host, reference, dim=0) > 0.9995
    assert torch.cosine_similarity(host, logits["dynamic"][0], dim=0) > 0.99
    assert not torch.equal(host, logits["dynamic"][0])


def test_a_compiled_model_gives_the_same_scales(
    model: CalibrationModel, tiny_v4: Path, compiled_tiny: Path
) -> None:
    again = CalibrationModel.open(compiled_tiny)
    texts = few(model, tiny_v4, 1)
    both = [calibrate(m, texts, CalibrationOptions(), progress=quiet).scales for m in (model, again)]
    assert both[0] == both[1]


def test_single_sites_have_another_block(model: CalibrationModel, tiny_v4: Path) -> None:
    options = CalibrationOptions("tensor", (("layers.*.w2.x", "128"), ("layers.2.*.w3.x", "32")))
    found = calibrate(model, few(model, tiny_v4, 1), options, progress=quiet)
    for report in found.sites:
        name = report.statistics.site.name
        wanted = "128" if name.endswith("w2.x") else "32" if name == "layers.2.ffn.experts.w1.x" else "tensor"
        assert report.block == wanted
        assert report.segment is not None
        columns = report.statistics.site.columns
        size = columns if wanted == "tensor" else int(wanted)
        assert found.scales.segments[report.segment].block == size
        assert found.scales.segments[report.segment].columns == columns


def test_what_cannot_be_calibrated(model: CalibrationModel, tiny_v4: Path, tmp_path: Path) -> None:
    for wrong in ({"block": "64"}, {"sites": (("a", "b"),)}, {"headroom": 9}, {"span": -1}):
        with pytest.raises(UsageError):
            CalibrationOptions(**wrong)
    with pytest.raises(UsageError, match="names no site"):
        calibrate(model, few(model, tiny_v4, 1), CalibrationOptions(sites=(("wq", "32"),)), progress=quiet)
    out = tmp_path / "bf16"
    compile_model(tiny_v4, out, CompileOptions(Numerics.BF16, max_context=128, target="host"))
    plain = CalibrationModel.open(out)
    assert all(not s.readers for s in find_sites(plain.graph))
    with pytest.raises(BadInput, match="nothing to calibrate"):
        calibrate(plain, few(model, tiny_v4, 1), CalibrationOptions(), progress=quiet)
    with pytest.raises(BadInput, match="no such folder"):
        CalibrationModel.open(tmp_path / "nowhere")


def test_scales_go_with_their_checkpoint_and_numerics(
    model: CalibrationModel, tiny_v4: Path, tmp_path: Path
) -> None:
    segment = Segment("attn.wq_a.x.0", 32, (0,) * 8)
    foreign = StaticScales("another", {segment.name: segment}, {"layers.0.attn.wq_a.x": segment.name})
    own = StaticScales(model.fingerprint, foreign.segments, foreign.sites)
    cases = (
        (CompileOptions(target="host", static_scales=foreign), BadInput, "another checkpoint"),
        (CompileOptions(Numerics.BF16, target="host", static_scales=own), UsageError, "bf16 numerics"),
        (
            CompileOptions(target="host", static_scales=own, passes=PassOptions.of(None, ("static_scales",))),
            UsageError,
            "does not run",
        ),
        (
            CompileOptions(target="host", static_scales=own, passes=PassOptions.of(None, (), "canonical")),
            UsageError,
            "does not run",
        ),
        (
            CompileOptions(target="sm80", max_context=128, static_scales=own),
            Refused,
            "a calibrated scale is for 32 values",
        ),
    )
    for options, kind, reason in cases:
        with pytest.raises(kind, match=reason):
            compile_model(tiny_v4, tmp_path / "out", options)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 1}', "{"])
def test_a_file_that_holds_no_scales(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="rewright calibrate has written"):
        read_scales(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_scales(tmp_path / "nowhere.json")


def test_the_command(cli: Cli, tiny_v4: Path, tmp_path: Path) -> None:
    lines = (tiny_v4 / "text/calibration.jsonl").read_text().splitlines()[-2:]
    text, out = tmp_path / "text.jsonl", tmp_path / "scales.json"
    text.write_text("\n".join(lines) + "\n")
    done = cli("calibrate", str(tiny_v4), "--text", str(text), "-o", str(out), "--check", str(text))
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("| site")
    assert "values do not fit" in done.stderr
    assert json.loads(out.read_text())["check"]["saturated"] == 0
    assert list(tmp_path.glob("*.partial")) == []
    for wrong, reason in (
        (("--block", "64"), "'64' is no block"),
        (("--site", "x"), "names no block"),
        (("-o", str(tmp_path)), "no place for a file"),
    ):
        refused = cli("calibrate", str(tiny_v4), "--text", str(text), "-o", str(out), *wrong)
        assert refused.code == 2
        assert reason in refused.stderr
