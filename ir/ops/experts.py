"""Products with the routed experts' weights, and the sum over experts."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.formats import dequantize_weight
from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.ops.linear import dense_activation, require_activation, require_weight
from rewright.ir.types import DType, ValueType, dtype_from_text


@op()
def expert_linear(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor | None, experts: Tensor, *, out: str
) -> Tensor:
    """Each token's product with the matrices of its experts -> out[B,T,k,N].

    Args:
        x: [B,T,K] shared by a token's experts, or [B,T,k,K] with one row per expert; float or e4m3.
        x_scale: as in `linear`.
        weight: [E,N,K] as stored: float, e4m3 (scale per 128 x 128) or packed e2m1 (per 1 x 32).
        scale: block scales of the weight.
        experts: i32[B,T,k] expert ids; -1 gives a row of zeros.
        out: dtype of the result.
    """
    values = dense_activation(x, x_scale)
    batch, tokens, k = experts.shape
    if values.dim() == 3:
        values = values[:, :, None, :].expand(batch, tokens, k, -1)
    ids = experts.flatten()
    rows = values.reshape(ids.numel(), -1)
    y = values.new_zeros(ids.numel(), weight.shape[1])
    for expert in torch.unique(ids[(ids >= 0) & (ids < weight.shape[0])]).tolist():
        mine = (ids == expert).nonzero().squeeze(1)
        matrix = dequantize_weight(weight[expert], None if scale is None else scale[expert])
        y[mine] = rows[mine] @ matrix.mT
    return y.view(batch, tokens, k, -1).to(dtype_from_text(out).torch_dtype)


@expert_linear.infer
def _(
    x: ValueType,
    x_scale: ValueType | None,
    weight: ValueType,
    scale: ValueType | None,
    experts: ValueType,
    *,
    out: str,
) -> Types:
    require_activation(x, x_scale)
    require_weight(weight, scale)
    require(experts.dtype is DType.I32 and len(experts.shape) == 3, f"experts is {experts}, not i32[B,T,k]")
    require(x.shape[:-1] in (experts.shape[:2], experts.shape), f"{x} and experts {experts} disagree")
    require(
        len(weight.shape) == 3 and weight.shape[2] == x.shape[-1], f"{x} and weight {weight} disagree on K"
    )
    return (ValueType(dtype_from_text(out), (*experts.shape, weight.shape[1])),)


def expected_experts(tokens: int, k: int, experts: int) -> float:
    """Distinct experts that `tokens` tokens reach, each choosing k of `experts` uniformly."""
    return experts * (1.0 - (1.0 - k / experts) ** tokens)


@expert_linear.cost
def _(call: Call) -> Cost:
    batch, tokens, k = call.operands["experts"].shape
    weight = call.operands["weight"]
    share = expected_experts(batch * tokens, k, weight.shape[0]) / weight.shape[0]
    reads = {n: round(share * call.operands[n].nbytes) for n in ("weight", "scale") if n in call.operands}
    return call.cost(reads=reads, flops=2 * call.outputs[0].numel * weight.shape[2])


@expert_linear.examples
def _(gen: Examples):
    experts = gen.integers(-1, 5, 2, 3, 2)
    fp4 = (gen.e2m1(5, 48, 128), gen.e8m0(5, 48, 4))
    yield (gen.e4m3(2, 3, 128), gen.e8m0(2, 3, 1), *fp4, experts), {"out": "bf16"}
    yield (gen.e4m3(2, 3, 128), gen.e8m0(1), *fp4, experts), {"out": "bf16"}
    yield (gen.e4m3(2, 3, 2, 128), gen.e8m0(2, 3, 2, 1), *fp4, experts), {"out": "bf16"}
    fp8 = (gen.e4m3(5, 48, 128), gen.e8m0(5, 1, 1))
    yield (gen.e4m3(2, 3, 128), gen.e8m0(2, 3, 1), *fp8, experts), {"out": "bf16"}
    f32 = torch.float32
    yield (
        (gen.randn(2, 3, 16, dtype=f32), None, gen.randn(5, 8, 16, dtype=f32), None, experts),
        {"out": "f32"},
    )


@op()
def expert_sum(routed: Tensor, experts: Tensor, shared: Tensor) -> Tensor:
    """Sum over a token's experts, plus the shared expert: [B,T,k,D], i32[B,T,k], [B,T,D] -> [B,T,D].

    fp32, in ascending expert id whatever the order of the list, the shared output last, rounded
    once to the dtype of `shared`.
    """
    order = experts.argsort(dim=-1, stable=True)
    rows = routed.float().gather(2, order[..., None].long().expand_as(routed))
    total = rows[:, :, 0]
    for i in range(1, rows.shape[2]):
        total = total + rows[:, :, i]
    return (total + shared.float()).to(shared.dtype)


@expert_sum.infer
def _(routed: ValueType, experts: ValueType, shared: ValueType) -> Types:
    require(routed.dtype.is_float and shared.dtype.is_float, f"{routed} or shared {shared} is not a float")
    require(experts.dtype is DType.I32 and len(experts.shape) == 3, f"experts is {experts}, not i32[B,T,k]")
    require(routed.shape[:-1] == experts.shape, f"{routed} and experts {experts} disagree")
    require(shared.shape == (*experts.shape[:2], routed.shape[-1]), f"{routed} and shared {shared} disagree")
    return (shared,)


@expert_sum.cost
def _(call: Call) -> Cost:
    return call.cost(flops=call.operands["routed"].numel + call.outputs[0].numel)


@expert_sum.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 4, 16), gen.integers(-1, 9, 2, 3, 4), gen.randn(2, 3, 16)), {}
