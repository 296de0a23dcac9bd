"""The targets that a model can be compiled for, each with its kernels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from rewright.codegen.kernel import KernelDef, abi_hash
from rewright.codegen.kernels import host, sm80
from rewright.codegen.kernels.sm80_limits import DECODE_ROWS
from rewright.ir.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A set of kernels.

    Attributes:
        name: as plans and manifests call it.
        description: one sentence for lists and help.
        kernels: every kernel; of several that a unit could begin, earlier ones are asked first.
        default_chunk: tokens of a prefill chunk where nobody says.
        most_tokens: tokens of one step, over all its sequences, that the kernels take; None for any number.
    """

    name: str
    description: str
    kernels: tuple[KernelDef, ...]
    default_chunk: int = 128
    most_tokens: int | None = None

    def chunk(self, chunk: int | None, max_batch: int) -> int:
        """Tokens of a prefill chunk: as given, or the default.

        Raises:
            UsageError: chunk or max_batch is more than the kernels take.
        """
        chunk = self.default_chunk if chunk is None else chunk
        if self.most_tokens is None:
            return chunk
        if chunk > self.most_tokens:
            raise UsageError(
                f"kernels of target {self.name} take at most {self.most_tokens} tokens a step, not {chunk}",
                where="--chunk",
                fix="leave it out: prefill in larger chunks comes with kernels of a later version",
            )
        if max_batch > self.most_tokens:
            raise UsageError(
                f"kernels of target {self.name} take at most {self.most_tokens} sequences, not {max_batch}",
                where="--max-batch",
                fix=f"choose at most {self.most_tokens}, or --target host",
            )
        return chunk

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
    "sm80": Target(
        "sm80",
        "CUDA for A100 and A800, SM80 features only",
        sm80.KERNELS,
        default_chunk=DECODE_ROWS,
        most_tokens=DECODE_ROWS,
    ),
}
