"""Which examples of ops the kernels of target sm80 take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewright.ir.op import Op

Operands = Sequence[Tensor | None]


def takes(op: Op, operands: Operands) -> bool:
    """Neither halves, nor packed keys, nor calibrated scales of other blocks than the weights have."""
    return not (
        _has(torch.float16, operands) or has_packed_keys(op, operands) or has_other_blocks(op, operands)
    )


def has_packed_keys(op: Op, operands: Operands) -> bool:
    """Whether keys are rows of bytes."""
    del op
    return _has(torch.int8, operands)


def has_other_blocks(op: Op, operands: Operands) -> bool:
    """Whether calibrated scales of codes belong to other blocks than the 128 columns of the weights'."""
    named = dict(zip(op.operands, operands, strict=True))
    x, scale = named.get("x"), named.get("x_scale")
    return x is not None and scale is not None and scale.dim() == 1 and 128 * len(scale) != x.shape[-1]


def _has(dtype: torch.dtype, operands: Operands) -> bool:
    return any(t is not None and t.dtype == dtype for t in operands)
