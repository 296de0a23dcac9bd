"""A graph as an ONNX model, to be looked at in ONNX viewers; no ONNX runtime has our ops.

Weights are graph inputs without data, so that the file stays small whatever the checkpoint's
size. Every value keeps its name; its doc_string holds what it is and its type in graph text. The
name of a result of the step stands in the metadata, since an ONNX output is named by its value.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from rewright.ir.errors import CompilerBug
from rewright.ir.graph import IR_VERSION, Graph, kind_of, name_of, operands_of, producer_of, type_of_value
from rewright.ir.op import op_of
from rewright.ir.subgraph import Subgraph, subgraph
from rewright.ir.types import DType, ValueType

if TYPE_CHECKING:  # onnx takes long to import and only this exporter needs it
    import onnx

DOMAIN = "rewright"
DOMAIN_VERSION = 1
# No operator of ai.onnx is used, but a model has to name a version: the one of the oldest format.
AI_ONNX_VERSION = 17
OLDEST_FORMAT = 8

# Element type, and the model format that introduced it. Only the formats that a graph's types need
# are asked for, so that an fp32 graph opens in old readers too.
_ELEMENT_TYPES = {
    DType.F64: ("DOUBLE", 3),
    DType.F32: ("FLOAT", 3),
    DType.BF16: ("BFLOAT16", 4),
    DType.F16: ("FLOAT16", 3),
    DType.F8E4M3: ("FLOAT8E4M3FN", 9),
    DType.E2M1: ("FLOAT4E2M1", 11),
    DType.E8M0: ("FLOAT8E8M0", 12),
    DType.I64: ("INT64", 3),
    DType.I32: ("INT32", 3),
    DType.BYTE: ("INT8", 3),
}


def graph_to_onnx(graph: Graph, *, module: str = "") -> onnx.ModelProto:
    """The graph, or one module's part of it, in the custom domain `rewright`.

    An element type that the installed onnx does not know yet is exported as UINT8 of the same
    logical shape. Attributes have their defaults filled in; booleans are integers.

    Raises:
        UsageError: there is no such module.
    """
    from onnx import helper

    part = subgraph(graph, module)
    outputs = _outputs(part)
    inputs = {name_of(v): _value_info(v) for v in (*part.leaves, *part.arriving)}
    body = helper.make_graph(
        [_node(node) for node in part.ops],
        name=graph.name,
        inputs=list(inputs.values()),
        outputs=[_value_info(value, roles) for value, roles in outputs.items()],
        value_info=[info for node in part.ops for info in _inner_values(node, {name_of(v) for v in outputs})],
    )
    model = helper.make_model(
        body,
        producer_name="rewright",
        ir_version=_format_version(part),
        opset_imports=[helper.make_opsetid(DOMAIN, DOMAIN_VERSION), helper.make_opsetid("", AI_ONNX_VERSION)],
    )
    helper.set_model_props(model, _metadata(graph, part))
    return model


def _outputs(part: Subgraph) -> dict[Node, list[str]]:
    """Output values and what each is; one value can be several things."""
    roles: dict[Node, list[str]] = {}
    for name, value in part.results.items():
        roles.setdefault(value, []).append(f"result {name}")
    for state, value in part.next_state.items():
        roles.setdefault(value, []).append(f"next {state}")
    for value in part.leaving:
        roles.setdefault(value, []).append("leaving")
    return roles


def _inner_values(node: Node, outputs: set[str]) -> list[onnx.ValueInfoProto]:
    """Types of an op's results, read or not, that are no graph outputs."""
    named = zip(node.meta["names"], node.meta["types"], strict=True)
    return [_typed(name, type, str(type)) for name, type in named if name not in outputs]


def _value_info(value: Node, roles: list[str] | None = None) -> onnx.ValueInfoProto:
    maker = kind_of(producer_of(value))
    what = ", ".join(roles) if roles else "arriving" if maker == "op" else maker
    return _typed(name_of(value), type_of_value(value), f"{what}: {type_of_value(value)}")


def _typed(name: str, type: ValueType, doc: str) -> onnx.ValueInfoProto:
    from onnx import helper

    return helper.make_tensor_value_info(name, _element_type(type.dtype), type.shape, doc_string=doc)


def _element_type(dtype: DType) -> int:
    from onnx import TensorProto

    return getattr(TensorProto, _ELEMENT_TYPES[dtype][0], TensorProto.UINT8)


def _format_version(part: Subgraph) -> int:
    """The oldest model format that has every element type of the part that this onnx has."""
    from onnx import TensorProto

    types = {t.dtype for node in (*part.leaves, *part.ops) for t in node.meta["types"]}
    types |= {type_of_value(v).dtype for v in part.arriving}
    known = [
        version for name, version in map(_ELEMENT_TYPES.__getitem__, types) if hasattr(TensorProto, name)
    ]
    return max(OLDEST_FORMAT, *known)


def _node(node: Node) -> onnx.NodeProto:
    from onnx import helper

    op, meta = op_of(node.target), node.meta
    made = helper.make_node(
        op.name,
        inputs=["" if v is None else name_of(v) for v in operands_of(node)],
        outputs=list(meta["names"]),
        name=meta["names"][0],
        domain=DOMAIN,
        doc_string=(meta["module"] or ".") + (f"  // {meta['rule']}" if meta["rule"] else ""),
    )
    for name, value in sorted(op.bind_attrs(dict(node.kwargs)).items()):
        if value is not None:
            made.attribute.append(_attribute(op.name, name, value))
    return made


def _attribute(op: str, name: str, value: Any) -> onnx.AttributeProto:
    from onnx import AttributeProto, helper

    if isinstance(value, int):  # bool included
        return helper.make_attribute(name, int(value), attr_type=AttributeProto.INT)
    if isinstance(value, float):
        return helper.make_attribute(name, value, attr_type=AttributeProto.FLOAT)
    if isinstance(value, str):
        return helper.make_attribute(name, value, attr_type=AttributeProto.STRING)
    if isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
        # The type is stated because an empty list has none.
        return helper.make_attribute(name, [int(v) for v in value], attr_type=AttributeProto.INTS)
    raise CompilerBug(f"op {op}: attribute {name}={value!r} has no ONNX type")


def _metadata(graph: Graph, part: Subgraph) -> dict[str, str]:
    """Header of the graph, and which output value is which result; values other than text are JSON."""

    def names(values: dict[str, Node]) -> str:
        return json.dumps({name: name_of(v) for name, v in values.items()}, sort_keys=True)

    return {
        "rewright.ir": str(IR_VERSION),
        "rewright.stage": graph.stage,
        "rewright.module": part.module,
        "rewright.results": names(part.results),
        "rewright.next_state": names(part.next_state),
        **{
            f"rewright.attrs.{name}": value if isinstance(value, str) else json.dumps(value)
            for name, value in sorted(graph.attrs.items())
        },
    }
