"""Where in a model a second one departs from it: errors of the residual streams, module by module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.reference import ReferenceModel

_STREAMS = re.compile(r"(?:(?P<layer>.+)\.hc_(?P<part>attn|ffn)\.)?streams")


@dataclass(frozen=True, slots=True)
class StreamError:
    """How far two runs differ around a module.

    Attributes:
        module: its path, for example layers.2.attn; embed writes the streams first, and head makes logits of
            them.
        before: norm of the difference of the streams that it reads, by the norm of the reference's.
        behind: the same of what it leaves.
    """

    module: str
    before: float
    behind: float

    @property
    def added(self) -> float:
        """What the module adds to the error. Errors travel on: behind a broken module all are large, so the
        largest one alone would not find it."""
        return self.behind - self.before


def module_of(value: str) -> str | None:
    """The module behind which a value is all that goes on, None for a value within one."""
    if value == "head":  # the logits
        return value
    match = _STREAMS.fullmatch(value)
    if match is None:
        return None
    return f"{match['layer']}.{match['part']}" if match["layer"] else "embed"


def stream_errors(
    artifact: Artifact, model: ReferenceModel, reference: ReferenceModel, ids: Sequence[int]
) -> list[StreamError]:
    """Errors of `model` against `reference` over a sequence, in the order in which modules run.

    Both must be of the same variants. A module of which either graph has no such value is left out.
    """
    theirs = _streams(artifact, reference, ids)
    ours = _streams(artifact, model, ids)
    errors: list[StreamError] = []
    before = 0.0
    for module, expected in theirs.items():
        if module not in ours:
            continue
        behind = float((ours[module] - expected).norm() / expected.norm().clamp_min(torch.finfo().tiny))
        errors.append(StreamError(module, before, behind))
        before = behind
    return errors


def _streams(artifact: Artifact, model: ReferenceModel, ids: Sequence[int]) -> dict[str, Tensor]:
    """f32 of what every module leaves, all positions one behind the other, by module."""
    found: dict[str, list[Tensor]] = {}

    def observe(name: str, value: Tensor) -> None:
        if (module := module_of(name)) is not None:
            found.setdefault(module, []).append(value.float().flatten())

    model.observe = observe
    try:
        Engine(artifact, model=model).score(0, ids)
    finally:
        model.observe = None
    return {module: torch.cat(parts) for module, parts in found.items()}
