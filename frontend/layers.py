"""Building blocks of the model that hold one weight: linears, norms, embedding, RoPE tables.

A module with `inline = True` opens no heading of its own in graph text; its nodes stand under the
module around it and are named after its path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rewright.frontend.config import ModelConfig
from rewright.frontend.kv_formats import PLAIN, KvFormats, Rounding
from rewright.frontend.numerics import Numerics
from rewright.frontend.storage import Format, Storage, scale_shape
from rewright.ir import ops
from rewright.ir.kv_format import RowFormat, state_rows
from rewright.ir.types import DType, ValueType
from rewright.ir.variant import Limits

Value = Any
"""A tensor (eager) or an fx proxy (traced)."""


@dataclass
class Builder:
    """What the modules need while they are built.

    Attributes:
        states: type of every state tensor by name, filled by the modules that own one.
        constants: names of tables made by the compiler.
        kv: how keys are stored.
    """

    config: ModelConfig
    storage: Storage
    numerics: Numerics
    limits: Limits
    states: dict[str, ValueType] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    kv: KvFormats = PLAIN

    @property
    def act(self) -> DType:
        return self.numerics.activation

    def state(self, name: str, dtype: DType, *shape: int) -> str:
        """Declare a state tensor of `shape` per slot; returns its name."""
        self.states[name] = ValueType(dtype, (self.limits.max_batch, *shape))
        return name

    def keys(self, name: str, packed: RowFormat | None, rows: int, dim: int) -> str:
        """Declare a state of `rows` keys of `dim` values per slot, packed or in the activation's dtype."""
        count = state_rows(rows, packed)
        if packed is None:
            return self.state(name, self.act, count, dim)
        return self.state(name, DType.BYTE, count, packed.row_bytes(dim))

    def tensor(self, name: str, shape: tuple[int, ...], release: DType) -> nn.Parameter:
        """A parameter without scale."""
        return parameter(self.storage.tensor(name, shape, release))


@dataclass
class Step:
    """Operands of one step that every layer reads.

    Attributes:
        tokens: i32[B,T].
        pos, n_valid, slot: i32[B].
        state: current value of every state by name; layers replace what they write.
        capacity: tokens of context that the variant reads at most.
        all_positions: whether logits of every position are wanted.
    """

    tokens: Value
    pos: Value
    n_valid: Value
    slot: Value
    state: dict[str, Value]
    capacity: int
    all_positions: bool


def parameter(type: ValueType) -> nn.Parameter:
    """A parameter of the given type without data."""
    return nn.Parameter(type.empty("meta"), requires_grad=False)


def round_trip(x: Value, numerics: Numerics, rounding: Rounding, name: str, stop: int | None = None) -> Value:
    """Quantise and dequantise, the rounding that the released model applies to keys.

    `stop` limits it to the leading dims. Without rounding in `numerics` x is returned.
    """
    if not numerics.rounds:
        return x
    fmt, block = rounding.fmt, rounding.block
    dims = None if stop is None else [0, stop]
    codes, scale = ops.quantize(x, fmt=fmt, block=block, dims=dims, name=f"{name}.codes")
    base = None if stop is None else x
    out = numerics.activation.text
    return ops.dequantize(codes, scale, base, block=block, out=out, dims=dims, name=f"{name}.rounded")


class Linear(nn.Module):
    """y = x W^T with the weight in any stored format.

    Where the weight has a scale the activation is quantised per 128 first, as the released model
    was trained.
    """

    inline = True

    def __init__(self, b: Builder, path: str, rows: int, cols: int):
        super().__init__()
        self.out = b.act.text
        self.weight, self.scale = matrix(b.storage.matrix(path, rows, cols), (rows, cols))
        self.quantizes = self.scale is not None
        if self.quantizes:
            b.storage.require_blocks(path, cols)

    def forward(self, x: Value) -> Value:
        x_scale = None
        if self.quantizes:
            x, x_scale = ops.quantize(x, fmt="e4m3", block=128, name="x")
        return ops.linear(x, x_scale, self.weight, self.scale, out=self.out, name="")


def matrix(format: Format, shape: tuple[int, ...]) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Parameters of a weight [..., rows, cols] and of its scale."""
    weight = parameter(ValueType(format.weight, shape))
    if format.scale is None:
        return weight, None
    return weight, parameter(ValueType(format.scale, scale_shape(format.weight, shape)))


class FloatLinear(nn.Module):
    """y = x W^T with a weight that every release stores as a float.

    Args:
        out: dtype of the result; f32 means that both operands are widened to fp32.
    """

    inline = True

    def __init__(self, b: Builder, path: str, rows: int, cols: int, out: DType):
        super().__init__()
        self.out = out.text
        self.weight = b.tensor(f"{path}.weight", (rows, cols), DType.BF16)

    def forward(self, x: Value) -> Value:
        return ops.linear(x, None, self.weight, None, out=self.out, name="")


class RMSNorm(nn.Module):
    """RMS norm of the last axis with a learned weight."""

    inline = True

    def __init__(self, b: Builder, path: str, size: int):
        super().__init__()
        self.eps = b.config.rms_norm_eps
        self.weight = b.tensor(f"{path}.weight", (size,), DType.BF16)

    def forward(self, x: Value) -> Value:
        return ops.rms_norm(x, self.weight, eps=self.eps, name="")


class Embedding(nn.Module):
    """Token embedding."""

    inline = True

    def __init__(self, b: Builder, path: str):
        super().__init__()
        self.out = b.act.text
        self.weight = b.tensor(f"{path}.weight", (b.config.vocab_size, b.config.hidden_size), DType.BF16)

    def forward(self, tokens: Value) -> Value:
        return ops.embed(tokens, self.weight, out=self.out, name="")


class RopeTable(nn.Module):
    """cos and sin by position, constants made by the compiler (`rope_tables.py`)."""

    inline = True

    def __init__(self, b: Builder, path: str):
        super().__init__()
        type = ValueType(DType.F32, (b.limits.max_context, b.config.qk_rope_head_dim // 2))
        self.cos, self.sin = parameter(type), parameter(type)
        b.constants |= {f"{path}.cos", f"{path}.sin"}

    def forward(self) -> tuple[Value, Value]:
        return self.cos, self.sin


def bind(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give the model's parameters data, to run it eagerly."""
    for name, tensor in weights.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
