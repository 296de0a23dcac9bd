"""What the keys of a sequence take: bytes stored, bytes read by a decode step, and the same in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rewright.ir.graph import Graph, kind_of, name_of, operands_of, type_of_value
from rewright.ir.kv_format import RowFormat, row_bytes, rows_of
from rewright.ir.op import op_of
from rewright.ir.traffic import node_cost
from rewright.ir.types import ValueType

_PLAIN_BYTES = 2


@dataclass(frozen=True, slots=True)
class KeyMemory:
    """Bytes of one sequence in a model with packed keys or without.

    Attributes:
        context: tokens of the sequence.
        stored: rings of recent keys, entries and index keys for so many tokens.
        read: keys that one decode step reads at the end of them.
        plain_stored, plain_read: the same with bf16 keys.
        gained_context: tokens whose keys fit the `plain_stored` bytes; `context` where nothing is packed.
    """

    context: int
    stored: int
    read: int
    plain_stored: int
    plain_read: int
    gained_context: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def key_memory(graph: Graph, context: int) -> KeyMemory:
    """What the states of a decode graph of one token take.

    Args:
        graph: at any stage; its states are for `max_context` tokens each.
        context: tokens after the step, at most the variant's capacity.
    """
    sizes = {"fixed": [0, 0], "growing": [0, 0]}  # as stored, and in bf16
    for name, (type, packed) in dict(_states(graph)).items():
        growth = sizes["fixed" if name.endswith(".window") else "growing"]
        rows = type.numel // type.shape[-1] // type.shape[0]
        for at, size in enumerate((row_bytes(type), _plain_row(type, packed))):
            growth[at] += rows * size
    read = plain_read = 0
    for node in graph.ops:
        op, cost = op_of(node.target), node_cost(node, context)
        for operand, value in zip(op.operands, operands_of(node), strict=True):
            if f"{operand}_rows" not in op.attrs or value is None:
                continue
            type = type_of_value(value)
            read += cost.reads[operand]
            plain_read += (
                cost.reads[operand] // row_bytes(type) * _plain_row(type, rows_of(node.kwargs, operand))
            )
    longest = graph.attrs["max_context"]

    def stored(tokens: int, form: int) -> int:
        return sizes["fixed"][form] + sizes["growing"][form] * tokens // longest

    fixed, growing, room = sizes["fixed"][0], sizes["growing"][0], stored(context, 1)
    gained = (room - fixed) * longest // growing if growing else context
    return KeyMemory(context, stored(context, 0), read, room, plain_read, gained)


def _states(graph: Graph) -> Iterator[tuple[str, tuple[ValueType, RowFormat | None]]]:
    """States that hold keys, with the format that who reads or writes them says."""
    for node in graph.of_kind("state"):
        for user in (u for u in node.users if kind_of(u) == "op"):
            op = op_of(user.target)
            for operand, value in zip(op.operands, operands_of(user), strict=True):
                if value is node and f"{operand}_rows" in op.attrs and _holds_keys(name_of(node)):
                    yield name_of(node), (type_of_value(node), rows_of(user.kwargs, operand))


def _holds_keys(name: str) -> bool:
    """Whether a state holds keys, and not the rows that a compressor pools."""
    return name.endswith((".window", ".cache"))


def _plain_row(type: ValueType, packed: RowFormat | None) -> int:
    """Bytes of a row as bf16 values."""
    return row_bytes(type) if packed is None else _PLAIN_BYTES * packed.columns(row_bytes(type))


def render(memory: KeyMemory) -> str:
    """One or two lines."""
    at = f"keys of {memory.context:,} tokens"
    if memory.stored == memory.plain_stored:
        return f"{at}: {memory.stored:,} bytes, a decode step reads {memory.read:,}\n"
    return (
        f"{at}: {memory.stored:,} bytes ({memory.plain_stored:,} in bf16), "
        f"a decode step reads {memory.read:,} ({memory.plain_read:,} in bf16)\n"
        f"  the bytes of {memory.context:,} tokens in bf16 hold {memory.gained_context:,} tokens\n"
    )
