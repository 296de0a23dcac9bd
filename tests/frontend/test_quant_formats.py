"""The storage format of a weight is decided by its own tensors, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rewright.frontend.checkpoint import Checkpoint
from rewright.frontend.quant_formats import check_release_names, resolve_weight, scale_name_of
from rewright.frontend.safetensors_file import TensorInfo
from rewright.ir.errors import BadInput
from rewright.ir.types import DType, ValueType

BASE = "layers.0.attn.wq_a"
ROWS, COLS = 200, 384

Stored = tuple[str, tuple[int, ...]]


def tensors(weight: Stored | None, **scales: Stored) -> dict[str, TensorInfo]:
    """Entries of a weight and its scales by suffix."""
    stored = {f"{BASE}.{suffix}": s for suffix, s in scales.items()}
    if weight is not None:
        stored[f"{BASE}.weight"] = weight
    return {name: TensorInfo(name, Path("s"), dtype, shape, 0, 0) for name, (dtype, shape) in stored.items()}


FP8: Stored = ("F8_E4M3", (ROWS, COLS))
FP8_SCALE: Stored = ("F8_E8M0", (2, 3))
FP4: Stored = ("I8", (ROWS, COLS // 2))
FP4_SCALE: Stored = ("F8_E8M0", (ROWS, COLS // 32))


@pytest.mark.parametrize("suffix", ["scale", "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(("scale_dtype", "logical"), [("F8_E8M0", DType.E8M0), ("F32", DType.F32)])
@pytest.mark.parametrize(
    ("weight", "scale_shape", "dtype"),
    [
        (FP8, (2, 3), DType.F8E4M3),
        (("I8", (ROWS, COLS // 2)), (ROWS, COLS // 32), DType.E2M1),
        (("U8", (ROWS, COLS // 2)), (ROWS, COLS // 32), DType.E2M1),
        (("F4", (ROWS, COLS)), (ROWS, COLS // 32), DType.E2M1),
    ],
)
def test_quantised_formats(
    suffix: str, scale_dtype: str, logical: DType, weight: Stored, scale_shape: tuple[int, int], dtype: DType
) -> None:
    given = tensors(weight, **{suffix: (scale_dtype, scale_shape)})
    stored = resolve_weight(given, BASE, ROWS, COLS)
    assert stored.weight is given[f"{BASE}.weight"]
    assert stored.scale is given[f"{BASE}.{suffix}"]
    assert (stored.dtype, stored.scale_dtype, stored.shape) == (dtype, logical, (ROWS, COLS))
    assert stored.type == ValueType(dtype, (ROWS, COLS))
    assert stored.scale_type == ValueType(logical, scale_shape)


@pytest.mark.parametrize(("name", "dtype"), [("BF16", DType.BF16), ("F16", DType.F16), ("F32", DType.F32)])
def test_floats(name: str, dtype: DType) -> None:
    stored = resolve_weight(tensors((name, (ROWS, COLS))), BASE, ROWS, COLS)
    assert (stored.dtype, stored.scale, stored.scale_dtype, stored.scale_type) == (dtype, None, None, None)


@pytest.mark.parametrize(
    ("given", "where", "found", "accepted"),
    [
        (tensors(None), "weight", "not in the checkpoint", "names of the DeepSeek-V4 release"),
        (tensors(FP8), "weight", "stored as F8_E4M3 without a scale", "F8_E8M0 or F32 [2, 3]"),
        (tensors(FP4), "weight", "stored as I8 without a scale", "F8_E8M0 or F32 [200, 12]"),
        (tensors(("F8_E5M2", (ROWS, COLS))), "weight", "stored as F8_E5M2[200, 384]", "accepted: F8_E4M3"),
        (tensors(("I64", (ROWS, COLS))), "weight", "stored as I64[200, 384]", "accepted: F8_E4M3"),
        (tensors(("BF16", (COLS, ROWS))), "weight", "stored as BF16[384, 200]", "BF16[200, 384]"),
        (tensors(("BF16", (ROWS, COLS)), scale=FP8_SCALE), "weight", "stored as BF16, yet", "F8_E4M3"),
        (tensors(("F8_E4M3", (ROWS,)), scale=FP8_SCALE), "weight", "F8_E4M3[200]", "F8_E4M3[200, 384]"),
        # int8 of one byte an element is not packed FP4
        (tensors(("I8", (ROWS, COLS)), scale=FP4_SCALE), "weight", "I8[200, 384]", "I8[200, 192]"),
        (tensors(("F4", (ROWS, COLS // 2)), scale=FP4_SCALE), "weight", "F4[200, 192]", "F4[200, 384]"),
        (tensors(FP8, scale=("F8_E8M0", (1, 3))), "scale", "stored as F8_E8M0[1, 3]", "F32 [2, 3]"),
        (tensors(FP8, scale=("BF16", (2, 3))), "scale", "stored as BF16[2, 3]", "F8_E8M0 or F32"),
        (tensors(FP8, scale=("U8", (2, 3))), "scale", "stored as U8[2, 3]", "F8_E8M0 or F32"),
        # the scale of the other format
        (tensors(FP4, scale=FP8_SCALE), "scale", "does not fit its weight I8[200, 192]", "[200, 12]"),
        (tensors(FP8, scale=FP4_SCALE), "scale", "does not fit its weight F8_E4M3[200, 384]", "[2, 3]"),
    ],
)
def test_refused_by_name(given: dict[str, TensorInfo], where: str, found: str, accepted: str) -> None:
    with pytest.raises(BadInput) as caught:
        resolve_weight(given, BASE, ROWS, COLS)
    assert caught.value.where == f"{BASE}.{where}"
    assert found in caught.value.what
    assert accepted in (caught.value.fix or "")


def test_fp4_columns_must_fill_blocks() -> None:
    given = tensors(("I8", (ROWS, 24)), scale=("F8_E8M0", (ROWS, 1)))
    with pytest.raises(BadInput, match="FP4 rows of 48 columns do not split into blocks of 32"):
        resolve_weight(given, BASE, ROWS, 48)


def test_two_scales() -> None:
    given = tensors(FP8, scale=FP8_SCALE, weight_scale_inv=("F32", (2, 3)))
    with pytest.raises(BadInput, match=f"2 scales: {BASE}.scale, {BASE}.weight_scale_inv"):
        scale_name_of(BASE, given)
    with pytest.raises(BadInput, match="2 scales"):
        resolve_weight(given, BASE, ROWS, COLS)


def test_no_scale() -> None:
    assert scale_name_of(BASE, tensors(("BF16", (ROWS, COLS)))) is None


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_a_proj.weight", "lm_head.weight"])
def test_transformers_names(name: str) -> None:
    with pytest.raises(BadInput, match="has a transformers name") as caught:
        check_release_names(["embed.weight", name], "folder")
    assert "names of the DeepSeek-V4 release" in (caught.value.fix or "")
    check_release_names(["embed.weight", "layers.0.attn.wq_a.weight"], "folder")


@pytest.mark.parametrize(
    ("options", "dense", "experts", "scale"),
    [
        ({}, DType.F8E4M3, DType.E2M1, DType.E8M0),
        ({"experts": "fp8", "scale_name": "weight_scale_inv"}, DType.F8E4M3, DType.F8E4M3, DType.E8M0),
        ({"scale_dtype": "f32", "scale_name": "weight_scale"}, DType.F8E4M3, DType.E2M1, DType.F32),
        ({"dense": "bf16"}, DType.BF16, DType.E2M1, None),
        ({"dense": "f32", "experts": "bf16"}, DType.F32, DType.BF16, None),
    ],
)
@pytest.mark.parametrize("says", ["fp4", "fp8", None])
def test_the_tensors_decide_whatever_the_configuration_says(
    tmp_path: Path,
    make_checkpoint: Callable[..., Path],
    options: dict[str, str],
    dense: DType,
    experts: DType,
    scale: DType | None,
    says: str | None,
) -> None:
    overrides = {"num_hidden_layers": 1, "n_routed_experts": 2, "vocab_size": 16, "expert_dtype": says}
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "ckpt", overrides, **options))
    wq_a = resolve_weight(checkpoint.tensors, "layers.0.attn.wq_a", 128, 256)
    assert (wq_a.dtype, wq_a.scale_dtype) == (dense, scale)
    assert resolve_weight(checkpoint.tensors, "layers.0.ffn.experts.1.w2", 256, 128).dtype == experts
    assert resolve_weight(checkpoint.tensors, "layers.0.ffn.gate", 2, 256).dtype == DType.BF16
