"""The manifest of a compiled model: what codegen writes and the runtime reads. docs/artifact.md.

It holds nothing that differs between two compilations of the same input: no time, no path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rewright.ir.errors import BadInput
from rewright.ir.line_edits import SUFFIX
from rewright.ir.plan import plan_path
from rewright.ir.precision_plan import Precision
from rewright.ir.variant import PRECISIONS, Limits, Variant
from rewright.ir.weight_layout import LAYOUTS

FORMAT = 4
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
GENERATION_NAME = "generation_config.json"
CHAT_NAME = "chat.json"
PASSES_NAME = "passes.json"


def graph_path(stage: str, variant: str) -> str:
    """Where the text of a variant's graph lies in the artifact."""
    return f"graphs/{stage}/{variant}.txt"


def graph_file(stage: str, variant: Variant) -> str:
    """The file of a variant's graph: its text, or what differs from that of its base."""
    return graph_path(stage, variant.name) + (SUFFIX if variant.base else "")


def plan_file(variant: Variant) -> str:
    """The file of a variant's plan: its text, or what differs from that of its base."""
    return plan_path(variant.name) + (SUFFIX if variant.base else "")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file of the artifact."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that executing the model takes beside its weights.

    Attributes:
        arena_bytes: activations, of the variant that needs most.
        state_bytes: decode state of all slots.
    """

    arena_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of `manifest.json`.

    Attributes:
        model: the model's configuration, as `config.json` spells it.
        fingerprint: SHA-256 over the checkpoint's configuration and shard headers.
        target: set of kernels that its plans call.
        abi: hash over the target's kernels (`ir.plan.kernel_abi`).
        numerics: numerics mode.
        kv: how keys are stored, as `--kv` spells it.
        passes: names of the passes that ran, in order.
        fold_wo: whether wo_a and wo_b are one matrix.
        static_scales: SHA-256 of the calibrated scales of activations; empty if these are found as it runs.
        stages: stages of which graph texts are kept, of high variants the last one only; the plans are made
            of it.
        memory: what executing it takes.
        limits: context, batch and chunk it was compiled for.
        variants: graph file of every variant, by variant.
        tensors: shard file of every weight, by weight name.
        layouts: layout of every weight that does not lie row by row (`ir/weight_layout.py`).
        files: every other file of the artifact by relative path, the shards included.
        precision: modules whose precision a plan changed.
    """

    model: Mapping[str, Any]
    fingerprint: str
    target: str
    abi: str
    numerics: str
    kv: str
    passes: tuple[str, ...]
    fold_wo: bool
    static_scales: str
    stages: tuple[str, ...]
    memory: Memory
    limits: Limits
    variants: Mapping[Variant, str]
    tensors: Mapping[str, str]
    layouts: Mapping[str, str]
    files: Mapping[str, FileEntry]
    precision: Precision = field(default_factory=Precision)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those of its variants, the lower first."""
        return tuple(p for p in PRECISIONS if any(v.precision == p for v in self.variants))

    def to_text(self) -> str:
        """Canonical JSON."""
        limits = self.limits
        value = {
            "format": FORMAT,
            "model": dict(self.model),
            "checkpoint": {"fingerprint": self.fingerprint},
            "target": self.target,
            "abi": self.abi,
            "memory": {
                "arena_bytes": self.memory.arena_bytes,
                "state_bytes": self.memory.state_bytes,
            },
            "options": {
                "numerics": self.numerics,
                "kv": self.kv,
                "passes": list(self.passes),
                "fold_wo": self.fold_wo,
                "static_scales": self.static_scales,
                "precision": self.precision.to_json(),
                "max_context": limits.max_context,
                "max_batch": limits.max_batch,
                "chunk": limits.chunk,
            },
            "stages": list(self.stages),
            "variants": [
                {**v.to_json(), "precision": v.precision, "graph": path}
                for v, path in sorted(self.variants.items())
            ],
            "tensors": dict(self.tensors),
            "layouts": dict(self.layouts),
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in self.files.items()},
        }
        return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def parse_manifest(text: str, where: str) -> Manifest:
    """Read `manifest.json`; `BadInput` says what is wrong with it."""
    again = "compile the model again with this version of Rewright"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"not valid JSON ({e})", where=where, fix=again) from e
    version = value.get("format") if isinstance(value, dict) else None
    if version != FORMAT:
        raise BadInput(f"artifact format {version!r}; this Rewright reads {FORMAT}", where=where, fix=again)
    problem = _mismatch(value, _SHAPE, "the manifest") or _dangling(value)
    if problem:
        raise BadInput(problem, where=where, fix=again)
    options = value["options"]
    return Manifest(
        model=value["model"],
        fingerprint=value["checkpoint"]["fingerprint"],
        target=value["target"],
        abi=value["abi"],
        numerics=options["numerics"],
        kv=options["kv"],
        passes=tuple(options["passes"]),
        fold_wo=options["fold_wo"],
        static_scales=options["static_scales"],
        stages=tuple(value["stages"]),
        memory=Memory(value["memory"]["arena_bytes"], value["memory"]["state_bytes"]),
        limits=Limits(options["max_context"], options["max_batch"], options["chunk"]),
        variants={
            Variant(v["tokens"], v["batch"], v["capacity"], v["all_positions"], v["precision"]): v["graph"]
            for v in value["variants"]
        },
        tensors=value["tensors"],
        layouts=value["layouts"],
        files={name: FileEntry(f["bytes"], f["sha256"]) for name, f in value["files"].items()},
        precision=Precision.from_json(options["precision"]),
    )


_KINDS = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}

# A kind; a list of one shape; the shapes of known keys, "*" standing for every other one.
_SHAPE: dict[str, Any] = {
    "model": {"vocab_size": int, "bos_token_id": int, "eos_token_id": int},
    "checkpoint": {"fingerprint": str},
    "target": str,
    "abi": str,
    "memory": {"arena_bytes": int, "state_bytes": int},
    "stages": [str],
    "options": {
        "numerics": str,
        "kv": str,
        "passes": [str],
        "fold_wo": bool,
        "static_scales": str,
        "precision": {"activations_bf16": [str], "keys_bf16": [str], "weights_fp4": [str]},
        "max_context": int,
        "max_batch": int,
        "chunk": int,
    },
    "variants": [
        {
            "tokens": int,
            "batch": int,
            "capacity": int,
            "all_positions": bool,
            "precision": str,
            "graph": str,
        }
    ],
    "tensors": {"*": str},
    "layouts": {"*": str},
    "files": {"*": {"bytes": int, "sha256": str}},
}


def _mismatch(value: Any, shape: Any, at: str) -> str | None:
    """The first place where a JSON value does not have a shape."""
    kind = shape if isinstance(shape, type) else type(shape)
    if type(value) is not kind:
        return f"{at} is not {_KINDS[kind]}"
    if kind is int and value < 0:
        return f"{at} is negative"
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(shape, list):
        parts = [(v, shape[0], f"{at}[{i}]") for i, v in enumerate(value)]
    elif isinstance(shape, dict) and "*" in shape:
        parts = [(v, shape["*"], f"{at}: {key}") for key, v in value.items()]
    elif isinstance(shape, dict):
        if missing := [key for key in shape if key not in value]:
            return f"{at} has no {missing[0]}"
        parts = [(value[key], s, f"{at}: {key}") for key, s in shape.items()]
    return next((problem for part in parts if (problem := _mismatch(*part))), None)


def _dangling(value: dict[str, Any]) -> str | None:
    """A graph, a plan or a shard that is not among the files; a precision or a layout that is not known."""
    if not value["variants"]:
        return "it lists no variant"
    if not value["stages"]:
        return "it lists no stage"
    for i, v in enumerate(value["variants"]):
        if v["precision"] not in PRECISIONS:
            return f"the manifest: variants[{i}]: precision {v['precision']!r} is not known"
    variants = [
        Variant(v["tokens"], v["batch"], v["capacity"], v["all_positions"], v["precision"])
        for v in value["variants"]
    ]
    for variant in variants:
        if variant.base is not None and variant.base not in variants:
            return f"it lists {variant.name} without {variant.base.name}"
    named = [
        graph_file(stage, variant)
        for variant in variants
        for stage in (value["stages"][-1:] if variant.is_high else value["stages"])
    ]
    named += [plan_file(variant) for variant in variants]
    named += [v["graph"] for v in value["variants"]] + list(value["tensors"].values())
    for weight, layout in value["layouts"].items():
        if weight not in value["tensors"]:
            return f"{weight} has a layout and is not among its tensors"
        if layout not in LAYOUTS:
            return f"{weight} has a layout {layout!r} that is not known"
    return next((f"{name} is not among its files" for name in named if name not in value["files"]), None)
