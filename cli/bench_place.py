"""What a benchmark ran on: names for records and people, the rate that it is held to, the memory it took."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewright.runtime.engine import Engine
    from rewright.runtime.load import Artifact


@dataclass(frozen=True, slots=True)
class Place:
    """What executes a model.

    Attributes:
        names: for records: processor, cores, and vector and threads or card.
        text: for people.
    """

    names: dict[str, str | int]
    text: str


def describe(artifact: Artifact) -> dict[str, Any]:
    """Which model is measured, as a record has it: two models with the same values run the same work.

    `config` is the SHA-256 of the configuration, `checkpoint` the fingerprint of what was compiled, empty for
    random weights.
    """
    manifest = artifact.manifest
    config = json.dumps(dict(manifest.model), sort_keys=True)
    limits = manifest.limits
    return {
        "model": {
            "type": manifest.model["model_type"],
            "layers": manifest.model["num_hidden_layers"],
            "weight_bytes": artifact.weight_bytes,
            "config": hashlib.sha256(config.encode()).hexdigest(),
            "checkpoint": manifest.fingerprint,
        },
        "compiled_for": {
            "max_context": limits.max_context,
            "max_batch": limits.max_batch,
            "chunk": limits.chunk,
        },
    }


def place_of(engine: Engine, threads: int | None) -> Place:
    """What executes a model.

    Args:
        engine: the model.
        threads: of the host's kernels, as they were asked for.
    """
    from rewright.runtime import _native
    from rewright.runtime.device import DeviceModel
    from rewright.runtime.processor import processor_name
    from rewright.runtime.threads import thread_count

    names: dict[str, str | int] = {
        "processor": processor_name() or platform.machine(),
        "cores": os.cpu_count() or 0,
    }
    if isinstance(engine.model, DeviceModel):
        card = engine.model.card.name
        return Place({**names, "card": card}, card)
    count, vector = thread_count(threads), _native.vector_name()
    return Place({**names, "vector": vector, "threads": count}, f"{vector}, {count} threads")


def ceiling_of(engine: Engine, threads: int | None) -> float:
    """Bytes a second that what executes a model reads from its memory. Takes up to 1 GiB of it meanwhile."""
    from rewright.runtime.bench import card_bandwidth, read_bandwidth
    from rewright.runtime.device import DeviceModel
    from rewright.runtime.threads import thread_count

    if not isinstance(engine.model, DeviceModel):
        return read_bandwidth(thread_count(threads))
    card = engine.model.card
    return read_bandwidth(1) if card.emulated else card_bandwidth(card.where)


def begin_peak(engine: Engine) -> None:
    """On a card, let torch's peak begin here: what drawing or copying weights took is none of a step's."""
    import torch

    from rewright.runtime.device import DeviceModel

    if isinstance(engine.model, DeviceModel) and not engine.model.card.emulated:
        torch.cuda.reset_peak_memory_stats(engine.model.card.where)


def peak_memory(engine: Engine) -> dict[str, int | None]:
    """Bytes that a run took, as a record has them.

    `process`: the most that this process held since it began, imports and mapped weights included. On a card
    also `card_allocated` and `card_reserved`, torch's peaks since `begin_peak`, and `card_in_use`, what the
    driver counts as taken on the card now, by all programs and with what CUDA itself takes.
    """
    import torch

    from rewright.runtime.device import DeviceModel
    from rewright.runtime.memory import peak_bytes

    found: dict[str, int | None] = {"process": peak_bytes()}
    if isinstance(engine.model, DeviceModel) and not engine.model.card.emulated:
        where = engine.model.card.where
        free, total = torch.cuda.mem_get_info(where)
        found["card_allocated"] = torch.cuda.max_memory_allocated(where)
        found["card_reserved"] = torch.cuda.max_memory_reserved(where)
        found["card_in_use"] = total - free
    return found
