"""Precision plans: which modules keep more precision than others. docs/sensitivity.md, "The plan".

    [default]
    activations = "fp8"

    [kinds."attn.wo_b"]
    activations = "bf16"

    [modules."layers.3.attn"]
    keys = "bf16"

A kind is the path of a module without its layer. Of the values that fit a module the most specific wins.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewright.ir.errors import BadInput, Refused
from rewright.ir.types import DType, ValueType

HIGH = {"activations": "bf16", "keys": "bf16", "weights": "stored"}
"""What each key is called where nothing is lowered."""

LOW = {"activations": "fp8", "keys": "fp8", "weights": "fp4"}
"""And where it is. Keys of an indexer are called fp4 then, the format that they are rounded to."""

RELEASED = {"activations": "fp8", "keys": "fp8", "weights": "stored"}
"""What holds where a plan says nothing: the precision of the released model."""

FP4_BLOCK = 32
"""Columns of one row that share a scale."""

INDEXER = "indexer"
_TABLES = ("default", "kinds", "modules")
_ALWAYS_HIGH = {
    "gate": "the router",
    "embed": "the embedding",
    "head": "the head",
    "attn_sink": "the softmax of attention",
}


@dataclass(frozen=True)
class Precision:
    """A plan for one model: the modules whose precision differs from the released model's.

    Attributes:
        high_activations: linears whose activation is not quantised.
        high_keys: attention modules and indexers whose keys (and index queries) are not rounded.
        fp4_weights: linears whose FP8 matrix is stored as FP4.
    """

    high_activations: frozenset[str] = frozenset()
    high_keys: frozenset[str] = frozenset()
    fp4_weights: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.high_activations or self.high_keys or self.fp4_weights)

    def to_json(self) -> dict[str, list[str]]:
        """Sorted module paths under what is done to them."""
        return {
            "activations_bf16": sorted(self.high_activations),
            "keys_bf16": sorted(self.high_keys),
            "weights_fp4": sorted(self.fp4_weights),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Iterable[str]]) -> Precision:
        """What `to_json` made; `KeyError` if it did not."""
        return cls(
            frozenset(value["activations_bf16"]),
            frozenset(value["keys_bf16"]),
            frozenset(value["weights_fp4"]),
        )


@dataclass(frozen=True)
class Adjustable:
    """What a plan can change in a model.

    Attributes:
        modules: paths by key of the plan, in the order of layers.
        weights: type of every weight by name.
    """

    modules: Mapping[str, tuple[str, ...]]
    weights: Mapping[str, ValueType]

    @classmethod
    def of(cls, weights: Mapping[str, ValueType]) -> Adjustable:
        """What can be changed in a model with these weights, by name, as the checkpoint stores them.

        The activation of wo_a is never quantised, and routed experts are FP4 already or have one scale for
        a block of rows that no FP4 matrix has.
        """
        scaled = [name.removesuffix(".scale") for name in weights if name.endswith(".scale")]
        dense = [path for path in scaled if weights[f"{path}.weight"].dtype is DType.F8E4M3]
        attention = [n.removesuffix(".attn_sink") for n in weights if n.endswith(".attn_sink")]
        indexers = [n.removesuffix(".wq_b.weight") for n in weights if n.endswith(f".{INDEXER}.wq_b.weight")]
        found = {
            "activations": (path for path in scaled if not path.endswith(".wo_a")),
            "keys": (*attention, *indexers),
            "weights": (path for path in dense if len(weights[f"{path}.weight"].shape) == 2),
        }
        return cls({key: tuple(sorted(paths, key=_order)) for key, paths in found.items()}, weights)

    def kinds(self, key: str) -> dict[str, tuple[str, ...]]:
        """The modules of a key by kind, in the order of layers."""
        found: dict[str, list[str]] = {}
        for path in self.modules[key]:
            found.setdefault(kind_of_module(path), []).append(path)
        return {kind: tuple(paths) for kind, paths in found.items()}


@dataclass(frozen=True)
class PrecisionPlan:
    """The contents of a plan file.

    Attributes:
        default: value by key, for every module.
        kinds: value by key, by kind of module.
        modules: value by key, by path of a module.
        where: what errors call the file.
    """

    default: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    modules: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    where: str = field(default="the precision plan", compare=False)

    def to_text(self, comments: Iterable[str] = ()) -> str:
        """The file: `parse_plan_text` gives the plan back.

        Args:
            comments: lines before it.
        """
        lines = [f"# {line}".rstrip() for line in comments]
        tables = [("default", self.default)] if self.default else []
        for table, entries in (("kinds", self.kinds), ("modules", self.modules)):
            tables += [(f"{table}.{json.dumps(name)}", entries[name]) for name in sorted(entries, key=_order)]
        for name, values in tables:
            lines += ["", f"[{name}]", *(f'{key} = "{values[key]}"' for key in sorted(values))]
        return "\n".join(lines).lstrip("\n") + "\n"

    def resolve(self, model: Adjustable) -> Precision:
        """The plan for a model.

        Raises:
            BadInput: a module or kind that the model does not have, or one that cannot be changed so.
            Refused: a matrix whose rows do not split into blocks of 32.
        """
        for table in ("kinds", "modules"):
            for name, values in getattr(self, table).items():
                for key in values:
                    self._check(model, table, name, key)
        low = {key: self._low(model, key) for key in HIGH}
        for path in sorted(low["weights"]):
            columns = model.weights[f"{path}.weight"].shape[-1]
            if columns % FP4_BLOCK:
                raise Refused(
                    f"rows of {columns} elements do not split into FP4 blocks of {FP4_BLOCK}",
                    where=f"{self.where}, {path}",
                    fix='give it weights = "stored"',
                )
        return Precision(
            frozenset(model.modules["activations"]) - low["activations"],
            frozenset(model.modules["keys"]) - low["keys"],
            low["weights"],
        )

    def _low(self, model: Adjustable, key: str) -> frozenset[str]:
        """Modules that the plan lowers."""

        def value(path: str) -> str:
            of_kind = self.kinds.get(kind_of_module(path), {})
            given = self.default.get(key, RELEASED[key])
            return self.modules.get(path, {}).get(key, of_kind.get(key, given))

        return frozenset(path for path in model.modules[key] if value(path) != HIGH[key])

    def _check(self, model: Adjustable, table: str, name: str, key: str) -> None:
        """Refuse an entry that would change nothing, with the reason."""
        is_kind = table == "kinds"
        paths = set(model.kinds(key)) if is_kind else set(model.modules[key])
        if name in paths:
            return
        place = f'{self.where}, [{table}."{name}"]'
        everything = {p for found in model.modules.values() for p in found}
        known = {kind_of_module(p) for p in everything} if is_kind else everything
        stored = {kind_of_module(w) for w in model.weights} if is_kind else set(model.weights)
        if name in known:
            takes = [k for k, found in model.modules.items() if name in _names(found, is_kind)]
            raise BadInput(
                f"{key}: {_why_not(model, name, key)}", where=place, fix=f"it takes {' and '.join(takes)}"
            )
        if why := _always_high(name, stored):
            raise BadInput(f"{key}: {why} always stays in high precision", where=place, fix="leave it out")
        if any(w.startswith(f"{name}.") for w in stored):
            raise BadInput(
                f"{key}: nothing of it is quantised or rounded, so there is nothing to choose",
                where=place,
                fix="leave it out",
            )
        near = difflib.get_close_matches(name, sorted(known), n=3)
        what = "kind of module" if is_kind else "module"
        raise BadInput(
            f"the model has no such {what}",
            where=place,
            fix=f"did you mean {' or '.join(near)}" if near else f"for example {min(known, default='none')}",
        )


def kind_of_module(path: str) -> str:
    """A path without its layer: `attn.wq_b` of `layers.3.attn.wq_b`."""
    parts = path.split(".")
    return ".".join(parts[2:]) if parts[0] == "layers" and len(parts) > 2 else path


def owner_of_keys(module: str) -> str:
    """The attention module or indexer that a rounding within `module` belongs to.

    Those of a compressor are keys of what it compresses for.
    """
    return module.removesuffix(".compressor")


def read_plan(path: Path) -> PrecisionPlan:
    """Read a plan file; `BadInput` names the file and the key that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the path") from e
    except UnicodeDecodeError as e:
        raise BadInput(f"not UTF-8 text ({e.reason} at byte {e.start})", where=str(path)) from e
    return parse_plan_text(text, str(path))


def parse_plan_text(text: str, where: str) -> PrecisionPlan:
    """Read a plan; `BadInput` names the key that is wrong. What a model has is asked by `resolve`."""
    try:
        value = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise BadInput(f"not valid TOML ({e})", where=where, fix="docs/sensitivity.md has an example") from e
    for name, table in value.items():
        if name not in _TABLES:
            raise BadInput(f"unknown key {name!r}", where=where, fix=f"tables: {', '.join(_TABLES)}")
        if not isinstance(table, dict):
            raise BadInput(f"{name} is not a table", where=where, fix=f"write [{name}]")
    named = {t: dict(_entries(value.get(t, {}), t, where)) for t in ("kinds", "modules")}
    default = _values(value.get("default", {}), f"{where}, [default]", indexer=False)
    return PrecisionPlan(default, named["kinds"], named["modules"], where)


def _entries(table: Mapping[str, Any], kind: str, where: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name, values in table.items():
        place = f'{where}, [{kind}."{name}"]'
        if not isinstance(values, dict):
            raise BadInput(
                "is not a table of keys", where=place, fix=f'write [{kind}."{name}"] above its keys'
            )
        yield name, _values(values, place, indexer=name.rpartition(".")[2] == INDEXER)


def _values(table: Mapping[str, Any], where: str, *, indexer: bool) -> dict[str, str]:
    for key, value in table.items():
        if key not in HIGH:
            quoted = " (quote names that have dots in them)" if isinstance(value, dict) else ""
            raise BadInput(f"unknown key {key!r}{quoted}", where=where, fix=f"keys: {', '.join(HIGH)}")
        low = "fp4" if indexer and key == "keys" else LOW[key]
        if value not in (HIGH[key], low):
            raise BadInput(f"{key} cannot be {value!r}", where=where, fix=f'choose "{HIGH[key]}" or "{low}"')
    return dict(table)


def _names(paths: Iterable[str], kinds: bool) -> set[str]:
    return {kind_of_module(p) for p in paths} if kinds else set(paths)


def _why_not(model: Adjustable, name: str, key: str) -> str:
    if key == "keys":
        return "only attention modules and indexers have keys"
    if key == "weights":
        experts = [
            w for w in model.weights if w.endswith(f"{name}.weight") and len(model.weights[w].shape) == 3
        ]
        return "routed experts keep their stored format" if experts else "its weights are not stored as FP8"
    return "its activation is never quantised"


def _always_high(name: str, stored: set[str]) -> str | None:
    """What stays in high precision under a name that the model has."""
    if name not in stored and not any(w.startswith(f"{name}.") for w in stored):
        return None
    last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if last.startswith("hc_"):
        return "the mixing of Hyper-Connections"
    if last == "norm" or last.endswith("_norm"):
        return "a norm"
    return _ALWAYS_HIGH.get(last)


def _order(path: str) -> tuple[tuple[int, str], ...]:
    """Sorts layer 10 behind layer 9."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in path.split("."))
