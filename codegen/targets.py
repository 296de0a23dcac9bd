"""The targets that a model can be compiled for, each with its kernels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from rewright.codegen.kernel import KernelDef, abi_hash
from rewright.codegen.kernels import host, sm80
from rewright.ir.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A set of kernels.

    Attributes:
        name: as plans and manifests call it.
        description: one sentence for lists and help.
        kernels: every kernel; of several that a unit could begin, earlier ones are asked first.
    """

    name: str
    description: str
    kernels: tuple[KernelDef, ...]

    @cached_property
    def abi(self) -> str:
        """Hash over the kernels' symbols and signatures."""
        return abi_hash(self.kernels)

    @cached_property
    def _by_first_op(self) -> dict[str, list[KernelDef]]:
        found: defaultdict[str, list[KernelDef]] = defaultdict(list)
        for definition in self.kernels:
            for op in {op for slot in definition.covers[: definition.begins] for op in slot.ops}:
                found[op].append(definition)
        return found

    @cached_property
    def ops(self) -> frozenset[str]:
        """Names of the ops that some kernel takes whole."""
        return frozenset(op for k in self.kernels for slot in k.covers for op in slot.ops)

    def beginning_with(self, op: str) -> list[KernelDef]:
        """The kernels that a unit of this op can begin, in order."""
        return self._by_first_op.get(op, [])


TARGETS: dict[str, Target] = {
    "host": Target("host", "C++ for x86-64 and ARM CPUs, vectorised and threaded", host.KERNELS),
    "sm80": Target("sm80", "CUDA for A100 and A800, SM80 features only", sm80.KERNELS),
}

EXECUTABLE = ("host",)
"""Targets whose kernels exist in this version; of the others there are plans."""


def choose_target(name: str) -> Target:
    """The target called `name`; "auto" is what this machine can run. `UsageError` for another name."""
    if name == "auto":
        return TARGETS["host"]  # the only one that runs anything yet
    if name not in TARGETS:
        raise UsageError(f"there is no target {name!r}", where="--target", fix=f"auto, {', '.join(TARGETS)}")
    return TARGETS[name]
