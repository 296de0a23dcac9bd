"""Mixture of experts: routing, the routed experts, the shared expert."""

from __future__ import annotations

from torch import nn

from rewright.frontend.layers import Builder, Linear, Step, Value, matrix
from rewright.ir import ops
from rewright.ir.types import DType


class Gate(nn.Module):
    """Expert ids i32[B,T,k] and weights f32[B,T,k], by score or, in the first layers, by token id."""

    inline = True

    def __init__(self, b: Builder, path: str, hashed: bool):
        super().__init__()
        c = b.config
        self.k, self.route_scale = c.num_experts_per_tok, c.routed_scaling_factor
        self.weight = b.tensor(f"{path}.weight", (c.n_routed_experts, c.hidden_size), DType.BF16)
        self.bias = self.tid2eid = None
        if hashed:
            self.tid2eid = b.tensor(f"{path}.tid2eid", (c.vocab_size, self.k), DType.I64)
        else:
            self.bias = b.tensor(f"{path}.bias", (c.n_routed_experts,), DType.F32)

    def forward(self, x: Value, step: Step) -> tuple[Value, Value]:
        logits = ops.linear(x, None, self.weight, None, out="f32", name="logits")
        if self.tid2eid is not None:
            return ops.route_hash(
                logits, self.tid2eid, step.tokens, step.n_valid, scale=self.route_scale, name=""
            )
        return ops.route(logits, self.bias, step.n_valid, k=self.k, scale=self.route_scale, name="")


class ExpertLinear(nn.Module):
    """One projection of all routed experts, a single virtual weight [E,N,K]."""

    inline = True

    def __init__(self, b: Builder, experts_path: str, name: str, rows: int, cols: int):
        super().__init__()
        self.out = b.act.text
        count = b.config.n_routed_experts
        format = b.storage.experts(experts_path, count, name, rows, cols)
        self.weight, self.scale = matrix(format, (count, rows, cols))
        self.quantizes = self.scale is not None
        if self.quantizes:
            b.storage.require_blocks(f"{experts_path}.{name}", cols)

    def forward(self, x: Value, experts: Value) -> Value:
        x_scale = None
        if self.quantizes:
            x, x_scale = ops.quantize(x, fmt="e4m3", block=128, name="x")
        return ops.expert_linear(x, x_scale, self.weight, self.scale, experts, out=self.out, name="")


class Experts(nn.Module):
    """The routed experts: [B,T,D] -> [B,T,k,D], scaled by the routing weights."""

    def __init__(self, b: Builder, path: str):
        super().__init__()
        c = b.config
        self.limit = c.swiglu_limit
        self.w1 = ExpertLinear(b, path, "w1", c.moe_intermediate_size, c.hidden_size)
        self.w2 = ExpertLinear(b, path, "w2", c.hidden_size, c.moe_intermediate_size)
        self.w3 = ExpertLinear(b, path, "w3", c.moe_intermediate_size, c.hidden_size)

    def forward(self, x: Value, experts: Value, weights: Value) -> Value:
        gate, up = self.w1(x, experts), self.w3(x, experts)
        return self.w2(ops.swiglu(gate, up, weights, limit=self.limit, name="hidden"), experts)


class SharedExpert(nn.Module):
    """The expert every token passes: [B,T,D] -> [B,T,D]."""

    def __init__(self, b: Builder, path: str):
        super().__init__()
        c = b.config
        self.limit = c.swiglu_limit
        self.w1 = Linear(b, f"{path}.w1", c.moe_intermediate_size, c.hidden_size)
        self.w2 = Linear(b, f"{path}.w2", c.hidden_size, c.moe_intermediate_size)
        self.w3 = Linear(b, f"{path}.w3", c.moe_intermediate_size, c.hidden_size)

    def forward(self, x: Value) -> Value:
        return self.w2(ops.swiglu(self.w1(x), self.w3(x), None, limit=self.limit, name="hidden"))


class MoE(nn.Module):
    """[B,T,D] -> [B,T,D]."""

    def __init__(self, b: Builder, path: str, hashed: bool):
        super().__init__()
        self.gate = Gate(b, f"{path}.gate", hashed)
        self.experts = Experts(b, f"{path}.experts")
        self.shared_experts = SharedExpert(b, f"{path}.shared_experts")

    def forward(self, x: Value, step: Step) -> Value:
        experts, weights = self.gate(x, step)
        routed = self.experts(x, experts, weights)
        return ops.expert_sum(routed, experts, self.shared_experts(x), name="y")
