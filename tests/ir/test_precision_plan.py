"""Precision plans: what a file says, what is wrong with one, and what a plan means for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from graphs import small_model
from hypothesis import given
from hypothesis import strategies as st

from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, Refused, UsageError
from rewright.ir.precision_plan import (
    HIGH,
    LOW,
    Adjustable,
    Precision,
    PrecisionPlan,
    parse_plan_text,
    read_plan,
)
from rewright.ir.types import DType, ValueType
from rewright.passes.manager import PassOptions
from rewright.rewriting import require_precision, resolve_plan

_NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1).filter(
    lambda name: not name.endswith("indexer")
)
_VALUES = st.fixed_dictionaries({}, optional={k: st.sampled_from([HIGH[k], LOW[k]]) for k in HIGH})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(source: ModelSource) -> Adjustable:
    return Adjustable.of(source.weight_types())


@given(_VALUES, st.dictionaries(_NAMES, _VALUES), st.dictionaries(_NAMES, _VALUES))
def test_a_plan_reads_back(
    default: Mapping[str, str], kinds: Mapping[str, Any], modules: Mapping[str, Any]
) -> None:
    plan = PrecisionPlan(default, kinds, modules)
    text = plan.to_text(["KL 0.01", "", "of nothing"])
    assert parse_plan_text(text, "here") == plan
    assert parse_plan_text(text, "here").to_text(["KL 0.01", "", "of nothing"]) == text


def test_what_can_be_changed(model: Adjustable) -> None:
    """SMALL: a window layer, one of ratio 4, one of ratio 128."""
    ffn = [f"ffn.{e}.{w}" for e in ("experts", "shared_experts") for w in ("w1", "w2", "w3")]
    attention = ["attn.wkv", "attn.wo_b", "attn.wq_a", "attn.wq_b"]
    kinds = model.kinds("activations")
    assert set(kinds) == {*ffn, *attention, "attn.indexer.wq_b"}
    assert kinds["attn.wq_a"] == tuple(f"layers.{i}.attn.wq_a" for i in range(3))
    assert kinds["attn.indexer.wq_b"] == ("layers.1.attn.indexer.wq_b",)
    assert set(model.kinds("weights")) == {*ffn[3:], *attention, "attn.wo_a", "attn.indexer.wq_b"}
    assert model.modules["keys"] == (
        "layers.0.attn",
        "layers.1.attn",
        "layers.1.attn.indexer",
        "layers.2.attn",
    )


def test_nothing_said_is_the_released_model(model: Adjustable) -> None:
    assert PrecisionPlan().resolve(model) == Precision()
    assert parse_plan_text("", "here").resolve(model) == Precision()
    assert not Precision()


def test_the_most_specific_wins(model: Adjustable) -> None:
    text = """
        [default]
        activations = "bf16"
        [kinds."attn.wq_a"]
        activations = "fp8"
        weights = "fp4"
        [modules."layers.2.attn.wq_a"]
        activations = "bf16"
        [modules."layers.0.attn.wq_a"]
        weights = "stored"
        [kinds."attn.indexer"]
        keys = "bf16"
        [modules."layers.2.attn"]
        keys = "bf16"
    """
    found = parse_plan_text(text, "here").resolve(model)
    low = {"layers.0.attn.wq_a", "layers.1.attn.wq_a"}
    assert found.high_activations == set(model.modules["activations"]) - low
    assert found.fp4_weights == {"layers.1.attn.wq_a", "layers.2.attn.wq_a"}
    assert found.high_keys == {"layers.1.attn.indexer", "layers.2.attn"}
    assert Precision.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("[default", "not valid TOML", "plan.toml"),
        ("[modulse.x]", "unknown key 'modulse'", "plan.toml"),
        ("default = 3", "default is not a table", "plan.toml"),
        ('[default]\nactivations = "fp4"', "activations cannot be 'fp4'", "[default]"),
        ("[default]\nkeys = 8", "keys cannot be 8", "[default]"),
        ('[default]\nscales = "fp8"', "unknown key 'scales'", "[default]"),
        ('[kinds."attn.wq_a"]\nweights = "bf16"', "weights cannot be 'bf16'", '[kinds."attn.wq_a"]'),
        ('[kinds."attn.indexer"]\nkeys = "fp8"', 'choose "bf16" or "fp4"', '[kinds."attn.indexer"]'),
        ('[kinds]\nattn = "bf16"', "is not a table of keys", '[kinds."attn"]'),
        ('[kinds.attn.wq_a]\nactivations = "fp8"', "quote names that have dots", '[kinds."attn"]'),
    ],
)
def test_a_file_that_is_no_plan(text: str, what: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as e:
        read_plan(path)
    assert what in str(e.value)
    assert str(path) in str(e.value)
    assert where in str(e.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_plan(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ('[kinds."ffn.gate"]\nactivations = "fp8"', "the router always stays in high precision"),
        ('[modules."layers.1.ffn.gate"]\nweights = "fp4"', "the router always stays"),
        ('[modules."layers.0.attn.attn_sink"]\nkeys = "fp8"', "the softmax of attention always"),
        ('[modules."layers.0.hc_attn_fn"]\nweights = "fp4"', "the mixing of Hyper-Connections always"),
        ('[kinds."attn_norm"]\nactivations = "fp8"', "a norm always"),
        ('[kinds.embed]\nweights = "fp4"', "the embedding always"),
        ('[modules.head]\nactivations = "fp8"', "the head always"),
        ('[kinds."attn.compressor.wkv"]\nactivations = "fp8"', "nothing of it is quantised"),
        ('[kinds."attn.wo_a"]\nactivations = "fp8"', "its activation is never quantised"),
        ('[kinds."ffn.experts.w1"]\nweights = "fp4"', "routed experts keep their stored format"),
        ('[kinds."attn.wq_a"]\nkeys = "fp8"', "only attention modules and indexers have keys"),
        ('[kinds."attn"]\nactivations = "fp8"', "its activation is never quantised"),
        ('[kinds."attn.wqa"]\nactivations = "fp8"', "did you mean attn.wq_a"),
        ('[modules."layers.9.attn.wq_a"]\nactivations = "fp8"', "the model has no such module"),
    ],
)
def test_entries_that_do_not_fit_the_model(model: Adjustable, entry: str, what: str) -> None:
    with pytest.raises(BadInput) as e:
        parse_plan_text(entry, "my.toml").resolve(model)
    assert what in str(e.value)
    table, name = entry.split("\n")[0].strip("[]").split(".", 1)
    assert f'my.toml, [{table}."{name.strip(chr(34))}"]' in str(e.value)


def test_rows_that_no_block_fits() -> None:
    weights = {
        "layers.0.attn.wo_a.weight": ValueType(DType.F8E4M3, (64, 48)),
        "layers.0.attn.wo_a.scale": ValueType(DType.E8M0, (1, 1)),
    }
    with pytest.raises(Refused, match="rows of 48 elements do not split into FP4 blocks of 32"):
        parse_plan_text('[default]\nweights = "fp4"', "here").resolve(Adjustable.of(weights))


def test_numerics_that_leave_nothing_to_decide(tmp_path: Path) -> None:
    plan = parse_plan_text('[default]\nactivations = "fp8"', "my.toml")
    for numerics, what in (
        ("fp32", "nothing to round in fp32"),
        ("bf16", "my.toml wants activations in fp8"),
    ):
        with pytest.raises(UsageError, match=what):
            resolve_plan(plan, small_model(tmp_path, numerics))
    keys = parse_plan_text('[default]\nkeys = "bf16"\nweights = "fp4"', "my.toml")
    found = resolve_plan(keys, small_model(tmp_path, "bf16"))
    assert found.high_keys
    assert found.fp4_weights


def test_options_that_keep_a_plan_from_being_obeyed() -> None:
    keys, weights = Precision(high_keys=frozenset({"a"})), Precision(fp4_weights=frozenset({"a.wo_a"}))
    require_precision(PassOptions.of(without=("eliminate_quant",)), "auto", weights)
    require_precision(PassOptions.of(without=("lower_weights",)), "auto", keys)
    for precision, options, fold_wo in (
        (keys, PassOptions.of(without=("eliminate_quant",)), "auto"),
        (weights, PassOptions.of(without=("lower_weights",)), "auto"),
        (weights, PassOptions.of(to="traced"), "auto"),
        (weights, PassOptions(), "always"),
    ):
        with pytest.raises(UsageError, match="--precision-plan"):
            require_precision(options, fold_wo, precision)  # type: ignore[arg-type]
