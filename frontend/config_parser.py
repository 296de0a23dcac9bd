"""The rules of `config.json`: which keys are read, which values are accepted, how they relate.

The parser goes through the whole object and lists everything that is wrong with it. What it returns
are plain values; `config.py` turns them into a `ModelConfig`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

OVERLAP_RATIO = 4
"""The compress ratio whose layers have overlapping windows and an indexer."""

_KV_ROUND_BLOCK = 64  # columns of a cache row that share a scale
_RATIOS = (0, OVERLAP_RATIO, 8, 16, 32, 64, 128)

FIXED: dict[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
FIXED_QUANTIZATION: dict[str, object] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
ROPE_TYPE = "yarn"
_EXPERT_DTYPES = ("fp4", "fp8")
_SHOWN_CHARS = 80

# Integer keys and the smallest value of each.
_INTS = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hc_mult": 1,
    "hc_sinkhorn_iters": 1,
    "head_dim": 1,
    "hidden_size": 1,
    "index_head_dim": 1,
    "index_n_heads": 1,
    "index_topk": 1,
    "max_position_embeddings": 1,
    "moe_intermediate_size": 1,
    "n_routed_experts": 1,
    "num_attention_heads": 1,
    "num_experts_per_tok": 1,
    "num_hash_layers": 0,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 1,
    "o_lora_rank": 1,
    "q_lora_rank": 1,
    "qk_rope_head_dim": 1,
    "sliding_window": 1,
    "vocab_size": 1,
}
_LARGEST = 2**31 - 1
"""Sizes, ids and positions are int32 in a graph."""

_MOST = {"hc_sinkhorn_iters": 1000, "n_routed_experts": 65_536, "num_hidden_layers": 10_000}
"""Numbers of things that are built or run one by one: far above any model, low enough to finish."""

_FLOATS = (
    "compress_rope_theta",
    "hc_eps",
    "rms_norm_eps",
    "rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
)
_STRUCTURED = ("compress_ratios", "expert_dtype", "quantization_config", "rope_scaling")

# Keys of released configurations that say nothing about the arithmetic.
_UNUSED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "dtype",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_UNUSED_PREFIX = "dspark_"


class ConfigParser:
    """Collects the values of the keys that are right and the problems of those that are not."""

    def __init__(self, d: Mapping[str, Any]):
        self.d = d
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.unknown: list[str] = []

    def parse(self) -> dict[str, Any]:
        """Fields of `ModelConfig`; complete only if `problems` stays empty."""
        self._fixed(self.d, FIXED)
        found: dict[str, Any] = {key: self._int(self.d, key, least) for key, least in _INTS.items()}
        found |= {key: self._positive(self.d, key) for key in _FLOATS}
        found["rope_scaling"] = self._rope_scaling()
        found["compress_ratios"] = self._compress_ratios(found["num_hidden_layers"])
        self.values = {key: value for key, value in found.items() if value is not None}
        self._relations()
        self.values["expert_dtype"] = self._expert_dtype()
        self.values["quantized"] = self._quantized()
        self._note_unknown(self.d, {*FIXED, *_INTS, *_FLOATS, *_STRUCTURED, *_UNUSED})
        return self.values

    def _refuse(self, key: str, value: object, accepted: str) -> None:
        text = json.dumps(value)
        shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
        self.problems.append(f"{key} is {shown}; accepted: {accepted}")

    def _get(
        self, d: Mapping[str, Any], key: str, accepts: Callable[[Any], bool], accepted: str, prefix: str = ""
    ) -> Any:
        """The value of a key, or None and a problem if it is missing or not accepted."""
        if key not in d:
            self.problems.append(f"{prefix}{key} is missing; accepted: {accepted}")
        elif not accepts(d[key]):
            self._refuse(prefix + key, d[key], accepted)
        else:
            return d[key]
        return None

    def _fixed(self, d: Mapping[str, Any], fixed: Mapping[str, object], prefix: str = "") -> None:
        for key, only in fixed.items():
            # Compared as JSON text, in which true is not 1.
            self._get(
                d, key, lambda v, only=only: json.dumps(v) == json.dumps(only), json.dumps(only), prefix
            )

    def _int(self, d: Mapping[str, Any], key: str, least: int, prefix: str = "") -> int | None:
        most = _MOST.get(key, _LARGEST)
        too_large = _is_int(d.get(key)) and d[key] > most
        text = f"an integer <= {most}" if too_large else f"an integer >= {least}"
        return self._get(d, key, lambda v: _is_int(v) and least <= v <= most, text, prefix)

    def _positive(self, d: Mapping[str, Any], key: str, prefix: str = "") -> float | None:
        value = self._get(d, key, _is_positive, "a finite number > 0", prefix)
        return None if value is None else float(value)

    def _note_unknown(self, d: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
        self.unknown += [prefix + k for k in d if k not in known and not k.startswith(_UNUSED_PREFIX)]

    def _rope_scaling(self) -> dict[str, Any] | None:
        d = self._get(self.d, "rope_scaling", _is_object, f"an object of type {ROPE_TYPE}")
        if d is None:
            return None
        prefix = "rope_scaling."
        for key in [k for k in ("type", "rope_type") if k in d] or ["type"]:
            self._fixed(d, {key: ROPE_TYPE}, prefix)
        factor, fast, slow = (self._positive(d, k, prefix) for k in ("factor", "beta_fast", "beta_slow"))
        length = self._int(d, "original_max_position_embeddings", 1, prefix)
        found = {
            "factor": factor,
            "original_max_position_embeddings": length,
            "beta_fast": fast,
            "beta_slow": slow,
        }
        self._note_unknown(d, {*found, "type", "rope_type"}, prefix)
        if fast is not None and slow is not None and fast <= slow:
            self._refuse(f"{prefix}beta_fast", d["beta_fast"], f"a number > beta_slow ({slow:g})")
        return found

    def _compress_ratios(self, layers: int | None) -> tuple[int, ...] | None:
        accepted = "a list of integers >= 0, one per layer"
        ratios = self._get(self.d, "compress_ratios", _is_ratio_list, accepted)
        if ratios is None or layers is None:
            return None
        if len(ratios) < layers:
            accepted = f"at least num_hidden_layers ({layers})"
            self.problems.append(f"compress_ratios has {len(ratios)} entries; accepted: {accepted}")
            return None
        main = tuple(ratios[:layers])  # the rest belongs to MTP blocks
        for ratio in sorted(set(main).difference(_RATIOS)):
            self._refuse(f"compress_ratios[{main.index(ratio)}]", ratio, ", ".join(map(str, _RATIOS)))
        return main

    def _expert_dtype(self) -> str | None:
        value = self.d.get("expert_dtype")
        if value is None or value in _EXPERT_DTYPES:
            return value
        self._refuse("expert_dtype", value, " or ".join(json.dumps(x) for x in _EXPERT_DTYPES))
        return None

    def _quantized(self) -> bool:
        if self.d.get("quantization_config") is None:
            return False
        d = self._get(self.d, "quantization_config", _is_object, "an object")
        if d is not None:
            self._fixed(d, FIXED_QUANTIZATION, "quantization_config.")
            self._note_unknown(d, set(FIXED_QUANTIZATION), "quantization_config.")
        return True

    def _relations(self) -> None:
        """Rules between keys; each is checked if the keys that it needs are right by themselves."""
        for head, rope in self._both("head_dim", "qk_rope_head_dim"):
            if rope % 2:
                self._refuse("qk_rope_head_dim", rope, "an even integer")
            if head <= rope or (head - rope) % _KV_ROUND_BLOCK:
                accepted = f"qk_rope_head_dim ({rope}) plus a positive multiple of {_KV_ROUND_BLOCK}"
                self._refuse("head_dim", head, accepted)
        if OVERLAP_RATIO in self.values.get("compress_ratios", ()):
            for width, rope in self._both("index_head_dim", "qk_rope_head_dim"):
                # Hadamard needs the power of two, the FP4 rounding blocks of 32.
                if width & (width - 1) or width % 32 or width <= rope:
                    accepted = f"a power of two, a multiple of 32 and above qk_rope_head_dim ({rope})"
                    self._refuse("index_head_dim", width, accepted)
        if self.d.get("quantization_config") is not None and self.d.get("expert_dtype") != "fp8":
            for key in ("hidden_size", "moe_intermediate_size"):
                if self.values.get(key, 0) % 2:
                    self._refuse(key, self.values[key], "an even integer: two FP4 weights share a byte")
        for heads, groups in self._both("num_attention_heads", "o_groups"):
            if heads % groups:
                self._refuse("o_groups", groups, f"a divisor of num_attention_heads ({heads})")
        self._at_most("num_experts_per_tok", "n_routed_experts")
        self._at_most("num_hash_layers", "num_hidden_layers")
        for key in ("bos_token_id", "eos_token_id"):
            for token, size in self._both(key, "vocab_size"):
                if token >= size:
                    self._refuse(key, token, f"below vocab_size ({size})")

    def _at_most(self, key: str, limit: str) -> None:
        for value, most in self._both(key, limit):
            if value > most:
                self._refuse(key, value, f"at most {limit} ({most})")

    def _both(self, a: str, b: str) -> list[tuple[int, int]]:
        """The pair of values if both keys are right, else nothing."""
        return [(self.values[a], self.values[b])] if a in self.values and b in self.values else []


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    # The upper bound also rejects infinity and integers that no double can hold.
    return (_is_int(value) or isinstance(value, float)) and 0 < value <= sys.float_info.max


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_ratio_list(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(r) and r >= 0 for r in value)
