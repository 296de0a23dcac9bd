"""The passes in the only order there is, and how often each rule must match.

Expected counts follow from the configuration, the formats of the weights, the numerics, the variant
and which passes are on. A pass that `requires` one that is off has no expectation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rewright.ir.graph import STAGES
from rewright.ir.ops.fused.linear import MOST_LINEARS
from rewright.ir.types import DType
from rewright.passes import (
    canonicalize,
    eliminate_quant,
    fold_wo,
    fuse_attention,
    fuse_compress,
    fuse_hyper_connection,
    fuse_index_query,
    fuse_index_select,
    fuse_kv_write,
    fuse_moe,
    fuse_norm_quant,
    fuse_quant_epilogue,
    fuse_shared_expert,
    fuse_shared_input,
    fuse_swiglu_quant,
    lower_weights,
    static_scales,
    unify_layout,
)
from rewright.passes.base import Pass
from rewright.passes.facts import Facts

PIPELINE: tuple[Pass, ...] = (
    canonicalize.PASS,
    eliminate_quant.PASS,
    lower_weights.PASS,
    fold_wo.PASS,
    fuse_shared_input.PASS,
    fuse_norm_quant.PASS,
    fuse_quant_epilogue.PASS,
    fuse_hyper_connection.PASS,
    fuse_kv_write.PASS,
    fuse_compress.PASS,
    fuse_index_query.PASS,
    fuse_index_select.PASS,
    fuse_attention.PASS,
    fuse_swiglu_quant.PASS,
    fuse_shared_expert.PASS,
    fuse_moe.PASS,
    static_scales.PASS,
    unify_layout.PASS,
)

LAST_STAGE = "layout"
"""The last stage that passes make."""

REACHABLE = STAGES[: STAGES.index(LAST_STAGE) + 1]
"""Stages that a graph can have when all passes are done or fewer."""


def pass_names() -> tuple[str, ...]:
    """Names of all passes, in order."""
    return tuple(p.name for p in PIPELINE)


def expected_matches(
    pass_: Pass, facts: Facts, variant: Mapping[str, Any], enabled: Collection[str]
) -> dict[str, int] | None:
    """Matches that the rules of a pass must have, by rule; None where nothing is expected.

    Args:
        pass_: the pass.
        facts: of the model and the options.
        variant: attributes of the graph: tokens, capacity, all_positions.
        enabled: names of the passes that run.
    """
    count = _COUNTS.get(pass_.name)
    if count is None or not set(pass_.requires) <= set(enabled) or not facts.model:
        return None
    return count(_Model(facts, variant, frozenset(enabled)))


class _Model:
    """Questions about the model that the counts below ask."""

    def __init__(self, facts: Facts, variant: Mapping[str, Any], enabled: frozenset[str]):
        self.facts, self.enabled = facts, enabled
        config = facts.model
        self.layers = range(config["num_hidden_layers"])
        self.ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        self.tokens, self.all_positions = variant["tokens"], variant["all_positions"]
        self.scoring = variant["capacity"] // 4 > config["index_topk"]
        self.few_streams = config["hc_mult"] <= fuse_hyper_connection.MOST_STREAMS
        self.lowers = "lower_weights" in enabled

    def scaled(self, layer: int, *paths: str) -> int:
        """How many of a layer's matrices are stored in blocks with scales."""
        return sum(self.facts.is_scaled(f"layers.{layer}.{path}") for path in paths)

    def quantized(self, layer: int, *paths: str) -> int:
        """How many of a layer's matrices get a quantised activation after `eliminate_quant`."""
        return sum(self.scaled(layer, path) for path in paths if not self.bypassed(layer, path))

    def bypassed(self, layer: int, path: str) -> bool:
        """Whether the quantisation before a linear, if there is one, goes in `eliminate_quant`."""
        if "eliminate_quant" not in self.enabled:
            return False
        planned = f"layers.{layer}.{path}" in self.facts.precision.high_activations
        return self.facts.numerics == "bf16" or planned

    def in_fp4(self, layer: int, path: str) -> bool:
        """Whether the precision plan stores a matrix as FP4."""
        return self.lowers and f"layers.{layer}.{path}" in self.facts.precision.fp4_weights

    def stored(self, layer: int, path: str) -> tuple[DType, bool, bool]:
        """What decides whether two linears of one input can be one node: type of the weight, whether it has
        scales, whether the activation is quantised."""
        name = f"layers.{layer}.{path}"
        dtype = DType.E2M1 if self.in_fp4(layer, path) else self.facts.weights[f"{name}.weight"].dtype
        return dtype, self.facts.is_scaled(name), self.quantized(layer, path) > 0

    def readers_of_x(self, layer: int) -> list[str]:
        """Linears that read the normed input of a layer's attention."""
        ratio, found = self.ratios[layer], ["attn.wq_a", "attn.wkv"]
        if ratio:
            found += [f"attn.compressor.{name}" for name in ("wkv", "wgate")]
        if ratio == 4:
            found += [f"attn.indexer.compressor.{name}" for name in ("wkv", "wgate")]
            found += ["attn.indexer.weights_proj"] if self.scoring else []
        return found

    def readers_of_qr(self, layer: int) -> list[str]:
        """Linears that read the normed low-rank query."""
        scored = self.ratios[layer] == 4 and self.scoring
        return ["attn.wq_b", *(["attn.indexer.wq_b"] if scored else [])]

    def folds(self, layer: int) -> bool:
        """Whether wo_a and wo_b of a layer become one matrix."""
        if self.in_fp4(layer, "attn.wo_a") or self.in_fp4(layer, "attn.wo_b"):
            return False
        if self.facts.fold_wo != "auto" or "fold_wo" not in self.enabled:
            return self.facts.fold_wo == "always" and "fold_wo" in self.enabled
        if self.facts.numerics == "faithful":
            return False
        parts = [f"layers.{layer}.attn.{m}.{t}" for m in ("wo_a", "wo_b") for t in ("weight", "scale")]
        apart = sum(self.facts.weights[name].nbytes for name in parts if name in self.facts.weights)
        config = self.facts.model
        elements = config["hidden_size"] * config["num_attention_heads"] * config["head_dim"]
        return elements * (4 if self.facts.numerics == "fp32" else 2) < apart


_FFN_UP = ("ffn.experts.w1", "ffn.experts.w3", "ffn.shared_experts.w1", "ffn.shared_experts.w3")
_DOWN = ("ffn.experts.w2", "ffn.shared_experts.w2")


def _canonicalize(m: _Model) -> dict[str, int]:
    return {"hoist_reshape": 0 if m.all_positions else 2}


def _eliminate_quant(m: _Model) -> dict[str, int]:
    merged = bypassed = 0
    for layer in m.layers:
        x = ("attn.wq_a", "attn.wkv")
        for readers in (x, m.readers_of_qr(layer), _FFN_UP):
            merged += max(0, m.scaled(layer, *readers) - 1)
        everything = (*x, *m.readers_of_qr(layer), "attn.wo_b", *_FFN_UP, *_DOWN)
        bypassed += m.scaled(layer, *everything) - m.quantized(layer, *everything)
    return {"merge_quant": merged, "unquantized_linear": bypassed, "round_trip": _unrounded(m)}


def _unrounded(m: _Model) -> int:
    """Roundings of keys, entries and index vectors that the precision plan does without."""
    found = 0
    for layer, ratio in zip(m.layers, m.ratios, strict=True):
        attention = f"layers.{layer}.attn"
        found += (1 + (ratio > 0)) * (attention in m.facts.precision.high_keys)
        found += (1 + m.scoring) * (f"{attention}.indexer" in m.facts.precision.high_keys)
    return found


def _lower_weights(m: _Model) -> dict[str, int]:
    planned = m.facts.precision.fp4_weights
    unread = 0 if m.scoring else sum(path.endswith(".indexer.wq_b") for path in planned)
    return {"fp4_weight": len(planned) - unread}


def _fold_wo(m: _Model) -> dict[str, int]:
    return {"fold_wo": sum(m.folds(layer) for layer in m.layers)}


def _fuse_shared_input(m: _Model) -> dict[str, int]:
    found = 0
    for layer in m.layers:
        shared = ["ffn.shared_experts.w1", "ffn.shared_experts.w3"]
        for readers in (m.readers_of_x(layer), m.readers_of_qr(layer), shared):
            for size in Counter(m.stored(layer, path) for path in readers).values():
                full, rest = divmod(size, MOST_LINEARS)
                found += full + (rest > 1)
    return {"shared_input": found}


def _fuse_norm_quant(m: _Model) -> dict[str, int]:
    found = 0
    for layer in m.layers:
        for readers in (("attn.wq_a", "attn.wkv"), m.readers_of_qr(layer), _FFN_UP):
            found += m.quantized(layer, *readers) > 0
    return {"norm_quant": found}


def _fuse_quant_epilogue(m: _Model) -> dict[str, int]:
    return {
        "grouped_linear_quant": sum(
            m.quantized(layer, "attn.wo_b") for layer in m.layers if not m.folds(layer)
        )
    }


def _fuse_hyper_connection(m: _Model) -> dict[str, int]:
    blocks = 2 * len(m.layers) if m.few_streams else 0
    return {
        "hc_pre": blocks,
        "pre_norm": blocks,
        "hc_post_pre": max(0, blocks - 1),
        "hc_head": int(m.few_streams),
    }


def _fuse_kv_write(m: _Model) -> dict[str, int]:
    return {"kv_rows": len(m.layers), "kv_write": len(m.layers) if m.tokens == 1 else 0}


def _fuse_compress(m: _Model) -> dict[str, int]:
    return {"compress_write": sum((ratio > 0) + (ratio == 4) for ratio in m.ratios)}


def _indexed(m: _Model) -> int:
    return m.ratios.count(4) if m.scoring else 0


def _fuse_shared_expert(m: _Model) -> dict[str, int]:
    path = "ffn.shared_experts"
    alike = [m.stored(layer, f"{path}.w1") == m.stored(layer, f"{path}.w3") for layer in m.layers]
    return {"shared_expert": sum(alike)}


def _fuse_moe(m: _Model) -> dict[str, int]:
    pairs = [m.quantized(layer, "ffn.experts.w1", "ffn.experts.w3") for layer in m.layers]
    return {"moe": sum(pair != 1 for pair in pairs)}


def _unify_layout(m: _Model) -> dict[str, int] | None:
    if "fuse_quant_epilogue" not in m.enabled:
        return None
    written = _fuse_quant_epilogue(m)["grouped_linear_quant"]
    return {"flat_groups": len(m.layers) - written - _fold_wo(m)["fold_wo"]}


_COUNTS: Mapping[str, Callable[[_Model], dict[str, int] | None]] = {
    "canonicalize": _canonicalize,
    "eliminate_quant": _eliminate_quant,
    "lower_weights": _lower_weights,
    "fold_wo": _fold_wo,
    "fuse_shared_input": _fuse_shared_input,
    "fuse_norm_quant": _fuse_norm_quant,
    "fuse_quant_epilogue": _fuse_quant_epilogue,
    "fuse_hyper_connection": _fuse_hyper_connection,
    "fuse_kv_write": _fuse_kv_write,
    "fuse_compress": _fuse_compress,
    "fuse_index_query": lambda m: {"index_query": _indexed(m)},
    "fuse_index_select": lambda m: {"index_select": _indexed(m)},
    "fuse_attention": lambda m: {"attention": len(m.layers)},
    "fuse_swiglu_quant": lambda m: {"swiglu_quant": sum(m.quantized(i, *_DOWN) for i in m.layers)},
    "fuse_shared_expert": _fuse_shared_expert,
    "fuse_moe": _fuse_moe,
    "unify_layout": _unify_layout,
}
