"""The places of a graph where values are quantised."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of, type_of_value
from rewright.ir.op import op_of
from rewright.passes.match import Result
from rewright.passes.static_scales import sites_of

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Site:
    """One quantisation of a graph.

    Attributes:
        name: after the first linear that reads its codes, for example `layers.3.attn.wq_a.x`; on the path of
            attention after the rounded value, for example `layers.3.attn.kv`.
        readers: every name that it could have: one for each linear that reads it; none on the path of
            attention, where codes become values again.
        value: name of what is quantised.
        count: name of the value that tells how many rows of a sequence are there, if not all of them.
        fmt: e4m3 or e2m1.
        block: elements that share a scale in the released model.
        dims: columns [start, stop) that are quantised.
    """

    name: str
    readers: tuple[str, ...]
    value: str
    count: str | None
    fmt: str
    block: int
    dims: tuple[int, int]

    @property
    def columns(self) -> int:
        """Elements of a row that are quantised."""
        return self.dims[1] - self.dims[0]

    @property
    def layer(self) -> int:
        """Number of the layer, -1 outside of all."""
        match = _LAYER.fullmatch(self.name)
        return int(match[1]) if match else -1

    @property
    def kind(self) -> str:
        """The name without its layer: what sites of several layers have in common."""
        match = _LAYER.fullmatch(self.name)
        return match[2] if match else self.name


def find_sites(graph: Graph) -> list[Site]:
    """Every `quantize` of a graph before any fusion, in order."""
    return [_site(node) for node in graph.ops if op_of(node.target).name == "quantize"]


def _site(node: Node) -> Site:
    x = operands_of(node)[0]
    assert x is not None
    attrs = op_of(node.target).bind_attrs(dict(node.kwargs))
    start, stop = attrs["dims"] or (0, type_of_value(x).shape[-1])
    readers = tuple(dict.fromkeys(sites_of(Result(node, 0))))
    name = readers[0] if readers else node.meta["names"][0].removesuffix(".codes")
    return Site(name, readers, name_of(x), _count(x), attrs["fmt"], attrs["block"], (start, stop))


def _count(x: Node) -> str | None:
    """The count of finished entries that a value is made of: rows beyond it hold anything."""
    node = producer_of(x)
    while kind_of(node) == "op":
        op = op_of(node.target)
        if op.name == "compress":
            return node.meta["names"][1]
        first = operands_of(node)[0]
        if op.name not in ("rms_norm", "rope", "hadamard") or first is None:
            return None
        node = producer_of(first)
    return None
