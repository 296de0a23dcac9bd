"""What the kernels of a compiled model are compared with: torch in bf16 on dequantised weights."""

from __future__ import annotations

from torch import Tensor, bfloat16
from torch.fx import Node

from rewright.ir.formats import dequantize_weight
from rewright.ir.graph import Graph, kind_of, name_of, operands_of, type_of_value
from rewright.ir.op import op_of
from rewright.ir.types import DType
from rewright.ir.variant import Variant
from rewright.passes.eliminate_quant import PASS as ELIMINATE_QUANT
from rewright.passes.facts import Facts
from rewright.passes.manager import PassOptions, run_passes, weight_types_of
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.reference import ReferenceModel

# Operand that holds a weight's scale, by the operand that holds the weight.
_SCALES = {"weight": "scale", "w1": "s1", "w2": "s2", "w3": "s3"}


def eager_engine(artifact: Artifact) -> Engine:
    """An engine that runs the model op by op in torch: bf16 activations, weights dequantised to bf16
    before anything is measured, no quantisation of activations. What one writes without a compiler."""
    weights = artifact.weights_by_row()
    graphs: dict[Variant, Graph] = {}

    def graph_of(variant: Variant) -> Graph:
        if variant not in graphs:
            graphs[variant] = _in_bf16(artifact, artifact.graph(variant, "traced"), weights)
        return graphs[variant]

    return Engine(artifact, model=ReferenceModel(artifact, weights=weights, graph_of=graph_of))


def _in_bf16(artifact: Artifact, graph: Graph, weights: dict[str, Tensor]) -> Graph:
    """The traced graph without quantisation before products; dequantised weights join `weights`."""
    facts = Facts(dict(artifact.manifest.model), "bf16", weight_types_of(graph), "never")
    options = PassOptions(passes=(ELIMINATE_QUANT.name,), to=ELIMINATE_QUANT.stage)
    graph = run_passes(graph, facts, options).graph
    for node in graph.ops:
        for weight, scale in _SCALES.items():
            _dequantize(node, weight, scale, weights)
    for node in [n for n in graph.nodes if kind_of(n) == "weight" and not n.users]:
        graph.erase(node)
    return graph


def _dequantize(node: Node, weight: str, scale: str, weights: dict[str, Tensor]) -> None:
    op = op_of(node.target)
    if weight not in op.operands or scale not in op.operands:
        return
    at, scale_at = op.operands.index(weight), op.operands.index(scale)
    matrix, factors = operands_of(node)[at], operands_of(node)[scale_at]
    if matrix is None or factors is None or kind_of(matrix) != "weight":
        return
    name = name_of(matrix)
    if type_of_value(matrix).dtype is not DType.BF16:
        weights[name] = dequantize_weight(weights[name], weights[name_of(factors)]).to(bfloat16)
        matrix.meta["types"] = (type_of_value(matrix).with_dtype(DType.BF16),)
    operands = list(node.args)
    operands[scale_at] = None
    node.args = tuple(operands)
