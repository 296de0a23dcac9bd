"""The choice of how keys are stored, and what it does to the traced graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewright.frontend.kv_formats import KINDS, KvFormat, KvFormats, Rounding, parse_kv
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import UsageError
from rewright.ir.graph import Graph, name_of, type_of_value
from rewright.ir.kv_format import RowFormat
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.variant import Variant

BF16, PACKED, FP4 = KvFormat.BF16, KvFormat.PACKED, KvFormat.FP4


class TestParsing:
    @pytest.mark.parametrize(
        ("text", "formats", "shown"),
        [
            ("bf16", KvFormats(), "bf16"),
            ("packed", KvFormats.every(PACKED), "packed"),
            (
                "packed,csa=fp4,hca=fp4,window=fp4",
                KvFormats(FP4, FP4, FP4, PACKED),
                "packed,window=fp4,csa=fp4,hca=fp4",
            ),
            ("bf16,hca=fp4", KvFormats(hca=FP4), "bf16,hca=fp4"),
            ("packed,index=bf16", KvFormats(PACKED, PACKED, PACKED, BF16), "packed,index=bf16"),
            ("packed,csa=packed", KvFormats.every(PACKED), "packed"),
        ],
    )
    def test_formats(self, text: str, formats: KvFormats, shown: str) -> None:
        assert parse_kv(text) == formats
        assert str(formats) == shown
        assert parse_kv(shown) == formats
        assert formats.plain == (text == "bf16")

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("", "there is no format ''"),
            ("fp8", "there is no format 'fp8'"),
            ("fp4", "begins with 'fp4', not with bf16 or packed"),
            ("csa=fp4", "begins with 'csa=fp4', not with bf16 or packed"),
            ("packed,fp4", "'fp4' is no KIND=FORMAT"),
            ("packed,", "'' is no KIND=FORMAT"),
            ("packed,keys=fp4", "there is no kind 'keys'"),
            ("packed,csa=fp8", "there is no format 'fp8'"),
            ("packed,csa=fp4,csa=bf16", "csa is given twice"),
            ("packed,index=fp4", "index keys are FP4 in the released model"),
        ],
    )
    def test_what_is_wrong_is_said(self, text: str, what: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_kv(text)
        assert what in str(caught.value)
        assert f"--kv {text}" in str(caught.value)
        assert "->" in str(caught.value)

    def test_roundings_are_the_models_but_for_fp4(self) -> None:
        released = {"window": ("e4m3", 64), "csa": ("e4m3", 64), "hca": ("e4m3", 64), "index": ("e2m1", 32)}
        for formats in (KvFormats(), KvFormats.every(PACKED)):
            assert {kind: formats.rounding(kind) for kind in KINDS} == {
                k: Rounding(*v) for k, v in released.items()
            }
        lossy = parse_kv("packed,csa=fp4")
        assert lossy.rounding("csa") == Rounding("e2m1", 32)
        assert lossy.rows("csa", 448) == RowFormat("e2m1", 32, 448)
        assert lossy.rows("hca", 448) == RowFormat("e4m3", 64, 448)
        assert parse_kv("bf16,hca=fp4").rows("csa", 448) is None


@pytest.fixture(scope="module")
def graphs(tiny_v4: Path) -> dict[str, Graph]:
    texts = ("bf16", "packed", "packed,window=fp4", "bf16,csa=fp4", "bf16,index=packed")
    found = {}
    for text in texts:
        source = ModelSource.open(
            tiny_v4, Numerics.FAITHFUL, max_context=1024, max_batch=2, kv=parse_kv(text)
        )
        found[text] = source.graph(Variant(1, 2, 1024))
    return found


def states(graph: Graph) -> dict[str, str]:
    return {name_of(node): str(type_of_value(node)) for node in graph.of_kind("state")}


class TestGraphs:
    def test_types_of_states(self, graphs: dict[str, Graph]) -> None:
        """Layers 0 and 1 have a window only, 2 and 4 ratio 4, 3 and 5 ratio 128."""
        plain, packed = states(graphs["bf16"]), states(graphs["packed"])
        changed = {n: t for n, t in packed.items() if plain[n] != t}
        assert {n for n in changed if n.endswith("window")} == {f"layers.{i}.attn.window" for i in range(6)}
        assert changed["layers.0.attn.window"] == "byte[2,128,193]"
        assert changed["layers.2.attn.compressor.cache"] == "byte[2,256,193]"
        assert changed["layers.3.attn.compressor.cache"] == "byte[2,8,193]"
        assert changed["layers.4.attn.indexer.compressor.cache"] == "byte[2,256,68]"
        assert len(changed) == 6 + 2 + 2 + 2
        assert all(t.startswith("f32") for n, t in packed.items() if n not in changed)

    def test_one_kind_alone(self, graphs: dict[str, Graph]) -> None:
        plain = states(graphs["bf16"])
        for text, ending, type in (
            ("bf16,csa=fp4", "attn.compressor.cache", "byte[2,256,162]"),
            ("bf16,index=packed", "indexer.compressor.cache", "byte[2,256,68]"),
        ):
            changed = {n: t for n, t in states(graphs[text]).items() if plain[n] != t}
            assert len(changed) == 2
            assert all(name.endswith(ending) for name in changed)
            assert set(changed.values()) == {type}

    def test_storage_changes_and_arithmetic_does_not(self, graphs: dict[str, Graph]) -> None:
        def calls(graph: Graph) -> list[tuple]:
            ops = [(op_of(n.target), dict(n.kwargs), name_of(n)) for n in graph.ops]
            stored = ("ring_rows", "cache_rows", "keys_rows", "window_rows", "compressed_rows")
            return [
                (o.name, n, {k: v for k, v in o.bind_attrs(a).items() if k not in stored}) for o, a, n in ops
            ]

        assert calls(graphs["packed"]) == calls(graphs["bf16"])
        assert calls(graphs["packed,window=fp4"]) != calls(graphs["bf16"])

    def test_a_graph_tells_and_is_read_back(self, graphs: dict[str, Graph]) -> None:
        assert "kv" not in graphs["bf16"].attrs
        for text, graph in graphs.items():
            assert graph.attrs.get("kv", "bf16") == text
            assert parse(print_graph(graph)) == graph

    @pytest.mark.parametrize("text", ["packed", "bf16,hca=fp4"])
    def test_fp32_has_nothing_to_pack(self, tiny_v4: Path, text: str) -> None:
        with pytest.raises(UsageError, match="packs rounded keys, and numerics fp32 have none"):
            ModelSource.open(tiny_v4, Numerics.FP32, kv=parse_kv(text))

    def test_few_rows_are_filled_up(self, tiny_v4: Path) -> None:
        """Four tokens' entries of a context of 128 tokens, in a slot that fills words."""
        source = ModelSource.open(tiny_v4, Numerics.FAITHFUL, max_context=128, kv=parse_kv("packed"))
        types = states(source.graph(Variant(1, 1, 128)))
        assert types["layers.3.attn.compressor.cache"] == "byte[1,8,193]"
