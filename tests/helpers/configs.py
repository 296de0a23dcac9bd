"""Three random models that between them have every kind of layer, stored in different formats."""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "pro": {"compress_ratios": [128, 4, 128, 4], "hc_mult": 2, "head_dim": 512, "num_hash_layers": 2},
    "flash": {
        "compress_ratios": [0, 4, 128, 4],
        "index_n_heads": 8,
        "n_routed_experts": 16,
        "num_attention_heads": 8,
        "num_experts_per_tok": 6,
        "o_groups": 4,
    },
    "mixed": {
        "compress_ratios": [4, 16, 0, 8, 4],
        "hc_mult": 3,
        "head_dim": 192,
        "index_topk": 24,
        "num_hidden_layers": 5,
        "sliding_window": 40,
    },
}
STORAGE: dict[str, dict[str, Any]] = {
    "pro": {"seed": 7},
    "flash": {"seed": 8, "experts": "bf16"},
    "mixed": {"seed": 8, "experts": "fp8", "scale_dtype": "f32"},
}
"""Keyword arguments of `make_checkpoint`."""
