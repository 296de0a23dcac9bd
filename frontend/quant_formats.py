"""How the checkpoint stores a linear weight: float, FP8 or FP4, and under which scale name.

The tensors themselves decide, never the configuration: releases of one model differ in the storage
of their experts, and `expert_dtype` is missing from some copies of `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rewright.frontend.safetensors_file import TensorInfo
from rewright.ir.errors import BadInput
from rewright.ir.types import DType, ValueType

FP8_BLOCK = 128
"""Rows and columns that share a scale in an FP8 weight."""

FP4_BLOCK = 32
"""Columns of one row that share a scale in an FP4 weight."""

SCALE_SUFFIXES = (".scale", ".weight_scale", ".weight_scale_inv")

_FLOATS = {"BF16": DType.BF16, "F16": DType.F16, "F32": DType.F32}
_PACKED = {"I8": 2, "U8": 2, "F4": 1}  # columns of FP4 per column of the stored shape
_SCALES = {"F8_E8M0": DType.E8M0, "F32": DType.F32}
_RELEASE_NAMES = (
    "only the names of the DeepSeek-V4 release are read (embed.weight, layers.0.attn.wq_a.weight, ...)"
)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A linear weight W[rows, cols] as it lies in the checkpoint.

    Attributes:
        weight: F8_E4M3, BF16, F16, F32 or F4 [rows, cols], or I8, U8 [rows, cols/2].
        scale: multiplied to the weight: [ceil(rows/128), ceil(cols/128)] for F8E4M3,
            [rows, cols/32] for E2M1, None for floats.
        dtype: logical element type.
        scale_dtype: E8M0 or F32; None without scale.
        shape: (rows, cols) in logical elements.
    """

    weight: TensorInfo
    scale: TensorInfo | None
    dtype: DType
    scale_dtype: DType | None
    shape: tuple[int, int]

    @property
    def type(self) -> ValueType:
        return ValueType(self.dtype, self.shape)

    @property
    def scale_type(self) -> ValueType | None:
        if self.scale is None or self.scale_dtype is None:
            return None
        return ValueType(self.scale_dtype, self.scale.shape)


def check_release_names(names: Iterable[str], where: str) -> None:
    """Refuse a checkpoint with the names of the transformers library (`model.layers...`)."""
    foreign = next((n for n in names if n.startswith(("model.", "lm_head."))), None)
    if foreign is not None:
        raise BadInput(f"tensor {foreign} has a transformers name", where=where, fix=_RELEASE_NAMES)


def scale_name_of(base: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Name of the scale that belongs to `base + ".weight"`; `BadInput` if there are several."""
    found = [base + suffix for suffix in SCALE_SUFFIXES if base + suffix in tensors]
    if len(found) > 1:
        what = f"the weight has {len(found)} scales: {', '.join(found)}"
        raise BadInput(what, where=f"{base}.weight", fix="leave the one that the weight was quantised with")
    return found[0] if found else None


def resolve_weight(tensors: Mapping[str, TensorInfo], base: str, rows: int, cols: int) -> StoredWeight:
    """Find the weight `base + ".weight"` and its scale, and decide its format.

    Args:
        tensors: the checkpoint's tensors by name.
        base: module path, e.g. `layers.0.attn.wq_a`.
        rows: output features of the weight.
        cols: input features of the weight.

    Raises:
        BadInput: no such tensor, or a dtype, shape or scale that is not one of the formats.
    """
    name = base + ".weight"
    weight = tensors.get(name)
    if weight is None:
        raise BadInput("not in the checkpoint", where=name, fix=_RELEASE_NAMES)
    if weight.dtype in _FLOATS:
        _require_shape(weight, rows, cols)
        if (scale := scale_name_of(base, tensors)) is not None:
            what = f"stored as {weight.dtype}, yet there is a scale ({scale})"
            fix = "accepted with a scale: F8_E4M3, or e2m1 packed into I8, U8 or F4"
            raise BadInput(what, where=name, fix=fix)
        return StoredWeight(weight, None, _FLOATS[weight.dtype], None, (rows, cols))
    if weight.dtype == "F8_E4M3":
        _require_shape(weight, rows, cols)
        dtype, scale_shape = DType.F8E4M3, (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    elif weight.dtype in _PACKED:
        if cols % FP4_BLOCK:
            what = f"FP4 rows of {cols} columns do not split into blocks of {FP4_BLOCK}"
            raise BadInput(what, where=name, fix="store the weight as FP8, BF16 or F32")
        _require_shape(weight, rows, cols // _PACKED[weight.dtype])
        dtype, scale_shape = DType.E2M1, (rows, cols // FP4_BLOCK)
    else:
        fix = "accepted: F8_E4M3, e2m1 packed into I8, U8 or F4, BF16, F16, F32"
        raise BadInput(f"stored as {weight}", where=name, fix=fix)
    scale = _require_scale(tensors, base, weight, scale_shape)
    return StoredWeight(weight, scale, dtype, _SCALES[scale.dtype], (rows, cols))


def _require_shape(tensor: TensorInfo, *shape: int) -> None:
    if tensor.shape != shape:
        fix = f"accepted: {tensor.dtype}{list(shape)}"
        raise BadInput(f"stored as {tensor}", where=tensor.name, fix=fix)


def _require_scale(
    tensors: Mapping[str, TensorInfo], base: str, weight: TensorInfo, shape: tuple[int, int]
) -> TensorInfo:
    accepted = f"{' or '.join(_SCALES)} {list(shape)}"
    name = scale_name_of(base, tensors)
    if name is None:
        fix = f"accepted: {accepted}, called {base} and one of {', '.join(SCALE_SUFFIXES)}"
        raise BadInput(f"stored as {weight.dtype} without a scale", where=weight.name, fix=fix)
    scale = tensors[name]
    if scale.dtype not in _SCALES or scale.shape != shape:
        what = f"stored as {scale}, which does not fit its weight {weight}"
        raise BadInput(what, where=name, fix=f"accepted: {accepted}")
    return scale
