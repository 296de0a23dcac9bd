"""Which target a model is compiled for: the one that was asked for, or what this machine runs."""

from __future__ import annotations

from rewright.codegen.targets import TARGETS, Target
from rewright.frontend.numerics import Numerics
from rewright.ir.errors import UsageError
from rewright.runtime.card import card_refusal


def choose_target(name: str, numerics: Numerics = Numerics.FAITHFUL) -> Target:
    """The target called `name`. "auto" is sm80 where this machine has a card that runs its kernels (which
    compute in no fp32 numerics), else host. `UsageError` for another name."""
    if name == "auto":
        name = "sm80" if numerics is not Numerics.FP32 and card_refusal() is None else "host"
    if name not in TARGETS:
        raise UsageError(f"there is no target {name!r}", where="--target", fix=f"auto, {', '.join(TARGETS)}")
    return TARGETS[name]
