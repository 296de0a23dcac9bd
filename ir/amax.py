"""How often a graph looks for the largest magnitude of a block, to scale it before it is quantised."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from rewright.ir.compose import expand
from rewright.ir.graph import operands_of, type_of_value
from rewright.ir.op import Attrs, Op, op_of
from rewright.ir.types import ValueType

_DYNAMIC = "quantize"


def amax_reductions(nodes: Iterable[Node]) -> int:
    """Quantisations among op nodes, fused or not, whose scales are found as they run."""
    return sum(
        _reductions(
            op_of(node.target),
            tuple(None if v is None else type_of_value(v) for v in operands_of(node)),
            dict(node.kwargs),
        )
        for node in nodes
    )


def _reductions(op: Op, operands: tuple[ValueType | None, ...], attrs: Attrs) -> int:
    if op.composition is None:
        return int(op.name == _DYNAMIC)
    return sum(
        _reductions(part.op, part.operand_types, part.attrs) for part in expand(op, operands, attrs).parts
    )
