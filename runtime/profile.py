"""Where the time of a decode step goes: every launch by itself, grouped by stage."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from rewright.ir.errors import CompilerBug
from rewright.ir.launch_bytes import LaunchBytes, launch_bytes
from rewright.ir.plan import Plan
from rewright.ir.stages import stages_of
from rewright.runtime.bench import SEED, Case
from rewright.runtime.device import DeviceModel
from rewright.runtime.engine import Engine
from rewright.runtime.host import HostModel
from rewright.runtime.launch_clock import launch_marks
from rewright.runtime.model import Row


@dataclass(frozen=True, slots=True)
class Stage:
    """Launches of one kind.

    Attributes:
        name: as `ir/stages.py` calls it.
        count: launches of it in the step.
        us: of all of them, microseconds.
        bytes: read and written by all of them.
    """

    name: str
    count: int
    us: float
    bytes: int

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.us / 1e3


@dataclass(frozen=True)
class Profile:
    """A step that was run launch by launch.

    Attributes:
        case: what was measured; the step is the one in its middle.
        plan: the plan of the step.
        stages: stage of every launch.
        moved: bytes of every launch, with the experts that the step chose.
        marks: for each time that it ran when the first launch began and when each ended, microseconds.
        clock: what measured that, for people.
    """

    case: Case
    plan: Plan
    stages: tuple[str, ...]
    moved: tuple[LaunchBytes, ...]
    marks: tuple[tuple[float, ...], ...]
    clock: str

    @property
    def launch_us(self) -> list[float]:
        """Microseconds of every launch, median over the repetitions."""
        return [
            statistics.median(marks[at + 1] - marks[at] for marks in self.marks)
            for at in range(len(self.plan.launches))
        ]

    @property
    def typical(self) -> tuple[float, ...]:
        """The marks of the repetition that took the median time, or the next shorter."""
        ordered = sorted(self.marks, key=lambda marks: marks[-1])
        return ordered[(len(ordered) - 1) // 2]

    def by_stage(self) -> list[Stage]:
        """Stages, the one with most time first."""
        launch_us = self.launch_us
        found = []
        for name in dict.fromkeys(self.stages):
            places = [at for at, stage in enumerate(self.stages) if stage == name]
            us = sum(launch_us[at] for at in places)
            found.append(Stage(name, len(places), us, sum(self.moved[at].total for at in places)))
        return sorted(found, key=lambda stage: -stage.us)

    def to_json(self) -> dict[str, Any]:
        """Times in microseconds."""
        stages = self.by_stage()
        total = sum(stage.us for stage in stages)
        return {
            "case": self.case.name,
            "variant": self.plan.variant.name,
            "context": self.case.middle,
            "clock": self.clock,
            "launches": len(self.plan.launches),
            "us": total,
            "bytes": sum(moved.total for moved in self.moved),
            "stages": [
                {
                    "stage": stage.name,
                    "count": stage.count,
                    "us": stage.us,
                    "us_each": stage.us / stage.count,
                    "bytes": stage.bytes,
                    "gb_per_second": stage.gb_per_second,
                    "share": stage.us / total,
                }
                for stage in stages
            ],
        }


def profile(engine: Engine, case: Case, repeats: int) -> Profile:
    """Take the step in the middle of a decode apart: run it launch by launch, again and again.

    Args:
        engine: its slots hold what the case has left in them: it was run before.
        case: a decode.
        repeats: times that the step runs with the clock.
    """
    model = engine.model
    if not isinstance(model, DeviceModel | HostModel):
        raise CompilerBug("a profile of a model that has no launches")
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(engine.vocab_size, (case.batch,), generator=generator).tolist()
    step = model.open_step([Row((token,), case.middle - 1, slot) for slot, token in enumerate(tokens)])
    moved = launch_bytes(step.plan, case.middle, step.chosen_experts())
    marks = launch_marks(step, repeats)
    return Profile(
        case,
        step.plan,
        tuple(stages_of(step.plan)),
        tuple(moved),
        tuple(map(tuple, marks)),
        "device events" if step.arena.is_cuda else "wall clock",
    )
