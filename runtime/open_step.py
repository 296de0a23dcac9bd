"""A decode step that is run launch by launch, by whoever wants to look into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.ir.launch_bytes import routed_values
from rewright.ir.plan import Plan


@dataclass(frozen=True)
class OpenStep:
    """A step whose inputs are set. Nothing else may run on the model while it is in use.

    Attributes:
        plan: its plan.
        rows: sequences in it; the plan's batch may be larger.
        run: runs the launches [begin, end) of the plan; on a card on torch's current stream, and nothing is
            waited for.
        arena: u8, where its activations lie.
    """

    plan: Plan
    rows: int
    run: Callable[[int, int], None]
    arena: Tensor

    def chosen_experts(self) -> dict[str, float]:
        """Run the step once and count: by the name of each value with ids of chosen experts how many
        different ones its sequences have."""
        found: dict[str, float] = {}
        done = 0
        for at, name in routed_values(self.plan).items():
            place = self.plan.values[name]
            if place.space != "arena":  # it never leaves its kernel
                continue
            self.run(done, at + 1)
            done = at + 1
            ids = self.arena[place.offset : place.end].view(torch.int32).view(*place.type.shape)
            found[name] = float(ids[: self.rows].unique().numel())
        self.run(done, len(self.plan.launches))
        return found
