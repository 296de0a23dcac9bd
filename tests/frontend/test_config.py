"""Validation of config.json: every problem is found, named, and listed with the others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rewright.frontend.config import ModelConfig, RopeScaling, load_config
from rewright.ir.errors import BadInput, ProblemList

REMOVE = object()


@pytest.fixture(scope="module")
def flash(repo_root: Path) -> dict[str, Any]:
    return json.loads((repo_root / "examples/configs/v4-flash.json").read_text())


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with the dotted key set, or taken out for `REMOVE`."""
    out = copy.deepcopy(config)
    *parents, key = path.split(".")
    d = out
    for parent in parents:
        d = d[parent]
    if value is REMOVE:
        del d[key]
    else:
        d[key] = value
    return out


def problems(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ProblemList) as caught:
        ModelConfig.from_dict(config, "config.json")
    return caught.value.problems


def test_flash(repo_root: Path) -> None:
    config, notes = load_config(repo_root / "examples/configs/v4-flash.json")
    assert notes == []
    assert (config.num_hidden_layers, config.hidden_size, config.index_topk) == (43, 4096, 512)
    assert config.rope_scaling == RopeScaling(16.0, 65536, 32.0, 1.0)
    ratios = config.compress_ratios
    assert len(ratios) == 43  # the MTP entry is cut
    assert [ratios.count(r) for r in (0, 4, 128)] == [2, 21, 20]
    assert [config.layer_ratio(i) for i in (1, 2, 3, 42)] == [0, 4, 128, 4]
    assert [config.has_indexer(i) for i in (1, 2, 3)] == [False, True, False]
    assert [config.is_hash_layer(i) for i in (0, 2, 3)] == [True, True, False]
    assert (config.nope_head_dim, config.group_width) == (448, 4096)
    assert config.quantized
    assert config.expert_dtype == "fp4"


def test_pro(repo_root: Path) -> None:
    config, notes = load_config(repo_root / "examples/configs/v4-pro.json")
    assert notes == []
    assert [config.compress_ratios.count(r) for r in (0, 4, 128)] == [0, 30, 31]
    assert config.routed_scaling_factor == 2.5


def test_a_checkpoint_folder_is_accepted(tiny_v4: Path) -> None:
    config, notes = load_config(tiny_v4)
    assert notes == []
    assert config == load_config(tiny_v4 / "config.json")[0]
    assert config.compress_ratios == (0, 0, 4, 128, 4, 128)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", None])
@pytest.mark.parametrize("quantized", [True, False])
def test_to_dict_is_read_back(flash: dict[str, Any], expert_dtype: str | None, quantized: bool) -> None:
    flash = changed(flash, "expert_dtype", expert_dtype)
    if not quantized:
        del flash["quantization_config"]
    config, _ = ModelConfig.from_dict(flash, "config.json")
    assert (config.expert_dtype, config.quantized) == (expert_dtype, quantized)
    again = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(again, "config.json") == (config, [])


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro"])
def test_examples_hold_exactly_the_keys_that_are_read(repo_root: Path, name: str) -> None:
    path = repo_root / "examples/configs" / f"{name}.json"
    written = json.loads(path.read_text())
    read = load_config(path)[0].to_dict()
    assert list(written) == sorted(read)
    assert {k: v for k, v in written.items() if k != "compress_ratios"} == {
        k: v for k, v in read.items() if k != "compress_ratios"
    }


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("model_type", "deepseek_v41", '"deepseek_v4"'),
        ("scoring_func", "sigmoid", '"sqrtsoftplus"'),
        ("topk_method", "greedy", '"noaux_tc"'),
        ("hidden_act", "gelu", '"silu"'),
        ("norm_topk_prob", False, "true"),
        ("tie_word_embeddings", True, "false"),
        ("attention_bias", True, "false"),
        ("num_key_value_heads", 8, "1"),
        ("n_shared_experts", 2, "1"),
        ("expert_dtype", "int4", '"fp4" or "fp8"'),
        ("rope_scaling.type", "linear", '"yarn"'),
        ("quantization_config.quant_method", "gptq", '"fp8"'),
        ("quantization_config.fmt", "e5m2", '"e4m3"'),
        ("quantization_config.scale_fmt", "float", '"ue8m0"'),
        ("quantization_config.activation_scheme", "static", '"dynamic"'),
        ("quantization_config.weight_block_size", [32, 32], "[128, 128]"),
        # JSON types: true is no integer, 1 is not true, a float is no integer
        ("norm_topk_prob", 1, "true"),
        ("num_key_value_heads", True, "1"),
        ("hidden_size", True, "an integer >= 1"),
        ("hidden_size", 4096.0, "an integer >= 1"),
        ("hidden_size", "4096", "an integer >= 1"),
        ("rope_theta", "10000", "a finite number > 0"),
        ("rope_theta", True, "a finite number > 0"),
        ("rope_theta", None, "a finite number > 0"),
        ("rope_theta", [], "a finite number > 0"),
        ("rope_scaling", [16], "an object of type yarn"),
        ("quantization_config", "fp8", "an object"),
        ("compress_ratios", {"0": 4}, "a list of integers >= 0, one per layer"),
        # sizes
        ("hidden_size", 0, "an integer >= 1"),
        ("sliding_window", -1, "an integer >= 1"),
        ("hc_mult", 0, "an integer >= 1"),
        ("vocab_size", 10**20, "an integer <= 2147483647"),
        ("n_routed_experts", 10**8, "an integer <= 65536"),
        ("hc_sinkhorn_iters", 10**9, "an integer <= 1000"),
        ("num_hash_layers", -1, "an integer >= 0"),
        ("rms_norm_eps", 0, "a finite number > 0"),
        ("rope_scaling.factor", -16, "a finite number > 0"),
        ("rope_scaling.original_max_position_embeddings", 1.5, "an integer >= 1"),
        # relations
        ("head_dim", 64, "qk_rope_head_dim (64) plus a positive multiple of 64"),
        ("head_dim", 500, "qk_rope_head_dim (64) plus a positive multiple of 64"),
        ("hidden_size", 4097, "an even integer: two FP4 weights share a byte"),
        ("moe_intermediate_size", 33, "an even integer: two FP4 weights share a byte"),
        ("index_head_dim", 64, "a power of two, a multiple of 32 and above qk_rope_head_dim (64)"),
        ("index_head_dim", 96, "a power of two, a multiple of 32 and above qk_rope_head_dim (64)"),
        ("o_groups", 7, "a divisor of num_attention_heads (64)"),
        ("num_experts_per_tok", 257, "at most n_routed_experts (256)"),
        ("num_hash_layers", 44, "at most num_hidden_layers (43)"),
        ("eos_token_id", 129280, "below vocab_size (129280)"),
        ("rope_scaling.beta_fast", 1, "a number > beta_slow (1)"),
    ],
)
def test_refused_by_name(flash: dict[str, Any], key: str, value: object, accepted: str) -> None:
    assert problems(changed(flash, key, value)) == [f"{key} is {json.dumps(value)}; accepted: {accepted}"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
def test_numbers_that_no_double_holds(flash: dict[str, Any], number: float) -> None:
    (line,) = problems(changed(flash, "rope_theta", number))
    assert line.startswith("rope_theta is")
    assert line.endswith("accepted: a finite number > 0")


def test_odd_rope_dim(flash: dict[str, Any]) -> None:
    config = changed(changed(flash, "qk_rope_head_dim", 63), "head_dim", 127)
    assert problems(config) == ["qk_rope_head_dim is 63; accepted: an even integer"]


def test_every_missing_key_is_listed(flash: dict[str, Any]) -> None:
    optional = {"expert_dtype", "quantization_config"}
    listed = problems({})
    assert [line.split()[0] for line in listed] == list(dict.fromkeys(line.split()[0] for line in listed))
    assert {line.split()[0] for line in listed} == set(flash) - optional
    assert all(" is missing; accepted: " in line for line in listed)


@pytest.mark.parametrize("parent", ["quantization_config", "rope_scaling"])
def test_missing_nested_keys_are_listed(flash: dict[str, Any], parent: str) -> None:
    listed = problems(changed(flash, parent, {}))
    assert {line.split()[0] for line in listed} == {f"{parent}.{key}" for key in flash[parent]}


def test_all_problems_at_once(flash: dict[str, Any]) -> None:
    bad = {
        "model_type": "llama",
        "hidden_size": 0,
        "rope_scaling.type": "su",
        "o_groups": 5,
        "expert_dtype": 4,
    }
    config = flash
    for key, value in bad.items():
        config = changed(config, key, value)
    assert {line.split()[0] for line in problems(config)} == set(bad)


def test_a_broken_key_does_not_accuse_another(flash: dict[str, Any]) -> None:
    assert problems(changed(flash, "num_hidden_layers", "43")) == [
        'num_hidden_layers is "43"; accepted: an integer >= 1'
    ]


@pytest.mark.parametrize("ratio", [4, 8, 16, 32, 64, 128, 0])
def test_accepted_ratios(flash: dict[str, Any], ratio: int) -> None:
    config, _ = ModelConfig.from_dict(changed(flash, "compress_ratios", [ratio] * 43), "config.json")
    assert config.compress_ratios == (ratio,) * 43


@pytest.mark.parametrize("ratio", [1, 2, 6, 256])
def test_refused_ratios(flash: dict[str, Any], ratio: int) -> None:
    (line,) = problems(changed(flash, "compress_ratios", [0, ratio] * 22))
    assert line == f"compress_ratios[1] is {ratio}; accepted: 0, 4, 8, 16, 32, 64, 128"


def test_length_of_ratios(flash: dict[str, Any]) -> None:
    longer = changed(flash, "compress_ratios", [*flash["compress_ratios"], 0, 0])
    same = ModelConfig.from_dict(flash, "config.json")
    assert ModelConfig.from_dict(longer, "config.json") == same
    assert problems(changed(flash, "compress_ratios", [0] * 42)) == [
        "compress_ratios has 42 entries; accepted: at least num_hidden_layers (43)"
    ]


def test_index_head_dim_is_free_without_an_indexer(flash: dict[str, Any]) -> None:
    config = changed(changed(flash, "index_head_dim", 48), "compress_ratios", [0, 128] * 22)
    assert ModelConfig.from_dict(config, "config.json")[0].index_head_dim == 48


def test_rope_type_is_an_alias(flash: dict[str, Any]) -> None:
    config = changed(changed(flash, "rope_scaling.type", REMOVE), "rope_scaling.rope_type", "yarn")
    assert ModelConfig.from_dict(config, "config.json") == ModelConfig.from_dict(flash, "config.json")
    both = changed(flash, "rope_scaling.rope_type", "linear")
    assert problems(both) == ['rope_scaling.rope_type is "linear"; accepted: "yarn"']


def test_unknown_keys_make_one_note(flash: dict[str, Any]) -> None:
    config = {**flash, "zeta": 1, "alpha": 2, "transformers_version": "5", "dspark_block_size": 5}
    config = changed(config, "rope_scaling.mscale", 1.0)
    read, notes = ModelConfig.from_dict(config, "somewhere/config.json")
    assert notes == ["somewhere/config.json: unknown keys were ignored: alpha, rope_scaling.mscale, zeta"]
    assert read == ModelConfig.from_dict(flash, "config.json")[0]


def test_the_error_says_where_and_what_to_do(flash: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(flash, "hidden_size", REMOVE)))
    with pytest.raises(ProblemList) as caught:
        load_config(tmp_path)
    assert caught.value.where == str(path)
    assert "DeepSeek-V4 release" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "not an object"),
    ],
)
def test_files_that_are_no_json_object(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load_config(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json: cannot be read \(No such file"):
        load_config(tmp_path)
