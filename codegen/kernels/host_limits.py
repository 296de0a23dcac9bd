"""What the host kernels cannot compute: the checks of csrc/host that an op's own typing does not make."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rewright.codegen.kernel import Call, No, Ok, Verdict
from rewright.ir.types import DType, ValueType

MOST_STREAMS = 8
MOST_SINKHORN_STEPS = 1 << 10
MOST_CHOICES = 64
"""Experts of one token."""

_ACTIVATION_BLOCK = 128
_E2M1_BLOCK = 32
_ACTIVATIONS = (DType.BF16, DType.F32, DType.F8E4M3, DType.E8M0, DType.E2M1, DType.I32, DType.BYTE)
_MATRIX = re.compile(r"weight\d*|w[123]")


def supports(call: Call) -> Verdict:
    """Whether the host kernel of the call's op can compute it."""
    for reason in _reasons(call):
        return No(reason)
    return Ok()


def matrices(call: Call) -> Iterator[tuple[str, ValueType]]:
    """The weights of a call that are multiplied with activations, by operand."""
    if call.unit.op.name == "embed":  # whose table is looked up
        return
    for name, type in call.operands.items():
        if _MATRIX.fullmatch(name) and len(type.shape) > 1:
            yield name, type


def _reasons(call: Call) -> Iterator[str]:
    yield from _types(call)
    if call.operand("x_scale") is not None:
        columns = call.operands["x"].shape[-1]
        if columns % _ACTIVATION_BLOCK:
            yield f"quantised rows of {columns} elements are no multiple of {_ACTIVATION_BLOCK}"
    for name, type in matrices(call):
        if type.dtype is DType.E2M1 and type.shape[-1] % _E2M1_BLOCK:
            yield f"rows of {name} with {type.shape[-1]} elements are no multiple of {_E2M1_BLOCK}"
    yield from _attributes(call)


def _types(call: Call) -> Iterator[str]:
    unit = call.unit
    values = [*zip(unit.op.operands, unit.operands, strict=True), *((v, v) for v in unit.results)]
    for name, value in values:
        if value is None:
            continue
        dtype = call.types[value].dtype
        if call.is_weight(value):
            if dtype is DType.F64:
                yield f"weight {name} is f64"
        elif dtype not in _ACTIVATIONS:
            yield f"{name} is {dtype.text}; activations are bf16 or f32"


def _attributes(call: Call) -> Iterator[str]:
    op, attrs = call.unit.op.name, call.attrs
    if op.startswith("hc_"):
        streams = attrs.get("n", attrs.get("streams", 0))
        if streams > MOST_STREAMS:
            yield f"{streams} streams are more than {MOST_STREAMS}"
        if attrs.get("iters", 0) > MOST_SINKHORN_STEPS:
            yield f"{attrs['iters']} Sinkhorn steps are more than {MOST_SINKHORN_STEPS}"
    if op == "grouped_linear_quant" and attrs["fmt"] != "e4m3":
        yield f"the result is quantised to {attrs['fmt']}, not e4m3"
    if op in ("route", "moe") and attrs["k"] > MOST_CHOICES:
        yield f"{attrs['k']} experts of a token are more than {MOST_CHOICES}"
    table = call.operand("table")
    if table is not None and table.shape[1] > MOST_CHOICES:
        yield f"{table.shape[1]} experts of a token are more than {MOST_CHOICES}"
    if attrs.get("fmt") == "e2m1" and attrs["block"] % 2:
        yield f"blocks of {attrs['block']} e2m1 codes are odd"
    if op == "attention":
        head = call.operands["q"].shape[-1] // attrs["heads"]
        last = call.results[0].shape[-1]
        if last % head:
            yield f"heads of {head} do not divide result rows of {last}"
