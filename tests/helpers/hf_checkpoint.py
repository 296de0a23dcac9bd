"""The DeepSeek-V4 model of transformers, with random weights, saved as a release checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints import BASE_CONFIG
from safetensors.torch import save_file
from torch import Tensor, nn

TINY: dict[str, Any] = {
    "bos_token_id": 0,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 16,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hash_layers": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "o_groups": 4,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 256,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "vocab_size": 512,
}
"""A configuration that transformers and the release agree on: both routers, all kinds of layers."""

# Applied in this order, each to the result of those before.
_RENAMES = [
    (r"^model\.embed_tokens\.weight$", "embed.weight"),
    (r"^lm_head\.weight$", "head.weight"),
    (r"^model\.norm\.weight$", "norm.weight"),
    (r"^model\.hc_head\.hc_(\w+)$", r"hc_head_\1"),
    (r"\.(attn|ffn)_hc\.(\w+)$", r".hc_\1_\2"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.position_bias$", ".ape"),
    (r"(compressor)\.kv_norm\.", r"\1.norm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
]
_SHARED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def make_hf_model(overrides: Mapping[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """A `DeepseekV4ForCausalLM` in fp32 of which every parameter matters.

    Args:
        overrides: keys that differ from `TINY`.
        seed: of the weights.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV4Config(**{**TINY, **(overrides or {})}, attn_implementation="eager")
    model = DeepseekV4ForCausalLM(config).float().eval().requires_grad_(False)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            _randomize(name, tensor, config.n_routed_experts)
    return model


def _randomize(name: str, tensor: Tensor, experts: int) -> None:
    """Scale up matrices and overwrite what starts as a constant."""
    if name.endswith("tid2eid"):
        rows = [torch.randperm(experts)[: tensor.shape[1]] for _ in range(tensor.shape[0])]
        tensor.copy_(torch.stack(rows))
    elif name.endswith("position_bias"):
        tensor.normal_(std=0.3)
    elif tensor.dim() >= 2:
        tensor.mul_(3.0)
    elif name.endswith(("sinks", "base")):
        tensor.normal_(std=0.5)
    elif name.endswith("e_score_correction_bias"):
        tensor.normal_(std=0.1)
    else:  # norms, and scales of the Hyper-Connections
        tensor.normal_(mean=1.0, std=0.1)


def release_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters under the names of the release."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if match := re.fullmatch(r"model\.(layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", name):
            tensors |= _experts(f"{match[1]}.ffn.experts", match[2], tensor)
        elif match := re.fullmatch(r"model\.(layers\.\d+)\.mlp\.shared_experts\.(\w+)\.weight", name):
            tensors[f"{match[1]}.ffn.shared_experts.{_SHARED[match[2]]}.weight"] = tensor
        else:
            tensors[_release_name(name)] = tensor
    return {name: t.contiguous().clone() for name, t in tensors.items()}


def _experts(base: str, kind: str, tensor: Tensor) -> dict[str, Tensor]:
    if kind == "down_proj":
        return {f"{base}.{e}.w2.weight": matrix for e, matrix in enumerate(tensor)}
    halves = [matrix.chunk(2) for matrix in tensor]
    return {
        f"{base}.{e}.{w}.weight": half
        for e, pair in enumerate(halves)
        for w, half in zip(("w1", "w3"), pair, strict=True)
    }


def _release_name(name: str) -> str:
    name = re.sub(r"\.self_attn\.", ".attn.", re.sub(r"\.mlp\.", ".ffn.", name))
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name.removeprefix("model.")


def save_release(model: nn.Module, folder: Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Write the model as a checkpoint of the release's layout, every float in F32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**BASE_CONFIG, **TINY, **(overrides or {})}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(release_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
