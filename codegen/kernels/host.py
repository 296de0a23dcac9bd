"""Kernels of the host target: one for every op, unfused and fused."""

from __future__ import annotations

from rewright.codegen.kernel import Call, KernelDef, Slot
from rewright.codegen.kernels.host_limits import matrices, supports
from rewright.codegen.kernels.host_workspace import WORKSPACE
from rewright.ir.op import registry
from rewright.ir.types import DType

TILES = "tile16"


def layouts(call: Call) -> dict[str, str]:
    """Matrices lie in tiles, and so do their scales where every row has its own (e2m1)."""
    wished = {}
    for name, type in matrices(call):
        wished[name] = TILES
        if type.dtype is DType.E2M1:
            wished[name.replace("weight", "scale") if name.startswith("weight") else f"s{name[1:]}"] = TILES
    if call.operand("fn") is not None:
        wished["fn"] = TILES
    found = {call.value(name): layout for name, layout in wished.items()}
    return {value: layout for value, layout in found.items() if value is not None and call.is_weight(value)}


def _kernel(op: str) -> KernelDef:
    return KernelDef(
        symbols=(f"host.{op}",),
        covers=(Slot((op,)),),
        supports=supports,
        layouts=layouts,
        workspace=WORKSPACE.get(op, lambda _: 0),
    )


KERNELS = tuple(_kernel(op) for op in registry())
