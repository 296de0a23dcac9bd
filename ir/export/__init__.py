"""Graphs in the formats of other tools: JSON, Graphviz dot and ONNX."""

from rewright.ir.export.dot import graph_to_dot
from rewright.ir.export.json_graph import graph_to_json, json_text
from rewright.ir.export.onnx_graph import graph_to_onnx

__all__ = ["graph_to_dot", "graph_to_json", "graph_to_onnx", "json_text"]
