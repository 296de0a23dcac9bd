"""What the sm80 kernels cannot compute, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rewright.codegen.kernel import Call, No, Ok, Verdict
from rewright.codegen.kernels.sm80_layouts import matrix_layout
from rewright.ir.types import DType, ValueType

HEAD_DIMS = (128, 256, 512)
INDEX_HEAD_DIMS = (128,)
FEWEST_HEADS = 4
STREAMS = (2, 4)
MOST_EXPERTS = 384
MOST_CHOICES = 8
"""Experts of one token."""
MATRIX_ALIGN = 128
SCALE_BLOCK = 128
"""Activations that share a scale."""
DECODE_ROWS = 8
"""Tokens of a step that the streaming kernels take: columns of one matrix instruction."""

_BF16: dict[str, tuple[str, ...]] = {
    "add": ("x",),
    "attention": ("q",),
    "dequantize": ("base",),
    "entry_write": ("cache",),
    "compress_write": ("cache",),
    "expert_linear": ("x",),
    "expert_sum": ("routed", "shared"),
    "grouped_linear": ("x",),
    "hadamard": ("x",),
    "hc_collapse": ("streams",),
    "hc_combine": ("y", "streams"),
    "hc_expand": ("x",),
    "hc_mix": ("streams",),
    "head_rms_norm": ("x",),
    "index_query": ("q",),
    "index_score": ("q",),
    "index_select": ("q",),
    "kv_rows": ("x",),
    "kv_write": ("x",),
    "linear": ("x",),
    "quantize": ("x",),
    "rms_norm": ("x",),
    "rope": ("x",),
    "sparse_attention": ("q",),
    "swiglu": ("gate", "up"),
}
"""Activations that must be bf16 (or codes with a scale) by op; what the model keeps in fp32 is not listed."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that the kernels cannot do.

    Attributes:
        name: a word for it.
        takes: what they can do, for the documentation.
        find: why a call of one unit is beyond it, None where it is not.
    """

    name: str
    takes: str
    find: Callable[[Call], str | None]


def _packed(call: Call) -> str | None:
    for name, value in call.attrs.items():
        if name.endswith("_rows") and value:
            state = name.removesuffix("_rows")
            return f"{state} holds packed keys ({value}); these kernels read bf16 only (--kv bf16)"
    return None


def _dtype(call: Call) -> str | None:
    for name in _BF16.get(call.unit.op.name, ()):
        type = call.operand(name)
        if type is not None and type.dtype not in (DType.BF16, DType.F8E4M3):
            return f"{name} is {type.dtype.text}, not bf16"
    return None


def _weight_dtype(call: Call) -> str | None:
    for name, value in zip(call.unit.op.operands, call.unit.operands, strict=True):
        if value is not None and call.is_weight(value) and call.types[value].dtype in (DType.F16, DType.F64):
            return f"weight {name} is {call.types[value].dtype.text}"
    return None


def _calibrated(call: Call) -> str | None:
    """Of scales that were found as a row was quantised, one belongs to a block of that size anyway."""
    scale = call.operand("x_scale")
    if call.operand("fixed") is not None:
        block = call.attrs["block"]
    elif scale is not None and len(scale.shape) == 1:
        block = call.operands["x"].shape[-1] // scale.numel
    else:
        return None
    if block == SCALE_BLOCK:
        return None
    takes = f"these kernels take one for {SCALE_BLOCK} (calibrate --block)"
    return f"a calibrated scale is for {block} values; {takes}"


def _matrix(call: Call) -> str | None:
    weight = call.operand("weight") if call.unit.op.name.endswith("linear") else call.operand("fn")
    if weight is None:
        return None
    rows, columns = weight.shape[-2:]
    if columns % MATRIX_ALIGN:
        return f"rows of {columns} elements are no multiple of {MATRIX_ALIGN}"
    if not weight.dtype.is_float and rows % MATRIX_ALIGN:
        return f"{rows} rows of a matrix with scales are no multiple of {MATRIX_ALIGN}"
    return None


def _heads(call: Call) -> tuple[int, int] | None:
    """Number and width of attention heads."""
    match call.unit.op.name:
        case "attention":
            heads = call.attrs["heads"]
            return heads, call.operands["q"].shape[-1] // heads
        case "sparse_attention":
            return call.operands["q"].shape[2], call.operands["q"].shape[3]
    return None


def _head_dim(call: Call) -> str | None:
    if call.unit.op.name in ("kv_write", "kv_rows"):
        width = call.operands["x"].shape[-1]
    elif (heads := _heads(call)) is not None:
        width = heads[1]
    else:
        return None
    return None if width in HEAD_DIMS else f"head_dim {width} is not {_either(HEAD_DIMS)}"


def _head_count(call: Call) -> str | None:
    heads = _heads(call)
    return f"{heads[0]} heads are fewer than {FEWEST_HEADS}" if heads and heads[0] < FEWEST_HEADS else None


def _index_head_dim(call: Call) -> str | None:
    match call.unit.op.name:
        case "index_query":
            width = call.results[0].shape[-1]
        case "index_score" | "index_select":
            width = call.operands["q"].shape[-1]
        case _:
            return None
    return None if width in INDEX_HEAD_DIMS else f"index heads of {width} are not {_either(INDEX_HEAD_DIMS)}"


def _streams(call: Call) -> str | None:
    match call.unit.op.name:
        case "hc_expand" | "hc_split":
            count = call.attrs["streams"]
        case "hc_mix" | "hc_collapse" | "hc_combine":
            count = call.operands["streams"].shape[2]
        case "hc_head_split":
            count = call.operands["mix"].shape[-1]
        case _:
            return None
    return None if count in STREAMS else f"{count} streams are not {_either(STREAMS)}"


def _experts(call: Call) -> str | None:
    match call.unit.op.name:
        case "route" | "route_hash":
            count = call.operands["logits"].shape[-1]
        case "expert_linear":
            count = call.operands["weight"].shape[0]
        case _:
            return None
    return f"{count} experts are more than {MOST_EXPERTS}" if count > MOST_EXPERTS else None


def _choices(call: Call) -> str | None:
    chosen: ValueType | None = (
        call.results[0] if call.unit.op.name.startswith("route") else call.operand("experts")
    )
    if chosen is None or chosen.shape[-1] <= MOST_CHOICES:
        return None
    return f"{chosen.shape[-1]} experts of a token are more than {MOST_CHOICES}"


def _either(choices: tuple[int, ...]) -> str:
    return " or ".join(map(str, choices))


LIMITS = (
    Limit("keys", "keys stored as bf16 (--kv bf16)", _packed),
    Limit("activations", "bf16 activations", _dtype),
    Limit("weights", "weights in bf16, f32, e4m3 or e2m1", _weight_dtype),
    Limit("scales", f"calibrated scales of {SCALE_BLOCK} values", _calibrated),
    Limit("matrix", f"matrices with scales of N and K, others of K, multiples of {MATRIX_ALIGN}", _matrix),
    Limit("head_dim", f"heads of {_either(HEAD_DIMS)}", _head_dim),
    Limit("heads", f"{FEWEST_HEADS} heads or more", _head_count),
    Limit("index_head_dim", f"index heads of {_either(INDEX_HEAD_DIMS)}", _index_head_dim),
    Limit("hc_mult", f"{_either(STREAMS)} streams", _streams),
    Limit("experts", f"up to {MOST_EXPERTS} experts", _experts),
    Limit("top_k", f"up to {MOST_CHOICES} experts of a token", _choices),
)
"""Every limit of every sm80 kernel."""


def supports(call: Call) -> Verdict:
    """Whether every unit of a call is within the limits."""
    for reason in _reasons(call):
        return No(reason)
    return Ok()


def supports_decode(call: Call) -> Verdict:
    """The same for kernels that take few tokens."""
    if call.rows > DECODE_ROWS:
        return No(f"{call.rows} tokens of a step are more than {DECODE_ROWS}")
    for single in call.each("linear", "grouped_linear", "expert_linear"):
        weight = single.operands["weight"]
        plain = single.unit.op.name == "linear" and weight.dtype is DType.BF16
        if not matrix_layout(weight) and not plain:
            return No(f"a matrix {weight} has no fragments of 16 rows")
    return supports(call)


def _reasons(call: Call) -> Iterator[str]:
    for single in call.each():
        for limit in LIMITS:
            reason = limit.find(single)
            if reason is not None:
                yield reason
