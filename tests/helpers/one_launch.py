"""Runs one kernel on the operands of its op, through a plan of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rewright.codegen.kernel import Call
from rewright.codegen.kernels.sm80_layouts import matrix_layout
from rewright.codegen.targets import TARGETS
from rewright.codegen.units import Unit
from rewright.ir.layout import pack, padded, stored_bytes, unpack
from rewright.ir.op import Op, results_of
from rewright.ir.plan import ALIGN, Launch, Place, Plan
from rewright.ir.types import ValueType, type_of
from rewright.ir.variant import Variant
from rewright.ir.weight_layout import LAYOUTS
from rewright.runtime import _native

INPUTS = ("tokens", "pos", "n_valid", "slot")
WORKSPACE = 1 << 18
"""Bytes that are enough for every kernel on the examples of its op, unless its definition says more."""
POISON = 0xFF
"""Fills memory that holds nothing: NaN in every float format."""

# Operands of which each sequence of a step has its own part, by the first axis.
_PER_SEQUENCE = frozenset(
    {"x", "x_scale", "y", "residual", "streams", "before", "mix", "pre", "post", "comb", "gate", "up"}
    | {"weights", "logits", "tokens", "q", "kv", "indices", "rows", "entries", "count", "pos", "n_valid"}
    | {"slot", "routed", "experts", "shared", "scores"}
)
_VECTORS = ("pos", "n_valid", "slot", "count")
_MATRICES = ("weight", "w1", "w2", "w3", "fn")
_SCALES = {"scale": "weight", "s1": "w1", "s2": "w2", "s3": "w3"}


@dataclass(frozen=True)
class OneLaunch:
    """A plan of one launch, and the memory that it runs on.

    Attributes:
        plan: its results are called `result.0`, `result.1` and so on.
        weights: as they lie in an artifact.
        arena, state: memory of the plan, operands filled in.
        step: tokens, pos, n_valid and slot.
    """

    plan: Plan
    weights: dict[str, Tensor]
    arena: Tensor
    state: Tensor
    step: dict[str, Tensor]

    def program(self, text: str | None = None) -> _native.Program:
        """The plan, or another text in its place, bound to the memory."""
        return _native.Program(
            self.plan.to_text() if text is None else text,
            {name: (t.data_ptr(), t.numel() * t.element_size()) for name, t in self.weights.items()},
            (self.arena.data_ptr(), self.arena.numel()),
            (self.state.data_ptr(), self.state.numel()),
        )

    def run(self, threads: int = 1) -> tuple[Tensor, ...]:
        """The results of the launch on the host; what it updates, after it."""
        program = self.program()
        team = _native.Team(threads, program.scratch_bytes)
        program.run(team, *(self.step[name].data_ptr() for name in INPUTS))
        return self._results(self.arena, self.state)

    def run_on(self, device: _native.Device, where: str) -> tuple[Tensor, ...]:
        """The same on a card ("cuda"), or on its emulation ("cpu")."""
        inputs = torch.cat([self.step[name].flatten() for name in INPUTS]).to(where)
        weights = {name: t.to(where) for name, t in self.weights.items()}
        arena, state = self.arena.to(where), self.state.to(where)
        program = _native.DeviceProgram(
            self.plan.to_text(),
            {name: (t.data_ptr(), t.numel() * t.element_size()) for name, t in weights.items()},
            (arena.data_ptr(), arena.numel()),
            (state.data_ptr(), state.numel()),
            inputs.data_ptr(),
            device,
        )
        stream = torch.cuda.current_stream().cuda_stream if where == "cuda" else 0
        program.run(stream)
        return self._results(arena.cpu(), state.cpu())

    def _results(self, arena: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        places = [self.plan.values[name] for name in self.plan.results]
        spaces = {"arena": arena, "state": state}
        return tuple(unpack(spaces[p.space][p.offset : p.end].clone(), p.type) for p in places)


def run_op(
    op: Op, operands: Sequence[Tensor | None], attrs: dict[str, Any], *, threads: int = 1, pad: bool = False
) -> tuple[Tensor, ...]:
    """Results of `host.<op>`; arguments as for `one_launch`, and the threads of the team."""
    return one_launch(op, operands, attrs, pad=pad).run(threads)


def one_launch(
    op: Op,
    operands: Sequence[Tensor | None],
    attrs: dict[str, Any],
    *,
    pad: bool = False,
    target: str = "host",
    whole: bool = False,
) -> OneLaunch:
    """A call of the first kernel of a target that computes the op alone, one launch for each of its
    symbols. State operands are copied, not written.

    Args:
        pad: whether activations have padded rows.
        target: the set of kernels.
        whole: whether it must be `<target>.<op>`, one launch.
    """
    named = dict(zip(op.operands, operands, strict=True))
    batch, tokens = step_size(op, operands)
    step = {
        "tokens": torch.zeros(batch, tokens, dtype=torch.int32),
        "pos": torch.zeros(batch, dtype=torch.int32),
        "n_valid": torch.full((batch,), tokens, dtype=torch.int32),
        "slot": torch.arange(batch, dtype=torch.int32),
    }
    step |= {n: t.contiguous() for n, t in named.items() if n in step and t is not None}
    spaces = {"arena": _Space(), "state": _Space()}
    values: dict[str, Place] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if tensor is None:
            continue
        type = type_of(tensor)
        if name in INPUTS:
            values[name] = Place(type, "input")
        elif _is_stored(op, name):
            layout = _layout(op, named, name) if target == "host" else _device_layout(op, named, name)
            weights[name] = LAYOUTS[layout].pack(tensor.contiguous()).contiguous()
            values[name] = Place(type, "weight", 0, layout)
        else:
            space = "state" if name in op.updates.values() else "arena"
            laid = padded(type) if pad and space == "arena" and _can_pad(op, name, type) else type
            values[name] = Place(laid, space, spaces[space].add(pack(tensor, laid)))
    types = op.infer_types(tuple(None if t is None else type_of(t) for t in operands), attrs)
    updated = op.updated(attrs)
    writes = tuple(f"result.{i}" for i in range(len(types)))
    for i, (name, type) in enumerate(zip(writes, types, strict=True)):
        if i in updated:
            values[name] = values[op.operands[updated[i]]]
        else:
            laid = padded(type) if pad and len(type.shape) >= 3 else type
            values[name] = Place(laid, "arena", spaces["arena"].add(stored_bytes(laid)))
    reads = tuple(None if tensor is None else name for name, tensor in named.items())
    bound, variant = op.bind_attrs(attrs), Variant(tokens, batch, 1 << 20)
    unit = Unit(op.name, op, reads, writes, bound, op.name)
    kinds = dict.fromkeys(weights, "weight")
    call = Call((unit,), {name: place.type for name, place in values.items()}, kinds, variant)
    symbols, size = _kernel(target, call, whole)
    workspace = (spaces["arena"].add(size), size)
    launches = tuple(
        Launch(symbol, op.name, (op.name,), reads, writes if symbol == symbols[-1] else (), bound, workspace)
        for symbol in symbols
    )
    arena, state = spaces["arena"].memory(), spaces["state"].memory()
    plan = Plan(
        target=target,
        abi="",
        variant=variant,
        arena_bytes=arena.numel(),
        state_bytes=state.numel(),
        values=values,
        launches=launches,
        results={name: name for name in writes},
    )
    return OneLaunch(plan, weights, arena, state, step)


def _kernel(target: str, call: Call, whole: bool) -> tuple[tuple[str, ...], int]:
    """Symbols of a kernel for a call of one unit, and bytes of its workspace."""
    name = call.unit.op.name
    for kernel in TARGETS[target].kernels:
        if kernel.single and kernel.covers[0].ops == (name,) and (not whole or len(kernel.symbols) == 1):
            return kernel.symbols, kernel.workspace(call) or WORKSPACE
    return (f"{target}.{name}",), WORKSPACE


class _Space:
    """Memory that is laid out piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._size = 0

    def add(self, content: Tensor | int) -> int:
        """Append bytes, or that many poisoned ones; returns where they begin."""
        if isinstance(content, int):
            content = torch.full((content,), POISON, dtype=torch.uint8)
        start = self._size
        gap = torch.full((-len(content) % ALIGN,), POISON, dtype=torch.uint8)
        self._pieces += [content, gap]
        self._size += len(content) + len(gap)
        return start

    def memory(self) -> Tensor:
        """All of it, aligned to 64 bytes."""
        whole = torch.empty(self._size + 64, dtype=torch.uint8)
        start = -whole.data_ptr() % 64
        view = whole[start : start + self._size]
        if self._pieces:
            view.copy_(torch.cat(self._pieces))
        return view


def _is_matrix(name: str) -> bool:
    return name in _MATRICES or (name.startswith("weight") and name[6:].isdigit())


def _weight_of(name: str) -> str | None:
    """The weight whose scale an operand may be."""
    if name.startswith("scale") and name[5:].isdigit():
        return f"weight{name[5:]}"
    return _SCALES.get(name)


def _is_stored(op: Op, name: str) -> bool:
    """Whether an operand lies in the artifact: a weight, or the scale of one."""
    return _is_matrix(name) or _weight_of(name) in op.operands


def _layout(op: Op, named: dict[str, Tensor | None], name: str) -> str:
    """tile16 for matrices that products read, and for the scales of e2m1 ones."""
    tensor = named[name]
    if _is_matrix(name):
        table = name == "weight" and "tokens" in named  # an embedding is no matrix of a product
        return "tile16" if tensor is not None and tensor.dim() >= 2 and not table else ""
    weight = named.get(_weight_of(name) or "")
    return "tile16" if weight is not None and weight.dtype == torch.uint8 else ""


def _device_layout(op: Op, named: dict[str, Tensor | None], name: str) -> str:
    """What the kernels of a GPU want: fragments for the matrices of products and the scales of e2m1 ones."""
    if not op.name.endswith("linear"):
        return ""
    tensor, matrix = named[name], named.get(_weight_of(name) or name)
    assert tensor is not None
    assert matrix is not None
    layout = matrix_layout(type_of(matrix))
    return layout if matrix is tensor else "mma4_scale" if layout == "mma4" else ""


def _can_pad(op: Op, name: str, type: ValueType) -> bool:
    return name in _PER_SEQUENCE and name not in op.dense and len(type.shape) >= 3


def _per_sequence(op: Op, name: str, tensor: Tensor) -> bool:
    if name == "x_scale" and tensor.dim() == 1:
        return False  # calibrated: the same for all rows
    return name in _PER_SEQUENCE or (op.name == "dequantize" and name in ("codes", "scale", "base"))


def step_size(op: Op, operands: Sequence[Tensor | None]) -> tuple[int, int]:
    """Sequences and tokens of the step that a call belongs to."""
    named = zip(op.operands, operands, strict=True)
    mine = {n: t for n, t in named if t is not None and _per_sequence(op, n, t)}
    by_token = [t for n, t in mine.items() if t.dim() >= 3 or n == "tokens"]
    return next(iter(mine.values())).shape[0], by_token[0].shape[1] if by_token else 1


def reference_by_row(
    op: Op, operands: Sequence[Tensor | None], attrs: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Each result of the op's reference, run on one sequence at a time with its valid tokens only, as the
    reference runtime does, and a mask of its leading rows that are defined."""
    named = dict(zip(op.operands, operands, strict=True))
    mine = {n: t for n, t in named.items() if t is not None and _per_sequence(op, n, t)}
    batch, tokens = step_size(op, operands)
    n_valid = named.get("n_valid")
    counts = [tokens] * batch if n_valid is None else [min(int(n), tokens) for n in n_valid]
    state = {n: t.clone() for n, t in named.items() if t is not None and n in op.updates.values()}
    types = op.infer_types(tuple(None if t is None else type_of(t) for t in operands), attrs)
    found = [(t.empty(), torch.ones(t.shape[0], dtype=torch.bool)) for t in types]
    updated = op.updated(attrs)
    for b, count in enumerate(counts):
        if count == 0:
            for _, mask in found:
                mask[b : b + 1] = False
            continue
        given: dict[str, Tensor | None] = {**named, **state}
        for name, tensor in mine.items():
            row = tensor[b : b + 1]
            by_token = name not in _VECTORS and row.dim() >= 2 and row.shape[1] == tokens
            given[name] = row[:, :count] if by_token else row
        if n_valid is not None:
            given["n_valid"] = n_valid[b : b + 1].clamp(max=tokens)
        for i, result in enumerate(results_of(op.reference(*given.values(), **attrs))):
            if i in updated:
                continue
            whole = found[i][0]
            if result.dim() > 1 and result.shape[1] < whole.shape[1]:
                whole[b : b + 1] = torch.zeros(1, dtype=torch.float32).to(whole.dtype)
                whole[b, : result.shape[1]] = result[0]
            else:
                whole[b : b + 1] = result
    for i, operand in updated.items():
        after = state[op.operands[operand]]
        found[i] = (after, torch.ones(len(after), dtype=torch.bool))
    return found


def valid_rows(tensor: Tensor, operands: Sequence[Tensor | None], op: Op) -> Tensor:
    """A result with the rows of masked tokens set to zero, for comparisons."""
    n_valid = dict(zip(op.operands, operands, strict=True)).get("n_valid")
    if n_valid is None or tensor.dim() < 3 or tensor.shape[0] != len(n_valid):
        return tensor
    masked = torch.arange(tensor.shape[1])[None] >= n_valid[:, None]
    copy = tensor.clone()
    plain = copy.view(torch.uint8) if copy.element_size() == 1 else copy  # torch cannot index FP8
    plain[masked] = 0
    return plain
