"""A decode step of a model that was compiled in another way than usual."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewright.ir.launch_bytes import launch_bytes
from rewright.ir.plan import parse_plan
from rewright.runtime.bench import Case, measure
from rewright.runtime.device import DeviceModel
from rewright.runtime.engine import Engine
from rewright.runtime.model import choose_variant


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step of a case costs.

    Attributes:
        us: microseconds of a step, median over the repetitions.
        spread: (slowest - fastest) / median.
        launches: symbol and bytes of every launch of its plan, at the middle of the case.
    """

    us: float
    spread: float
    launches: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes that all launches read and write."""
        return sum(moved for _, moved in self.launches)


@dataclass(frozen=True, slots=True)
class Ablation:
    """A row: one way to compile.

    Attributes:
        name: for people.
        without: passes that were left out.
        graphs: whether a card's steps were recorded as CUDA graphs.
        steps: what the step of each case costs; none if it was refused.
        on_card: whether a card ran it.
        refusal: why it was not run.
    """

    name: str
    without: tuple[str, ...]
    graphs: bool
    steps: tuple[StepCost, ...]
    on_card: bool
    refusal: str | None = None

    @classmethod
    def refused(cls, name: str, without: Sequence[str], why: str) -> Ablation:
        return cls(name, tuple(without), True, (), False, why)

    def to_json(self, default: Ablation, cases: Sequence[Case]) -> dict[str, Any]:
        """A record; `ratio` is the time against the default's."""
        record: dict[str, Any] = {"name": self.name, "without": list(self.without), "graphs": self.graphs}
        if self.refusal is not None:
            return {**record, "refused": self.refusal}
        record["cases"] = [
            {
                "case": case.name,
                "us": step.us,
                "spread": step.spread,
                "ratio": step.us / usual.us,
                "launches": len(step.launches),
                "bytes": step.bytes,
                "same_launches": step.launches == usual.launches,
            }
            for case, step, usual in zip(cases, self.steps, default.steps, strict=True)
        ]
        return record


def measure_row(
    engine: Engine, name: str, without: Sequence[str], graphs: bool, cases: Sequence[Case], repeats: int
) -> Ablation:
    """Decode with a model.

    Args:
        engine: the model.
        name: of the row.
        without: passes that it was compiled without.
        graphs: whether a card's steps are recorded.
        cases: decodes.
        repeats: timed runs of each case.
    """
    steps = tuple(_step_cost(engine, case, repeats) for case in cases)
    model = engine.model
    on_card = isinstance(model, DeviceModel) and not model.card.emulated
    return Ablation(name, tuple(without), graphs, steps, on_card)


def _step_cost(engine: Engine, case: Case, repeats: int) -> StepCost:
    result = measure(engine, case, repeats)
    variant = choose_variant(engine.artifact.manifest.variants, case.batch, 1, case.middle, False)
    plan = parse_plan(engine.artifact.plan_text(variant))
    moved = launch_bytes(plan, case.middle)
    return StepCost(
        statistics.median(result.seconds) / case.new * 1e6,
        result.spread,
        tuple((launch.symbol, m.total) for launch, m in zip(plan.launches, moved, strict=True)),
    )
