"""Every host kernel against its op's reference, one sequence at a time as the reference runtime runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_launch import reference_by_row, run_op, valid_rows
from torch import Tensor

from rewright.codegen.kernel import signature
from rewright.codegen.targets import TARGETS
from rewright.ir.op import registry
from rewright.ir.plan import kernel_abi
from rewright.runtime import _native

OPS = sorted(registry())

# Values of f32 results that may differ in the last bits, relative to the largest, and why.
ALMOST = {
    "multi_linear": 2e-6,  # an example has 18 columns: of the last two the library sums in another order
    "sparse_attention": 1e-6,  # exp differs in the last bit of one value in a hundred
    "hc_split": 2e-7,  # five streams: the library sums five exponentials in another order
    "route": 3e-7,  # softplus of examples that fill no vector comes from the C library
    "route_hash": 3e-7,
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def supported(operands: tuple[Tensor | None, ...]) -> bool:
    """Host kernels have bf16 and f32 activations; some examples are f16."""
    return operands[0] is None or operands[0].dtype != torch.float16


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("pad", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("name", OPS)
def test_a_kernel_computes_what_the_reference_does(name: str, pad: bool, threads: int) -> None:
    op = registry()[name]
    for seed in range(2):
        for operands, attrs in op.example_calls(seed):
            if not supported(operands):
                continue
            expected = reference_by_row(op, operands, attrs)
            found = run_op(op, operands, attrs, threads=threads, pad=pad)
            for i, (got, (want, mask)) in enumerate(zip(found, expected, strict=True)):
                if i not in op.updated(attrs):
                    got, want = valid_rows(got, operands, op), valid_rows(want, operands, op)
                compare(name, got[mask], want[mask])


def compare(name: str, got: Tensor, want: Tensor) -> None:
    if name in ALMOST and want.dtype == torch.float32:
        assert (got - want).abs().max() <= ALMOST[name] * want.abs().max()
    else:
        assert torch.equal(bits(got), bits(want))


_HASH_EVERYTHING = """
import hashlib, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from one_launch import run_op, valid_rows
from rewright.ir.op import registry
from rewright.runtime import _native

print(_native.vector_name())
for name, op in sorted(registry().items()):
    digest = hashlib.sha256()
    for operands, attrs in op.example_calls(5):
        if operands[0] is None or operands[0].dtype != torch.float16:
            for i, result in enumerate(run_op(op, operands, attrs)):
                kept = result if i in op.updated(attrs) else valid_rows(result, operands, op)
                digest.update(kept.contiguous().view(torch.uint8).numpy().tobytes())
    print(name, digest.hexdigest())
"""


def test_instruction_sets_give_the_same_bits(repo_root: Path) -> None:
    def results(**environment: str) -> list[str]:
        command = [sys.executable, "-c", _HASH_EVERYTHING, str(repo_root / "tests" / "helpers")]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    portable, own = results(REWRIGHT_VECTOR="portable"), results()
    assert portable[0] == "portable"
    assert own[0] == _native.vector_name()
    assert len(own) == 1 + len(OPS)
    assert portable[1:] == own[1:]


def test_native_registry_and_definitions_are_the_same() -> None:
    defined = {f"host.{name}": signature(op) for name, op in registry().items()}
    assert _native.kernels() == defined
    assert TARGETS["host"].abi == kernel_abi(_native.kernels())
