"""Choice of experts and their weights, and the gated activation between their products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rewright.ir.op import Call, Cost, Examples, Types, op, require
from rewright.ir.ops.state import require_batch
from rewright.ir.types import DType, ValueType


@op(outputs=("experts", "weights"))
def route(logits: Tensor, bias: Tensor, n_valid: Tensor, *, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Experts by score: f32[B,T,E], [E], i32[B] -> (i32[B,T,k], f32[B,T,k]).

    a = sqrt(softplus(logits)); the k largest a + bias are chosen (equal ones: lower id first), best
    first; weights are the unbiased a of the chosen over their sum, times scale. Rows from n_valid
    on choose nothing: ids -1, weights 0.
    """
    affinity = F.softplus(logits).sqrt()
    chosen = (affinity + bias.float()).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return _weigh(affinity, chosen, n_valid, scale)


@op(outputs=("experts", "weights"))
def route_hash(
    logits: Tensor, table: Tensor, tokens: Tensor, n_valid: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Experts by token id: f32[B,T,E], int[V,k], i32[B,T], i32[B] -> (i32[B,T,k], f32[B,T,k]).

    The table names the experts; weights as in `route`.
    """
    chosen = table[tokens.long().clamp(0, table.shape[0] - 1)].long()
    return _weigh(F.softplus(logits).sqrt(), chosen, n_valid, scale)


def _weigh(affinity: Tensor, chosen: Tensor, n_valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    picked = affinity.gather(-1, chosen)
    weights = picked / picked.sum(-1, keepdim=True) * scale
    masked = torch.arange(chosen.shape[1])[None, :, None] >= n_valid[:, None, None]
    return chosen.int().masked_fill(masked, -1), weights.masked_fill(masked, 0.0)


def _routed(logits: ValueType, k: int) -> Types:
    shape = (*logits.shape[:2], k)
    return ValueType(DType.I32, shape), ValueType(DType.F32, shape)


@route.infer
def _(logits: ValueType, bias: ValueType, n_valid: ValueType, *, k: int, scale: float) -> Types:
    require(logits.dtype is DType.F32 and len(logits.shape) == 3, f"logits are {logits}, not f32[B,T,E]")
    require(
        bias.dtype.is_float and bias.shape == logits.shape[2:], f"logits {logits} and bias {bias} disagree"
    )
    require(0 < k <= logits.shape[2], f"k = {k} of {logits.shape[2]} experts")
    require_batch(logits.shape[0], n_valid)
    return _routed(logits, k)


@route_hash.infer
def _(logits: ValueType, table: ValueType, tokens: ValueType, n_valid: ValueType, *, scale: float) -> Types:
    require(logits.dtype is DType.F32 and len(logits.shape) == 3, f"logits are {logits}, not f32[B,T,E]")
    require(table.dtype in (DType.I64, DType.I32) and len(table.shape) == 2, f"table is {table}")
    expected = ValueType(DType.I32, logits.shape[:2])
    require(tokens == expected, f"tokens {tokens} and logits {logits} disagree")
    require_batch(logits.shape[0], n_valid)
    return _routed(logits, table.shape[1])


@route_hash.cost
def _(call: Call) -> Cost:
    table, tokens = call.operands["table"], call.operands["tokens"]
    return call.cost(reads={"table": tokens.numel * table.nbytes // table.shape[0]})


@route.examples
def _(gen: Examples):
    logits = gen.randn(2, 3, 8, dtype=torch.float32)
    n_valid = torch.tensor([3, 1], dtype=torch.int32)
    yield (logits, gen.randn(8, dtype=torch.float32), n_valid), {"k": 2, "scale": 1.5}


@route_hash.examples
def _(gen: Examples):
    n_valid = torch.tensor([3, 1], dtype=torch.int32)
    table = gen.integers(0, 8, 11, 2, dtype=torch.int64)
    logits, tokens = gen.randn(2, 3, 8, dtype=torch.float32), gen.integers(0, 11, 2, 3)
    yield (logits, table, tokens, n_valid), {"scale": 1.5}


@op()
def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None, *, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) (* weight): [...,I] -> [...,I] of gate's dtype.

    fp32, rounded once. weights f32[...] are the routing weights, which enter here, before the down
    projection and its quantisation.
    """
    g = gate.float().clamp(max=limit)
    y = F.silu(g) * up.float().clamp(-limit, limit)
    if weights is not None:
        y = y * weights[..., None]
    return y.to(gate.dtype)


@swiglu.infer
def _(gate: ValueType, up: ValueType, weights: ValueType | None, *, limit: float) -> Types:
    require(gate == up and gate.dtype.is_float, f"gate {gate} and up {up} disagree")
    expected = ValueType(DType.F32, gate.shape[:-1])
    require(weights is None or weights == expected, f"weights {weights} do not fit {gate}")
    return (gate,)


@swiglu.cost
def _(call: Call) -> Cost:
    return call.cost(flops=6 * call.outputs[0].numel)


@swiglu.examples
def _(gen: Examples):
    yield (gen.randn(2, 3, 16, std=20.0), gen.randn(2, 3, 16, std=20.0), None), {"limit": 10.0}
    operands = (gen.randn(2, 3, 2, 16), gen.randn(2, 3, 2, 16), gen.randn(2, 3, 2, dtype=torch.float32))
    yield operands, {"limit": 10.0}
