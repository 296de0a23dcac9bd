"""torch.fx tracing of the model's one step function into graphs with stable names."""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from rewright.frontend.layers import Step
from rewright.frontend.model import Model
from rewright.ir import op as op_module
from rewright.ir.errors import BadInput, RewrightError
from rewright.ir.graph import Graph, result_names
from rewright.ir.names import join
from rewright.ir.op import op_of
from rewright.ir.types import DType, ValueType, type_of
from rewright.ir.variant import Variant

INPUTS = ("tokens", "pos", "n_valid", "slot")


class ModelCodeError(BadInput):
    """The Python code of a model does something that a trace cannot record."""


def trace(model: Model, variant: Variant) -> Graph:
    """The graph of one variant of the model's step, at stage `traced`.

    Raises:
        ModelCodeError: the model's code branches on a traced value or turns one into a number;
            names file and line.
    """
    tracer = _Tracer(model, variant)
    try:
        recorded = tracer.trace(model)
    except RewrightError:
        raise
    except Exception as e:
        raise ModelCodeError(
            f"the model's Python code cannot be traced: {e}",
            where=_model_line(e),
            fix="keep positions and values in tensors: no branch, int(), len() or index on a traced value",
        ) from e
    return _to_graph(recorded, tracer, model, variant)


class _Tracer(torch.fx.Tracer):
    """Records ops whole, one placeholder a state tensor, weights by checkpoint name."""

    def __init__(self, model: Model, variant: Variant):
        super().__init__()
        self.variant = variant
        self.state_names = list(model.builder.states)
        self._parameter_names = {id(p): name for name, p in model.named_parameters()}
        self._weights: dict[str, torch.fx.Proxy] = {}
        self._headings = _headings(model)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        def placeholder(name: str) -> torch.fx.Proxy:
            return self.create_proxy("placeholder", name, (), {})

        v = self.variant
        step = Step(
            **{name: placeholder(name) for name in INPUTS},
            state={name: placeholder(name) for name in self.state_names},
            capacity=v.capacity,
            all_positions=v.all_positions,
        )
        return root_fn, [self.root, step]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self._parameter_names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in self._weights:
            self._weights[name] = self.create_proxy("get_attr", name, (), {})
        return self._weights[name]

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        path = self.scope.module_path
        node.meta["path"], node.meta["module"] = path, self._headings.get(path, "")
        node.meta["line"] = _calling_line()
        return node


def _headings(model: nn.Module) -> dict[str, str]:
    """The heading that each module's nodes stand under: its own path, or that around it if inline."""
    headings: dict[str, str] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        headings[path] = headings[parent] if getattr(module, "inline", False) else path
    return headings


def _to_graph(recorded: torch.fx.Graph, tracer: _Tracer, model: Model, variant: Variant) -> Graph:
    b = model.builder
    graph = Graph(
        variant.name,
        attrs={
            "model": "deepseek_v4",
            "numerics": b.numerics.value,
            "max_batch": b.limits.max_batch,
            "max_context": b.limits.max_context,
            **({} if b.kv.plain else {"kv": str(b.kv)}),
            **variant.to_json(),
        },
    )
    vector = ValueType(DType.I32, (variant.batch,))
    inputs = dict.fromkeys(INPUTS, vector) | {"tokens": ValueType(DType.I32, (variant.batch, variant.tokens))}
    parameters = dict(model.named_parameters())
    mapped: dict[Node, Node] = {}
    for node in recorded.nodes:
        if node.op == "placeholder":
            kind = "input" if node.target in inputs else "state"
            type = inputs[node.target] if kind == "input" else b.states[node.target]
            mapped[node] = graph.leaf(kind, node.target, type)
        elif node.op == "get_attr":
            kind = "constant" if node.target in b.constants else "weight"
            type = type_of(parameters[node.target].data)
            mapped[node] = graph.leaf(kind, node.target, type, node.meta["module"])
        elif node.op == "output":
            logits, states = node.args[0]
            graph.finish({"logits": mapped[logits]}, {name: mapped[v] for name, v in states.items()})
        elif isinstance(node.target, torch._ops.OpOverload) and not _nodes_in(node.kwargs.values()):
            op = op_of(node.target)
            base = join(node.meta["path"], node.meta["role"])
            names = result_names(op, base, node.kwargs)
            operands = [None if a is None else mapped[a] for a in node.args]
            mapped[node] = graph.call(op, operands, node.kwargs, names=names, module=node.meta["module"])
        elif node.target is operator.getitem and node.args[0] in mapped and isinstance(node.args[1], int):
            mapped[node] = graph.result(mapped[node.args[0]], node.args[1])
        else:
            raise ModelCodeError(
                f"{node.format_node()} is not a call of a graph op on values",
                where=node.meta["line"],
                fix="call rewright.ir.ops only",
            )
    return graph


def _nodes_in(values: Iterable[Any]) -> bool:
    """Whether a traced value is used as an attribute, alone or in a list."""
    return any(
        isinstance(v, Node)
        for value in values
        for v in (value if isinstance(value, (list, tuple)) else [value])
    )


def _model_line(error: BaseException) -> str:
    """File and line of the innermost frame of an error that belongs to a model's code."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if _is_model_code(f.filename)]
    return f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "the model"


def _calling_line() -> str:
    """File and line of a model's code that is being executed."""
    frame = sys._getframe(1)
    while frame is not None and not _is_model_code(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "the model"


_TORCH_FOLDER = str(Path(torch.__file__).parent)


def _is_model_code(file: str) -> bool:
    """Whether a frame's file is neither torch nor part of the tracer."""
    return not file.startswith(_TORCH_FOLDER) and file not in (__file__, op_module.__file__)
