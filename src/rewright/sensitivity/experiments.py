"""Which modules are lowered, one experiment each, and what lowering them saves."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from rewright.frontend.config import ModelConfig
from rewright.ir.errors import UsageError
from rewright.ir.precision_plan import (
    FP4_BLOCK,
    HIGH,
    INDEXER,
    LOW,
    Adjustable,
    Precision,
    PrecisionPlan,
    kind_of_module,
)

ASPECTS = ("activations", "keys", "weights")
_ACTIVATION_BLOCK = 128
_KEY_BLOCK = 64
_INDEX_BLOCK = 32


@dataclass(frozen=True)
class Unit:
    """Modules that are lowered together in one aspect: one module, or all of a kind.

    Attributes:
        aspect: one of `ASPECTS`.
        name: the module's path, or the kind.
        modules: paths.
        saves: bytes of one decoded token that the lower precision does without.
    """

    aspect: str
    name: str
    modules: tuple[str, ...]
    saves: int

    @property
    def kind(self) -> str:
        return kind_of_module(self.modules[0])

    @property
    def is_kind(self) -> bool:
        return self.name == self.kind


def parse_aspects(text: str) -> tuple[str, ...]:
    """A list by comma; `UsageError` lists the aspects."""
    chosen = {part.strip() for part in text.split(",")}
    if unknown := sorted(chosen - set(ASPECTS)):
        raise UsageError(
            f"there is no aspect {unknown[0]!r}", where="--aspects", fix=f"choose of {', '.join(ASPECTS)}"
        )
    return tuple(a for a in ASPECTS if a in chosen)


def high(model: Adjustable, aspects: Collection[str]) -> Precision:
    """The reference: high in these aspects, in the others as the model was released."""

    def of(aspect: str) -> frozenset[str]:
        return frozenset(model.modules[aspect]) if aspect in aspects else frozenset()

    return Precision(of("activations"), of("keys"), frozenset())


def lowered(precision: Precision, units: Iterable[Unit]) -> Precision:
    """A precision with units lowered."""
    for unit in units:
        modules = frozenset(unit.modules)
        if unit.aspect == "activations":
            precision = replace(precision, high_activations=precision.high_activations - modules)
        elif unit.aspect == "keys":
            precision = replace(precision, high_keys=precision.high_keys - modules)
        else:
            precision = replace(precision, fp4_weights=precision.fp4_weights | modules)
    return precision


class Units:
    """Everything that can be lowered in a model.

    Args:
        model: what a plan can change.
        config: the model's configuration.
        context: tokens of context at which bytes are counted.
        aspects: those that are looked at.
    """

    def __init__(self, model: Adjustable, config: ModelConfig, context: int, aspects: Collection[str]):
        self._model, self._config, self._context = model, config, context
        self.modules = tuple(
            Unit(aspect, path, (path,), self._saves(aspect, path))
            for aspect in ASPECTS
            if aspect in aspects
            for path in model.modules[aspect]
            if aspect != "weights" or model.weights[f"{path}.weight"].shape[-1] % FP4_BLOCK == 0
        )

    def kinds(self) -> tuple[Unit, ...]:
        """All modules of a kind as one, for each aspect and kind."""
        groups: dict[tuple[str, str], list[Unit]] = {}
        for unit in self.modules:
            groups.setdefault((unit.aspect, unit.kind), []).append(unit)
        return tuple(
            Unit(aspect, kind, tuple(u.name for u in units), sum(u.saves for u in units))
            for (aspect, kind), units in groups.items()
        )

    def of(self, kind: Unit) -> tuple[Unit, ...]:
        """The modules of a kind, one by one."""
        return tuple(u for u in self.modules if u.aspect == kind.aspect and u.kind == kind.name)

    def _saves(self, aspect: str, path: str) -> int:
        if aspect == "activations":
            columns = self._model.weights[f"{path}.weight"].shape[-1]
            rows = self._config.num_experts_per_tok if path.endswith(".experts.w2") else 1
            return rows * (columns - columns // _ACTIVATION_BLOCK)
        if aspect == "weights":
            weight, scale = (self._model.weights[f"{path}.{part}"] for part in ("weight", "scale"))
            return weight.nbytes + scale.nbytes - weight.numel // 2 - weight.numel // FP4_BLOCK
        return self._key_bytes(path)

    def _key_bytes(self, path: str) -> int:
        """Of the rows that one token reads; those of an indexer are its keys, all of them."""
        c = self._config
        ratio = c.layer_ratio(int(path.split(".")[1]))
        entries = self._context // ratio if ratio else 0
        if path.endswith(INDEXER):
            saved = c.index_head_dim * 3 // 2 - c.index_head_dim // _INDEX_BLOCK
            return entries * saved
        read = min(entries, c.index_topk) if ratio == 4 else entries
        saved = c.nope_head_dim - c.nope_head_dim // _KEY_BLOCK
        return (min(c.sliding_window, self._context) + read) * saved


def expanded(kinds: Iterable[tuple[Unit, float]], units: Units, most: int | None) -> list[Unit]:
    """The kinds whose modules are measured one by one: the most sensitive ones of those that still fit.

    Args:
        kinds: kinds with the divergence that lowering each made.
        units: all that can be lowered.
        most: so many modules at most; None for all.
    """
    found: list[Unit] = []
    count = 0
    for kind, _ in sorted(kinds, key=lambda k: -k[1]):
        if most is None or count + len(kind.modules) <= most:
            found.append(kind)
            count += len(kind.modules)
    return found


def plan_with(
    model: Adjustable, aspects: Collection[str], units: Iterable[Unit], kept: Collection[Unit]
) -> PrecisionPlan:
    """The plan in which all units are low but those kept high; other aspects are left as released.

    What is in no unit (rows that no FP4 block fits) stays high.
    """
    low = {(u.aspect, path) for u in units if u not in kept for path in u.modules}
    kinds: dict[str, dict[str, str]] = {}
    modules: dict[str, dict[str, str]] = {}
    for aspect in aspects:
        for kind, paths in model.kinds(aspect).items():
            stay = [path for path in paths if (aspect, path) not in low]
            if len(stay) == len(paths):
                kinds.setdefault(kind, {})[aspect] = HIGH[aspect]
            else:
                for path in stay:
                    modules.setdefault(path, {})[aspect] = HIGH[aspect]
    return PrecisionPlan({aspect: LOW[aspect] for aspect in aspects}, kinds, modules)
