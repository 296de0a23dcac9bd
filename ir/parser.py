"""Graph text -> graph."""

from __future__ import annotations

import json
import re
from typing import Any

from torch.fx import Node

from rewright.ir.errors import BadInput, CompilerBug
from rewright.ir.graph import IR_VERSION, STAGES, Graph
from rewright.ir.names import absolute
from rewright.ir.op import registry
from rewright.ir.types import ValueType, parse_type

_NAME = r"[^\s,().][^\s,()]*"
_LEAF = re.compile(rf"(constant )?@(\.?{_NAME}) : (\S+)")
_CALL = re.compile(r"(%.+?) : (\w+\[.*?\]) = (\w+)\((.*?)\)(?: (\{.*\}))?(?:  // (\S+))?")


def parse(text: str, where: str = "graph text") -> Graph:
    """Read graph text; `BadInput` names the line that cannot be read."""
    return _Parser(text, where).run()


class _Parser:
    def __init__(self, text: str, where: str):
        self.lines = text.split("\n")  # and not at the separators that strings may hold
        self.where = where
        self.line = 0
        self.heading = ""

    def run(self) -> Graph:
        graph = self._header()
        results: dict[str, Node] = {}
        states: dict[str, Node] = {}
        for number, line in enumerate(self.lines[3:], start=4):
            self.line = number
            try:
                self._line(graph, line, results, states)
            except (KeyError, ValueError, CompilerBug) as e:
                raise self._error(str(e) or type(e).__name__) from e
        if not results:
            raise self._error("the text ends without a return line")
        graph.finish(results, states)
        return graph

    def _header(self) -> Graph:
        if len(self.lines) < 3:
            raise self._error("not a graph: the three header lines are missing")
        head = re.fullmatch(r"graph (\S+?)(?: (\{.*\}))?", self.lines[0])
        stage = re.fullmatch(r"stage (\w+)", self.lines[1])
        version = re.fullmatch(r"ir (\d+)", self.lines[2])
        if head is None or stage is None or version is None or stage[1] not in STAGES:
            raise self._error("not a graph: the header does not read `graph NAME`, `stage STAGE`, `ir N`")
        if int(version[1]) != IR_VERSION:
            self.line = 3
            raise self._error(f"ir version {version[1]}; this Rewright reads {IR_VERSION}")
        try:
            attrs = _parse_attrs(head[2])
        except ValueError as e:
            raise self._error(str(e)) from e
        return Graph(head[1], stage=stage[1], attrs=attrs)

    def _line(self, graph: Graph, line: str, results: dict[str, Node], states: dict[str, Node]) -> None:
        if not line:
            return
        if not line.startswith("  "):
            self._top_level(graph, line, results, states)
            return
        body = line[2:]
        if call := _CALL.fullmatch(body):
            self._call(graph, call)
        elif leaf := _LEAF.fullmatch(body):
            kind = "constant" if leaf[1] else "weight"
            graph.leaf(kind, absolute(leaf[2], self.heading), parse_type(leaf[3]), self.heading)
        else:
            raise ValueError(f"neither a weight nor an op call: {body!r}")

    def _top_level(self, graph: Graph, line: str, results: dict[str, Node], states: dict[str, Node]) -> None:
        if m := re.fullmatch(rf"(input|state) %({_NAME}) : (\S+)", line):
            graph.leaf(m[1], m[2], parse_type(m[3]))
        elif m := re.fullmatch(rf"return ({_NAME}) = (%{_NAME})", line):
            self._output(results, m[1], self._value(graph, m[2], ""))
        elif m := re.fullmatch(rf"next %({_NAME}) = (%{_NAME})", line):
            self._output(states, m[1], self._value(graph, m[2], ""))
        elif m := re.fullmatch(rf"(\.|{_NAME}):", line):
            self.heading = "" if m[1] == "." else m[1]
        else:
            raise ValueError(f"cannot read {line!r}")

    @staticmethod
    def _output(outputs: dict[str, Node], name: str, value: Node) -> None:
        if name in outputs:
            raise ValueError(f"{name} is given twice")
        outputs[name] = value

    def _call(self, graph: Graph, call: re.Match[str]) -> None:
        names_text, types_text, op_name, operands_text, attrs_text, rule = call.groups()
        if op_name not in registry():
            raise ValueError(f"there is no op {op_name}")
        op = registry()[op_name]
        names = [self._name(t, self.heading) for t in names_text.split(", ")]
        operands = [self._operand(graph, t) for t in operands_text.split(", ")] if operands_text else []
        if len(operands) > len(op.operands):
            raise ValueError(f"{op_name} takes {len(op.operands)} operands, not {len(operands)}")
        operands += [None] * (len(op.operands) - len(operands))  # absent ones at the end are not printed
        node = graph.call(op, operands, _parse_attrs(attrs_text), names=names, module=self.heading, rule=rule)
        stated: list[ValueType] = [parse_type(t) for t in types_text.split(", ")]
        # What the text says stands, right or wrong; the verifier compares it with re-inference.
        if len(stated) != len(names):
            raise ValueError(f"{len(names)} names but {len(stated)} types")
        node.meta["types"] = tuple(stated)

    def _operand(self, graph: Graph, text: str) -> Node | None:
        return None if text == "_" else self._value(graph, text, self.heading)

    def _value(self, graph: Graph, text: str, heading: str) -> Node:
        name = self._name(text, heading)
        if name not in graph:
            raise ValueError(f"{name} is used before it is defined")
        return graph.value(name)

    @staticmethod
    def _name(text: str, heading: str) -> str:
        if not re.fullmatch(rf"[%@]\.?{_NAME}", text):
            raise ValueError(f"not a value name: {text!r}")
        return absolute(text[1:], heading)

    def _error(self, what: str) -> BadInput:
        return BadInput(what, where=f"{self.where}, line {max(self.line, 1)}")


def _parse_attrs(text: str | None) -> dict[str, Any]:
    """`{a=1, b="x"}` -> dict; values are JSON."""
    attrs: dict[str, Any] = {}
    if not text:
        return attrs
    decoder = json.JSONDecoder()
    body, at = text[1:-1], 0
    while at < len(body):
        key, equals, _ = body[at:].partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"attributes do not read as key=value: {text}")
        value, end = decoder.raw_decode(body, at + len(key) + 1)
        attrs[key] = value
        at = end
        if body[at : at + 2] == ", ":
            at += 2
        elif at < len(body):
            raise ValueError(f"attributes do not read as key=value: {text}")
    return attrs
