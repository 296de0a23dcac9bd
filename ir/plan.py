"""The plan of one variant: what codegen writes and the native runtime executes. docs/artifact.md.

A plan is JSON that people can read. Every value has a place in one of five spaces: `arena` (activations,
reused within a step), `state` (kept between steps; the next value of a state lies where the state lies),
`weight` (mapped from the artifact), `input` (tokens, pos, n_valid, slot of the step) and `kernel` (between
the parts of one launch, never in memory). A launch calls one kernel on values by name.
csrc/runtime/plan.cpp reads the same text and checks it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rewright.ir.layout import stored_bytes
from rewright.ir.types import ValueType, parse_type
from rewright.ir.variant import Variant

PLAN_FORMAT = 2
SPACES = ("arena", "state", "weight", "input", "kernel")
ALIGN = 128
"""Bytes to which every value in arena and state is aligned."""


def plan_path(variant: str) -> str:
    """Where the plan of a variant lies in the artifact."""
    return f"plan-{variant}.json"


def kernel_abi(signatures: Mapping[str, str]) -> str:
    """SHA-256 over the symbols and signatures of kernels: what a plan and a runtime must agree on."""
    lines = (f"{symbol} {signature}" for symbol, signature in sorted(signatures.items()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Type and place of one value.

    Attributes:
        type: its type.
        space: one of `SPACES`.
        offset: bytes from the start of the space; 0 for weights and inputs, which are found by name.
        layout: how a weight's elements are ordered (`ir/weight_layout.py`), or the form in which kernels
            hand an activation on (`ir/carried.py`); "" where row by row.
        bytes: of its memory, where the layout needs another number than the type.
    """

    type: ValueType
    space: str
    offset: int = 0
    layout: str = ""
    bytes: int | None = None

    @property
    def end(self) -> int:
        return self.offset + (stored_bytes(self.type) if self.bytes is None else self.bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """One op of a launch that computes several.

    Attributes:
        name: graph node, or part of one.
        op: the op.
        reads, writes: values by operand and by result; None where an optional operand is absent.
        attrs: attributes of the op, defaults filled in.
    """

    name: str
    op: str
    reads: tuple[str | None, ...]
    writes: tuple[str, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a kernel.

    Attributes:
        symbol: the kernel.
        phase: the phase it belongs to; phases of several launches have it in common.
        nodes: graph nodes, or parts of nodes (`node/part`), that it computes.
        reads: of one op values by operand, None where an optional one is absent; of several the values
            that come from outside.
        writes: of one op values by result; of several those that leave the launch.
        attrs: attributes of the op, defaults filled in; empty for several.
        workspace: offset in the arena and bytes of memory that it needs while it runs.
        parts: the ops of a launch that computes several, in order.
    """

    symbol: str
    phase: str
    nodes: tuple[str, ...]
    reads: tuple[str | None, ...]
    writes: tuple[str, ...]
    attrs: Mapping[str, Any]
    workspace: tuple[int, int] = (0, 0)
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What executes one variant.

    Attributes:
        target: set of kernels.
        abi: hash over the symbols and signatures of the target's kernels.
        variant: the variant.
        arena_bytes, state_bytes: sizes of the two spaces.
        values: place of every value by name.
        launches: in order of execution.
        results: value of every result of the step by the result's name.
        refusals: kernels that were asked and refused, by phase: [symbol, reason].
    """

    target: str
    abi: str
    variant: Variant
    arena_bytes: int
    state_bytes: int
    values: Mapping[str, Place]
    launches: tuple[Launch, ...]
    results: Mapping[str, str]
    refusals: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def to_text(self) -> str:
        """Canonical JSON, one value and one launch a line."""
        head = {
            "format": PLAN_FORMAT,
            "target": self.target,
            "abi": self.abi,
            "variant": self.variant.to_json(),
            "arena_bytes": self.arena_bytes,
            "state_bytes": self.state_bytes,
            "results": dict(self.results),
        }
        lines = [f"{_json(key)}: {_json(value)}" for key, value in head.items()]
        lines.append('"values": ' + _block("{", "}", (_value_line(n, p) for n, p in self.values.items())))
        lines.append('"launches": ' + _block("[", "]", map(_launch_line, self.launches)))
        refused = (f"{_json(phase)}: {_json(reasons)}" for phase, reasons in self.refusals.items())
        lines.append('"refusals": ' + _block("{", "}", refused))
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _block(opening: str, closing: str, lines: Iterable[str]) -> str:
    body = ",\n  ".join(lines)
    return f"{opening}\n  {body}\n{closing}" if body else opening + closing


def _value_line(name: str, place: Place) -> str:
    value: dict[str, Any] = {"type": str(place.type), "space": place.space}
    if place.space in ("arena", "state"):
        value["offset"] = place.offset
    if place.layout:
        value["layout"] = place.layout
    if place.bytes is not None:
        value["bytes"] = place.bytes
    return f"{_json(name)}: {_json(value)}"


def _launch_line(launch: Launch) -> str:
    value: dict[str, Any] = {
        "symbol": launch.symbol,
        "phase": launch.phase,
        "nodes": launch.nodes,
        "reads": launch.reads,
        "writes": launch.writes,
        "attrs": dict(launch.attrs),
        "workspace": launch.workspace,
    }
    if launch.parts:
        value["parts"] = [{**asdict(part), "attrs": dict(part.attrs)} for part in launch.parts]
    return _json(value)


def parse_plan(text: str) -> Plan:
    """Read `to_text` back. `ValueError`, `KeyError` or `TypeError` for anything else: an artifact's
    files are hashed, so a plan that cannot be read was not written by this version."""
    value = json.loads(text)
    if value["format"] != PLAN_FORMAT:
        raise ValueError(f"plan format {value['format']}, this Rewright reads {PLAN_FORMAT}")
    return Plan(
        target=value["target"],
        abi=value["abi"],
        variant=Variant(**value["variant"]),
        arena_bytes=value["arena_bytes"],
        state_bytes=value["state_bytes"],
        values={
            name: Place(
                parse_type(v["type"]), v["space"], v.get("offset", 0), v.get("layout", ""), v.get("bytes")
            )
            for name, v in value["values"].items()
        },
        launches=tuple(
            Launch(
                item["symbol"],
                item["phase"],
                tuple(item["nodes"]),
                tuple(item["reads"]),
                tuple(item["writes"]),
                item["attrs"],
                tuple(item["workspace"]),
                tuple(
                    Part(p["name"], p["op"], tuple(p["reads"]), tuple(p["writes"]), p["attrs"])
                    for p in item.get("parts", ())
                ),
            )
            for item in value["launches"]
        ),
        results=value["results"],
        refusals={p: tuple((s, r) for s, r in reasons) for p, reasons in value["refusals"].items()},
    )
