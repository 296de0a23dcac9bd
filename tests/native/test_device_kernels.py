"""Every sm80 kernel of one op against the op's reference: emulated on this CPU everywhere, and on a card.

A card sums in another order than the reference does, so results are compared within the tolerance of the
op's results in their own format, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_results import compare
from device_takes import Operands, has_other_blocks, has_packed_keys, takes
from one_launch import one_launch, reference_by_row, valid_rows

from rewright.codegen.kernels.sm80 import SINGLE
from rewright.ir.graph import op_named
from rewright.ir.op import Op, registry
from rewright.runtime import _native

OPS = sorted(k.covers[0].ops[0] for k in SINGLE if set(k.symbols) <= set(_native.device_kernels()))


@pytest.fixture(scope="module")
def emulation() -> _native.Device:
    return _native.open_emulation(4)


@pytest.fixture(scope="module")
def card() -> _native.Device:
    if not torch.cuda.is_available():
        pytest.skip("there is no card")
    kernels = Path(_native.__file__).parent / "kernels"
    return _native.open_cuda(0, sorted(map(str, kernels.glob("*.fatbin"))))


@pytest.mark.parametrize("pad", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("name", OPS)
def test_emulated(name: str, pad: bool, emulation: _native.Device) -> None:
    check(name, pad, emulation, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("pad", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("name", OPS)
def test_on_a_card(name: str, pad: bool, card: _native.Device) -> None:
    check(name, pad, card, "cuda")


def check(name: str, pad: bool, device: _native.Device, where: str) -> None:
    op = registry()[name]
    calls = 0
    for seed in range(2):
        for operands, attrs in op.example_calls(seed):
            if not takes(op, operands):
                continue
            calls += 1
            expected = reference_by_row(op, operands, attrs)
            found = one_launch(op, operands, attrs, pad=pad, target="sm80").run_on(device, where)
            for i, (got, (want, mask)) in enumerate(zip(found, expected, strict=True)):
                if i not in op.updated(attrs):
                    got, want = valid_rows(got, operands, op), valid_rows(want, operands, op)
                compare(got[mask], want[mask])
    assert calls


def refusing(emulation: _native.Device, concerned: Callable[[Op, Operands], bool]) -> set[str]:
    """Ops with examples that are concerned, all of which no launch can be made of."""
    refused = set()
    for op in map(op_named, OPS):
        for operands, attrs in op.example_calls(0):
            if concerned(op, operands):
                with pytest.raises(_native.PlanError):
                    one_launch(op, operands, attrs, target="sm80").run_on(emulation, "cpu")
                refused.add(op.name)
    return refused


def test_packed_keys_are_refused(emulation: _native.Device) -> None:
    """What the compiler refuses is no plan for these kernels either."""
    assert refusing(emulation, has_packed_keys) == {
        "attention", "compress_write", "entry_write", "index_score", "index_select", "kv_write", "ring_write",
        "sparse_attention",
    }  # fmt: skip


def test_scales_of_other_blocks_are_refused(emulation: _native.Device) -> None:
    assert refusing(emulation, has_other_blocks) == {"linear"}
