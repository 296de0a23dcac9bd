"""A compiled model of one launch for target sm80: its logits are a stored vector, whatever it is fed."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rewright.ir.line_edits import edit_script
from rewright.ir.manifest import FileEntry, Manifest, Memory, graph_file, plan_file
from rewright.ir.plan import ALIGN, Launch, Place, Plan
from rewright.ir.types import DType, ValueType
from rewright.ir.variant import Limits, Variant
from rewright.runtime.load import Artifact

SHARD = "weights.safetensors"
LIMITS = Limits(max_context=256, max_batch=3, chunk=8)
CAPACITIES = (128, 256)
NORMS = {"low": ("norm.weight", 3.0), "high": ("norm.high", -2.0)}
"""Name and value of the norm's weight, by precision."""


def constant_artifact(
    folder: Path, vocabulary: int = 96, *, seed: int = 0, state_bytes: int = 1024, high: bool = False
) -> Artifact:
    """An artifact in `folder` whose every step gives logits of a row of their own for each place in the
    batch (the last of them with NaN at token 5 if seed is negative), normed by an `rms_norm` of weight 3, in
    high variants, if there are any, of weight -2."""
    generator = torch.Generator().manual_seed(abs(seed))
    rows = torch.randn(LIMITS.max_batch * LIMITS.chunk, vocabulary, generator=generator)
    if seed < 0:
        rows[:, 5] = torch.nan
    weights = {"rows": rows, **{name: torch.full((vocabulary,), w) for name, w in NORMS.values()}}
    save_file({**weights, **{f"rows{n}": rows[:n].clone() for n in range(1, len(rows))}}, folder / SHARD)
    variants = [Variant(1, b, c) for b in (1, 2, 3) for c in CAPACITIES]
    variants += [Variant(LIMITS.chunk, 1, c, all_) for c in CAPACITIES for all_ in (False, True)]
    variants += [v.at("high") for v in variants] if high else []
    texts = {v: _plan(v, vocabulary, len(rows), state_bytes).to_text() for v in variants}
    for variant, text in texts.items():
        edits = text if variant.base is None else edit_script(texts[variant.base], text)
        (folder / plan_file(variant)).write_text(edits)
    names = ["rows", *(name for name, _ in NORMS.values()), *(f"rows{n}" for n in range(1, len(rows)))]
    manifest = Manifest(
        model={"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1},
        fingerprint="",
        target="sm80",
        abi="",
        numerics="faithful",
        passes=(),
        fold_wo=False,
        static_scales="",
        kv="bf16",
        stages=("layout",),
        memory=Memory(ALIGN + rows.nbytes, state_bytes),
        limits=LIMITS,
        variants={v: graph_file("layout", v) for v in variants},
        tensors=dict.fromkeys(names, SHARD),
        layouts={},
        files={SHARD: FileEntry((folder / SHARD).stat().st_size, "")},
    )
    return Artifact(folder, manifest)


def expected_logits(artifact: Artifact, precision: str = "low") -> Tensor:
    """f32[rows, V]: row i is what place i of a batch, or of a scored chunk, gets."""
    rows = artifact.weights()["rows"]
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * NORMS[precision][1]


def _plan(variant: Variant, vocabulary: int, most: int, state_bytes: int) -> Plan:
    count = variant.batch * (variant.tokens if variant.all_positions else 1)
    type = ValueType(DType.F32, (1, count, vocabulary))
    vectors = ("pos", "n_valid", "slot")
    name = f"rows{count}" if count < most else "rows"
    norm, _ = NORMS[variant.precision]
    return Plan(
        target="sm80",
        abi="",
        variant=variant,
        arena_bytes=ALIGN + type.nbytes,
        state_bytes=state_bytes,
        values={
            "tokens": Place(ValueType(DType.I32, (variant.batch, variant.tokens)), "input"),
            **{v: Place(ValueType(DType.I32, (variant.batch,)), "input") for v in vectors},
            name: Place(type, "weight"),
            norm: Place(ValueType(DType.F32, (vocabulary,)), "weight"),
            "logits": Place(type, "arena", ALIGN),
        },
        launches=(Launch("sm80.rms_norm", "norm", ("norm",), (name, norm), ("logits",), {"eps": 1e-6}),),
        results={"logits": "logits"},
    )
