"""What every graph op owes, generated over the registry: a new op is covered without a line here.

The only thing to state by hand is which operands the rows of a batch share (`SHARED`).
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rewright.ir.op import Attrs, Op, Operands, TypeMismatch, registry, results_of
from rewright.ir.ops.fused.linear import MOST_LINEARS
from rewright.ir.types import DType, ValueType, type_of

OPS = dict(sorted(registry().items()))
CASES = [
    pytest.param(op, operands, attrs, id=f"{name}-{i}")
    for name, op in OPS.items()
    for i, (operands, attrs) in enumerate(op.example_calls())
]
cases = pytest.mark.parametrize(("op", "operands", "attrs"), CASES)
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)

# Operands without a batch axis: weights, tables, and state, which is addressed by slot.
WEIGHTS = {f"{kind}{i}" for kind in ("weight", "scale") for i in range(MOST_LINEARS)}
HC = {"fn", "scale", "base", "norm"}
EXPERTS = {"w1", "s1", "w3", "s3", "w2", "s2"}
SHARED = {
    "attention": {"window", "compressed", "sink", "cos", "sin"},
    "compress_write": {"ape", "kv_ring", "gate_ring", "cache", "norm", "cos", "sin"},
    "grouped_linear_quant": {"weight", "scale"},
    "hc_head": HC,
    "hc_post_pre": HC,
    "hc_pre": HC,
    "index_query": {"cos", "sin"},
    "index_select": {"keys"},
    "kv_rows": {"weight", "cos", "sin"},
    "kv_write": {"weight", "cos", "sin", "window"},
    "moe": {"bias", "table", *EXPERTS},
    "multi_linear": WEIGHTS,
    "rms_norm_quant": {"weight"},
    "shared_expert": EXPERTS,
    "add_position_bias": {"ape"},
    "compress": {"kv_ring", "gate_ring"},
    "embed": {"weight"},
    "entry_write": {"cache"},
    "expert_linear": {"weight", "scale"},
    "grouped_linear": {"weight", "scale"},
    "hc_head_split": {"scale", "base"},
    "hc_mix": {"fn"},
    "hc_split": {"scale", "base"},
    "index_score": {"keys"},
    "linear": {"weight", "scale"},
    "ring_write": {"ring"},
    "rms_norm": {"weight"},
    "rope": {"cos", "sin"},
    "route": {"bias"},
    "route_hash": {"table"},
    "sparse_attention": {"window", "compressed", "sink"},
}
# Operands of any element type, and those that no other operand restricts.
ANY_TYPE = {("reshape", "x"), ("take_last", "x")}
LOOSE = {("embed", "tokens"), ("embed", "weight"), ("route_hash", "table"), ("moe", "table")}
CONTEXTS = (1, 7, 32, 10**6)


as_tuple = results_of


def types(tensors: Operands) -> tuple[ValueType | None, ...]:
    return tuple(None if t is None else type_of(t) for t in tensors)


def copies(tensors: Operands) -> Operands:
    return tuple(None if t is None else t.clone() for t in tensors)


def bits(tensor: Tensor) -> Tensor:
    """Bytes of a tensor: NaN equals NaN, and -0 is not 0."""
    return tensor.contiguous().view(torch.uint8)


def assert_bits_equal(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            assert type_of(g) == type_of(w)
            assert torch.equal(bits(g), bits(w))


def assert_close(op: Op, got: Tensor, want: Tensor) -> None:
    """Within the op's tolerance beside that of sums in fp32; codes and integers have none."""
    assert type_of(got) == type_of(want)
    if not type_of(got).dtype.is_float:
        assert torch.equal(bits(got), bits(want))
        return
    ulp = torch.finfo(got.dtype).eps * op.tolerance.ulp + 16 * torch.finfo(torch.float32).eps
    want = want.double().nan_to_num(neginf=0.0)
    limit = ulp * want.abs().amax(-1, keepdim=True)
    assert ((got.double().nan_to_num(neginf=0.0) - want).abs() <= limit).all()


@every_op
def test_complete(op: Op) -> None:
    assert op.reference.__doc__
    calls = op.example_calls()
    for name in op.optional:  # the examples show an optional operand present and absent
        at = op.operands.index(name)
        assert {operands[at] is None for operands, _ in calls} == {True, False}, name
    assert set(op.updates.values()) <= set(op.operands)
    for _, attrs in calls:
        roles = op.roles(attrs)
        assert len(set(roles)) == len(roles)
        assert set(op.updates) <= set(roles)


@every_op
def test_examples_follow_their_seed(op: Op) -> None:
    first, again, other = op.example_calls(1), op.example_calls(1), op.example_calls(2)
    for (a, a_attrs), (b, b_attrs) in zip(first, again, strict=True):
        assert a_attrs == b_attrs
        assert_bits_equal(a, b)
    flat = [[bits(t) for operands, _ in calls for t in operands if t is not None] for calls in (first, other)]
    assert any(not torch.equal(a, b) for a, b in zip(*flat, strict=True))


@cases
def test_inferred_types_are_those_of_the_reference(op: Op, operands: Operands, attrs: Attrs) -> None:
    results = as_tuple(op.functional(*operands, **attrs))
    assert types(results) == op.infer_types(types(operands), attrs)
    assert len(results) == len(op.roles(attrs))


@cases
def test_dispatcher_runs_the_reference(op: Op, operands: Operands, attrs: Attrs) -> None:
    assert_bits_equal(as_tuple(op(*operands, **attrs)), as_tuple(op.functional(*operands, **attrs)))


@cases
def test_meta_kernel(op: Op, operands: Operands, attrs: Attrs) -> None:
    results = as_tuple(op(*(None if t is None else t.to("meta") for t in operands), **attrs))
    assert {t.device.type for t in results} == {"meta"}
    assert types(results) == op.infer_types(types(operands), attrs)


@cases
def test_torch_accepts_the_registration(op: Op, operands: Operands, attrs: Attrs) -> None:
    """Schema, and fake tensors with the strides and the aliasing of real ones."""
    tests = ["test_faketensor"]
    if not any(t is not None and t.itemsize == 1 and t.is_floating_point() for t in operands):
        tests.append("test_schema")  # it multiplies operands, which torch cannot for 8-bit floats
    torch.library.opcheck(op.target, operands, attrs, test_utils=tests)


@cases
def test_pure(op: Op, operands: Operands, attrs: Attrs) -> None:
    given = copies(operands)
    results = as_tuple(op.functional(*given, **attrs))
    assert_bits_equal(given, operands)
    owned = {t.untyped_storage().data_ptr() for t in given if t is not None}
    assert not owned & {t.untyped_storage().data_ptr() for t in results}
    assert_bits_equal(results, as_tuple(op.functional(*given, **attrs)))


@cases
def test_update_writes_its_state_in_place(op: Op, operands: Operands, attrs: Attrs) -> None:
    given = copies(operands)
    results = as_tuple(op.reference(*given, **attrs))
    assert_bits_equal(results, as_tuple(op.functional(*operands, **attrs)))
    updated = op.updated(attrs)
    for result, at in updated.items():
        assert results[result] is given[at]
    kept = [at for at in range(len(operands)) if at not in updated.values()]
    assert_bits_equal(tuple(given[at] for at in kept), tuple(operands[at] for at in kept))


@cases
def test_update_of_a_shared_state_copies_that_one(op: Op, operands: Operands, attrs: Attrs) -> None:
    for result, at in op.updated(attrs).items():
        given = copies(operands)
        results = as_tuple(op.run(frozenset({op.operands[at]}), *given, **attrs))
        assert results[result] is not given[at]
        assert_bits_equal((given[at],), (operands[at],))
        assert_bits_equal(results, as_tuple(op.functional(*operands, **attrs)))


@cases
def test_cost(op: Op, operands: Operands, attrs: Attrs) -> None:
    present = {n: t for n, t in zip(op.operands, types(operands), strict=True) if t is not None}
    produced = sum(t.nbytes for t in op.infer_types(types(operands), attrs))
    for context in CONTEXTS:
        cost = op.estimate(types(operands), attrs, context)
        assert cost.resident == {n: t.nbytes for n, t in present.items()}
        assert cost.reads.keys() == cost.resident.keys()
        assert all(0 <= amount <= cost.resident[n] for n, amount in cost.reads.items())
        assert 0 <= cost.writes <= produced
        assert cost.flops >= 0
        assert {type(n) for n in (*cost.reads.values(), cost.writes, cost.flops)} == {int}


def fixed_scales(op: Op, operands: Operands) -> set[str]:
    """Scales of an activation that are one row for all rows."""
    named = dict(zip(op.operands, operands, strict=True))
    return {n for n in ("fixed", "x_scale") if (t := named.get(n)) is not None and t.dim() == 1}


@cases
def test_rows_of_a_batch_do_not_touch_each_other(op: Op, operands: Operands, attrs: Attrs) -> None:
    """Each row alone gives what it gives in the batch; updates of state add up in any order."""
    shared = SHARED.get(op.name, set()) | fixed_scales(op, operands)
    assert shared <= set(op.operands)
    sizes = {
        t.shape[0] for n, t in zip(op.operands, operands, strict=True) if n not in shared and t is not None
    }
    assert len(sizes) == 1, "an operand without a batch axis belongs into SHARED"
    together = as_tuple(op.functional(*operands, **attrs))

    updated = op.updated(attrs)

    def alone(row: int, states: dict[int, Tensor | None]) -> tuple[Tensor, ...]:
        given = [
            t if t is None or n in shared else t[row : row + 1]
            for n, t in zip(op.operands, operands, strict=True)
        ]
        for at, state in states.items():
            given[at] = state
        return as_tuple(op.functional(*given, **attrs))

    rows = range(sizes.pop())
    states = {at: operands[at] for at in updated.values()}
    for row in reversed(rows):
        results = alone(row, states)
        states = {at: results[result] for result, at in updated.items()}
        for i, (got, want) in enumerate(zip(results, together, strict=True)):
            if i not in updated:
                assert_close(op, got, want[row : row + 1])
    for result, at in updated.items():
        assert_bits_equal((states[at],), (together[result],))


def test_batches_are_covered() -> None:
    """`test_rows_of_a_batch_do_not_touch_each_other` sees at least two rows of every op."""
    for op in OPS.values():
        batched = [i for i, n in enumerate(op.operands) if n not in SHARED.get(op.name, set())]
        assert max(operands[batched[0]].shape[0] for operands, _ in op.example_calls()) > 1, op.name


def refused(op: Op, operands: tuple[ValueType | None, ...], attrs: Attrs) -> bool:
    try:
        op.infer_types(operands, attrs)
    except TypeMismatch:
        return True
    return False


@cases
def test_operand_of_another_type_is_refused(op: Op, operands: Operands, attrs: Attrs) -> None:
    good = types(operands)
    offers = []
    for at, (name, type) in enumerate(zip(op.operands, good, strict=True)):
        if type is None:
            continue
        if name not in op.optional:
            offers.append((at, None))
        if (op.name, name) not in ANY_TYPE:
            integer = type.dtype in (DType.I32, DType.I64)
            offers.append((at, type.with_dtype(DType.F32 if integer else DType.I32)))
        offers.append((at, type.with_shape()))
    accepted = [
        f"{op.operands[at]}: {other} for {good[at]}"
        for at, other in offers
        if not refused(op, (*good[:at], other, *good[at + 1 :]), attrs)
    ]
    assert accepted == []


@pytest.mark.parametrize("op", [pytest.param(op, id=n) for n, op in OPS.items() if len(op.operands) > 1])
def test_every_operand_is_tied_to_the_others(op: Op) -> None:
    """With several operands, a change of some axis of any one of them is refused."""
    loose = {name for name in op.operands if (op.name, name) not in LOOSE}
    for operands, attrs in op.example_calls():
        good = types(operands)
        for at, (name, type) in enumerate(zip(op.operands, good, strict=True)):
            if type is None:
                continue
            for axis in range(len(type.shape)):
                shape = list(type.shape)
                shape[axis] *= 2
                if refused(op, (*good[:at], type.with_shape(*shape), *good[at + 1 :]), attrs):
                    loose.discard(name)
    assert loose == set()


@every_op
def test_wrong_number_of_operands_is_refused(op: Op) -> None:
    operands, attrs = op.example_calls()[0]
    for wrong in (types(operands)[:-1], (*types(operands), None)):
        with pytest.raises(TypeMismatch, match=f"{len(wrong)} operands where it takes {len(operands)}"):
            op.infer_types(wrong, attrs)


@every_op
def test_wrong_attributes_are_refused(op: Op) -> None:
    operands, attrs = op.example_calls()[0]
    with pytest.raises(TypeMismatch, match="unknown attributes"):
        op.infer_types(types(operands), {**attrs, "no_such_attribute": 1})
    for name, default in op.attrs.items():
        for value in ({}, object(), None if op.attr_types[name] in (int, float, str, bool) else "x"):
            with pytest.raises(TypeMismatch, match=f"attribute {name} cannot be"):
                op.infer_types(types(operands), {**attrs, name: value})
        if default is inspect.Parameter.empty:
            with pytest.raises(TypeMismatch, match=f"missing .*{name}"):
                op.infer_types(types(operands), {n: v for n, v in attrs.items() if n != name})


def test_attributes_in_canonical_form() -> None:
    rope = OPS["rope"]
    assert rope.given_attrs({"stride": 1, "inverse": True}) == {"inverse": True}
    assert list(rope.given_attrs({"stride": 4, "inverse": True})) == ["inverse", "stride"]
    assert rope.bind_attrs({}) == {"stride": 1, "inverse": False}
    eps = OPS["head_rms_norm"].given_attrs({"eps": 1})["eps"]
    assert isinstance(eps, float)


def test_an_int_is_no_bool_and_a_bool_no_number() -> None:
    operands, _ = OPS["rope"].example_calls()[0]
    for attrs in ({"inverse": 1}, {"stride": True}, {"stride": 1.0}):
        assert refused(OPS["rope"], types(operands), attrs)
    operands, _ = OPS["head_rms_norm"].example_calls()[0]
    assert refused(OPS["head_rms_norm"], types(operands), {"eps": True})


def test_the_worked_example_of_the_documentation(repo_root: Path, tmp_path: Path) -> None:
    """Registered by its own file alone, the op passes the tests of every op."""
    text = (repo_root / "docs/add-an-op.md").read_text()
    example, use = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "scale_rows.py").write_text(example)
    assert "ops.scale_rows(x, factor" in use
    tests = [str(Path(__file__)), str(Path(__file__).with_name("test_graph_text.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "scale_rows", "-k", "scale_rows", "-v", *tests],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "test_cost[scale_rows-1] PASSED" in done.stdout
    assert "test_every_op_is_read_back[scale_rows] PASSED" in done.stdout
