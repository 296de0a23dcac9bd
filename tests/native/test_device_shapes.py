"""sm80 kernels on rows as wide as those of real models, emulated: what the examples of ops do not reach."""

from __future__ import annotations

from typing import Any

import pytest
from device_results import compare
from one_launch import one_launch, reference_by_row, valid_rows
from wide_calls import Operands, wide_calls

from rewright.ir.op import Examples, registry
from rewright.runtime import _native

CALLS = list(wide_calls(Examples(7)))


@pytest.fixture(scope="module")
def emulation() -> _native.Device:
    return _native.open_emulation(4)


@pytest.mark.parametrize("call", CALLS, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CALLS)])
def test_emulated(call: tuple[str, Operands, dict[str, Any]], emulation: _native.Device) -> None:
    name, operands, attrs = call
    op = registry()[name]
    attrs = op.bind_attrs(attrs)
    found = one_launch(op, operands, attrs, pad=True, target="sm80").run_on(emulation, "cpu")
    for i, (got, (want, mask)) in enumerate(zip(found, reference_by_row(op, operands, attrs), strict=True)):
        if i not in op.updated(attrs):
            got, want = valid_rows(got, operands, op), valid_rows(want, operands, op)
        compare(got[mask], want[mask])
