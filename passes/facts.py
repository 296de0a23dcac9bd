"""What passes may know about the model beside the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rewright.ir.errors import UsageError
from rewright.ir.precision_plan import Precision
from rewright.ir.static_scales import StaticScales
from rewright.ir.types import ValueType

FoldWo = Literal["always", "auto", "never"]


def parse_fold_wo(text: str) -> FoldWo:
    """The choice called `text`; `UsageError` lists the choices."""
    for choice in get_args(FoldWo):
        if text == choice:
            return choice
    raise UsageError(
        f"cannot be {text!r}", where="--fold-wo", fix=f"choose one of {', '.join(get_args(FoldWo))}"
    )


@dataclass(frozen=True)
class Facts:
    """Of one model and one set of options.

    Attributes:
        model: the configuration, as `config.json` spells it.
        numerics: faithful, bf16 or fp32.
        weights: type of every weight and constant by name.
        fold_wo: whether wo_a and wo_b become one matrix.
        precision: modules whose precision a plan changes.
        static_scales: calibrated scales of activations; None leaves them to be found as the model runs.
    """

    model: Mapping[str, Any]
    numerics: str
    weights: Mapping[str, ValueType] = field(default_factory=dict)
    fold_wo: FoldWo = "auto"
    precision: Precision = field(default_factory=Precision)
    static_scales: StaticScales | None = None

    def is_scaled(self, path: str) -> bool:
        """Whether the matrix at a path is stored in blocks with scales."""
        return f"{path}.scale" in self.weights
