"""Runs a plan one launch at a time beside the references of its ops.

What a launch reads is first set to what the references say, so that an error stays where it is made; what
it writes is then compared. The memory is the plan's own: places, forms and layouts are tested along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rewright.ir.carried import PARTIAL_BLOCKS, PARTIAL_COLUMNS
from rewright.ir.layout import pack, unpack
from rewright.ir.op import registry, results_of
from rewright.ir.plan import Launch, Part, Plan
from rewright.ir.weight_layout import LAYOUTS
from rewright.runtime import _native


@dataclass
class Written:
    """A value that a launch has written, beside what it should be."""

    launch: Launch
    name: str
    got: Tensor
    want: Tensor


class PlanSteps:
    """A plan with its memory.

    Args:
        plan: of the sm80 target.
        weights: as they lie in the artifact.
        device, where: as in `OneLaunch.run_on`.
    """

    def __init__(self, plan: Plan, weights: Mapping[str, Tensor], device: _native.Device, where: str):
        self.plan, self.device, self.where = plan, device, where
        self.weights = {
            name: weights[name].to(where) for name, p in plan.values.items() if p.space == "weight"
        }
        self.arena = torch.full((plan.arena_bytes,), 0xFF, dtype=torch.uint8, device=where)
        self.state = torch.full((plan.state_bytes,), 0xFF, dtype=torch.uint8, device=where)
        self.inputs = torch.zeros(
            plan.variant.batch * (plan.variant.tokens + 3), dtype=torch.int32, device=where
        )
        self.values: dict[str, Tensor] = {}
        self._last: dict[int, str] = {}  # value that was written last, by its offset in the arena

    def program(self, plan: Plan) -> _native.DeviceProgram:
        return _native.DeviceProgram(
            plan.to_text(),
            {n: (t.data_ptr(), t.numel() * t.element_size()) for n, t in self.weights.items()},
            (self.arena.data_ptr(), self.arena.numel()),
            (self.state.data_ptr(), self.state.numel()),
            self.inputs.data_ptr(),
            self.device,
        )

    def step(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, slot: Tensor) -> Iterator[Written]:
        """One step; yields what every launch has written. Launches without a kernel are only computed."""
        given = {"tokens": tokens, "pos": pos, "n_valid": n_valid, "slot": slot}
        self.inputs.copy_(torch.cat([t.flatten() for t in given.values()]))
        self.values |= {n: given[n] for n, p in self.plan.values.items() if p.space == "input"}
        kernels = _native.device_kernels()
        launches = list(self.plan.launches)
        at = 0
        while at < len(launches):
            group = [launches[at]]
            while at + len(group) < len(launches) and launches[at + len(group)].phase == group[0].phase:
                group.append(launches[at + len(group)])
            at += len(group)
            last = group[-1]
            before = {n: self.values[n].clone() for n in last.reads if n is not None and n in self.values}
            for name, tensor in before.items():
                self._put(name, tensor)
            self._compute(last)
            if all(launch.symbol in kernels for launch in group):
                self._poison(last)
                self.program(replace(self.plan, launches=tuple(group), results={})).run(self._stream())
                got = {name: self._get(name) for name in last.writes}
                reference = dict(self.values)
                self.values |= before
                want = self._compute(last, got)
                self.values = reference
                for name in last.writes:
                    yield Written(last, name, got[name], want[name])
            for name in last.writes:
                self._put(name, self.values[name])

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.where == "cuda" else 0

    def _compute(self, launch: Launch, got: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What the parts of a launch make, one after the other. Those behind a value that the launch has
        written read it as it is in `got`: bf16 that was rounded the other way is no error of theirs."""
        made: dict[str, Tensor] = {}
        parts = launch.parts or (
            Part(launch.phase, self._op_of(launch), launch.reads, launch.writes, launch.attrs),
        )
        for part in parts:
            op = registry()[part.op]
            operands = [None if n is None else self._operand(n).clone() for n in part.reads]
            for name, result in zip(
                part.writes, results_of(op.reference(*operands, **part.attrs)), strict=True
            ):
                made[name] = result
                self.values[name] = self._recent = got.get(name, result) if got else result
                place = self.plan.values[name]
                if place.space == "arena":
                    self._last[place.offset] = name
        return made

    def _op_of(self, launch: Launch) -> str:
        name = launch.symbol.removeprefix("sm80.")
        for suffix in ("_split", "_combine", "_score", "_topk"):
            if name not in registry() and name.endswith(suffix):
                name = name.removesuffix(suffix)
        return name

    def _operand(self, name: str) -> Tensor:
        if name in self.values:
            return self.values[name]
        place = self.plan.values[name]
        if place.space == "weight":
            return LAYOUTS[place.layout].unpack(self.weights[name].cpu())
        if place.space == "state":
            state = torch.zeros(place.type.shape, dtype=torch.float32).to(place.type.dtype.torch_dtype)
            self.values[name] = state
            self._put(name, state)
            return state
        alias = self._recent if place.space == "kernel" else self.values[self._last[place.offset]]
        return alias.view(place.type.storage_shape)

    def _memory(self, name: str) -> Tensor | None:
        place = self.plan.values[name]
        if place.space not in ("arena", "state"):
            return None
        return (self.arena if place.space == "arena" else self.state)[place.offset : place.end]

    def _poison(self, launch: Launch) -> None:
        for name in launch.writes:
            memory = self._memory(name)
            if memory is not None and self.plan.values[name].space == "arena" and name not in launch.reads:
                memory.fill_(0xFF)

    def _put(self, name: str, tensor: Tensor) -> None:
        memory, place = self._memory(name), self.plan.values[name]
        if memory is None:
            return
        if place.layout == "hc_partials":
            form = torch.zeros(PARTIAL_BLOCKS, tensor[..., 0].numel(), PARTIAL_COLUMNS)
            # All of it as the part of one block, with a mean square of 1 and no eps.
            form[5, :, : tensor.shape[-1]] = tensor.flatten(0, -2)
            form[0, :, 30] = 0.0
            form[:, :, 31] = self._count / PARTIAL_BLOCKS
            memory.copy_(form.view(torch.uint8).flatten())
            return
        memory.copy_(
            pack(
                tensor.contiguous().view(place.type.dtype.torch_dtype).view(place.type.storage_shape),
                place.type,
            )
        )

    _count = 1.0

    def _get(self, name: str) -> Tensor:
        memory, place = self._memory(name), self.plan.values[name]
        assert memory is not None
        data = memory.cpu()
        if place.layout == "hc_partials":
            form = data.view(torch.float32).view(PARTIAL_BLOCKS, -1, PARTIAL_COLUMNS).double().sum(0)
            scale = torch.rsqrt(form[:, 31:] / self._count + form[:, 30:31])
            return (form[:, : place.type.shape[-1]] * scale).float().view(place.type.shape)
        return unpack(data, place.type)

    def set_width(self, streams_times_dim: int) -> None:
        """n * D, the divisor of the mean square in mixing logits."""
        self._count = float(streams_times_dim)
