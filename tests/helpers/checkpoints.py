"""Small seeded checkpoints in the layout of the DeepSeek-V4 release, and single raw shards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

DenseFormat = Literal["fp8", "bf16", "f32"]
ExpertFormat = Literal["fp4", "fp8", "bf16", "f32"]
ScaleFormat = Literal["e8m0", "f32"]

INDEX_NAME = "model.safetensors.index.json"

BASE_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 16,
    "initializer_range": 0.02,
    "max_position_embeddings": 65536,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 512,
}
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}

_E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1_MIDPOINTS = (_E2M1_VALUES[1:] + _E2M1_VALUES[:-1]) / 2
_TINY = 1e-12


def make_checkpoint(
    out: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    shards: int = 1,
    dense: DenseFormat = "fp8",
    experts: ExpertFormat = "fp4",
    scale_dtype: ScaleFormat = "e8m0",
    scale_name: str = "scale",
) -> Path:
    """Write a random checkpoint and return its folder.

    Args:
        out: the folder, made if it is missing.
        overrides: keys of `config.json` that differ from `BASE_CONFIG`.
        seed: of the values; the stored format does not change the values drawn.
        shards: safetensors files to split the tensors over.
        dense: storage of the linear weights that the release has in FP8.
        experts: storage of the routed experts.
        scale_dtype: storage of the block scales; their values are powers of two either way.
        scale_name: last part of a scale's name.
    """
    config = dict(BASE_CONFIG)
    if experts in ("fp4", "fp8"):
        config["expert_dtype"] = experts
    if dense == "fp8" or experts in ("fp4", "fp8"):
        config["quantization_config"] = QUANTIZATION
    config.update(overrides or {})
    maker = _Maker(config, seed, _Storage(dense, experts, scale_dtype, scale_name))
    maker.model()
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    _write_shards(out, maker.tensors, shards)
    return out


def write_shard(
    path: Path,
    tensors: Mapping[str, tuple[str, list[int], bytes]],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write one safetensors file from (dtype name, shape, data), also of dtypes torch lacks."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [position, position + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position += len(data)
    write_raw_shard(path, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))
    return path


def write_raw_shard(path: Path, header: bytes, data: bytes) -> Path:
    """Write one file in the safetensors layout with any header, valid or not."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@dataclass(frozen=True)
class _Storage:
    dense: DenseFormat
    experts: ExpertFormat
    scale_dtype: ScaleFormat
    scale_name: str


class _Maker:
    """Draws the tensors of a model in a fixed order, so that a seed means the same everywhere."""

    def __init__(self, config: Mapping[str, Any], seed: int, storage: _Storage):
        self.c = config
        self.storage = storage
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def model(self) -> None:
        vocab, hidden, streams = self.c["vocab_size"], self.c["hidden_size"], self.c["hc_mult"]
        self._put("embed.weight", self._normal(vocab, hidden).bfloat16())
        self._put("head.weight", self._normal(vocab, hidden, std=3 * hidden**-0.5).bfloat16())
        self._norm("norm", hidden)
        self._put("hc_head_fn", self._normal(streams, streams * hidden, std=(streams * hidden) ** -0.5))
        self._put("hc_head_base", self._normal(streams, std=0.5))
        self._put("hc_head_scale", 1 + self._normal(1, std=0.1))
        for layer in range(self.c["num_hidden_layers"]):
            self._layer(f"layers.{layer}", layer)

    def _layer(self, name: str, layer: int) -> None:
        for part in ("attn", "ffn"):
            self._hyper_connection(f"{name}.hc_{part}")
            self._norm(f"{name}.{part}_norm", self.c["hidden_size"])
        self._attention(f"{name}.attn", self.c["compress_ratios"][layer])
        self._moe(f"{name}.ffn", hashed=layer < self.c["num_hash_layers"])

    def _hyper_connection(self, name: str) -> None:
        streams, hidden = self.c["hc_mult"], self.c["hidden_size"]
        mixes = (2 + streams) * streams
        self._put(f"{name}_fn", self._normal(mixes, streams * hidden, std=(streams * hidden) ** -0.5))
        self._put(f"{name}_base", self._normal(mixes, std=0.5))
        self._put(f"{name}_scale", 1 + self._normal(3, std=0.2))

    def _attention(self, name: str, ratio: int) -> None:
        c = self.c
        hidden, heads, head_dim, rank = (
            c[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank")
        )
        out = c["o_groups"] * c["o_lora_rank"]
        self._put(f"{name}.attn_sink", self._normal(heads))
        self._linear(f"{name}.wq_a", rank, hidden, self.storage.dense)
        self._norm(f"{name}.q_norm", rank)
        self._linear(f"{name}.wq_b", heads * head_dim, rank, self.storage.dense)
        self._linear(f"{name}.wkv", head_dim, hidden, self.storage.dense)
        self._norm(f"{name}.kv_norm", head_dim)
        self._linear(f"{name}.wo_a", out, heads * head_dim // c["o_groups"], self.storage.dense)
        self._linear(f"{name}.wo_b", hidden, out, self.storage.dense)
        if ratio:
            self._compressor(f"{name}.compressor", head_dim, ratio)
        if ratio == 4:
            index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
            self._compressor(f"{name}.indexer.compressor", index_dim, ratio)
            self._linear(f"{name}.indexer.wq_b", index_heads * index_dim, rank, self.storage.dense)
            self._projection(f"{name}.indexer.weights_proj", index_heads)

    def _compressor(self, name: str, dim: int, ratio: int) -> None:
        width = 2 * dim if ratio == 4 else dim
        self._projection(f"{name}.wkv", width)
        self._projection(f"{name}.wgate", width)
        self._put(f"{name}.ape", self._normal(ratio, width, std=0.3))
        self._norm(f"{name}.norm", dim)

    def _moe(self, name: str, *, hashed: bool) -> None:
        c = self.c
        experts, top_k = c["n_routed_experts"], c["num_experts_per_tok"]
        self._projection(f"{name}.gate", experts)
        if hashed:
            rows = [torch.randperm(experts, generator=self.generator)[:top_k] for _ in range(c["vocab_size"])]
            self._put(f"{name}.gate.tid2eid", torch.stack(rows))
        else:
            self._put(f"{name}.gate.bias", self._normal(experts, std=0.1))
        self._expert(f"{name}.shared_experts", self.storage.dense)
        for expert in range(experts):
            self._expert(f"{name}.experts.{expert}", self.storage.experts)

    def _expert(self, name: str, stored: ExpertFormat) -> None:
        hidden, width = self.c["hidden_size"], self.c["moe_intermediate_size"]
        self._linear(f"{name}.w1", width, hidden, stored)
        self._linear(f"{name}.w2", hidden, width, stored)
        self._linear(f"{name}.w3", width, hidden, stored)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor.contiguous()

    def _normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def _norm(self, name: str, width: int) -> None:
        self._put(f"{name}.weight", (1 + self._normal(width, std=0.1)).bfloat16())

    def _projection(self, name: str, rows: int) -> None:
        """A weight that every release keeps in BF16."""
        hidden = self.c["hidden_size"]
        self._put(f"{name}.weight", self._normal(rows, hidden, std=hidden**-0.5).bfloat16())

    def _linear(self, name: str, rows: int, cols: int, stored: ExpertFormat) -> None:
        # The factor per row gives the blocks different scales.
        weight = self._normal(rows, cols, std=cols**-0.5) * torch.exp(self._normal(rows, 1, std=0.3))
        if stored == "fp8":
            codes, exponents = _fp8(weight)
        elif stored == "fp4":
            codes, exponents = _fp4(weight)
        else:
            self._put(f"{name}.weight", weight.bfloat16() if stored == "bf16" else weight)
            return
        self._put(f"{name}.weight", codes)
        if self.storage.scale_dtype == "f32":
            scale = torch.exp2(exponents)
        else:
            scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        self._put(f"{name}.{self.storage.scale_name}", scale)


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [N, K] and scale exponents [ceil(N/128), ceil(K/128)]."""
    rows, cols = weight.shape
    n, k = math.ceil(rows / 128), math.ceil(cols / 128)
    padded = torch.zeros(n * 128, k * 128)
    padded[:rows, :cols] = weight
    blocks = padded.view(n, 128, k, 128)
    exponents = torch.ceil(torch.log2(blocks.abs().amax((1, 3)).clamp_min(_TINY) / 448))
    codes = (blocks / torch.exp2(exponents)[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(n * 128, k * 128)[:rows, :cols], exponents


def _fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes int8 [N, K/2], the low nibble first, and scale exponents [N, K/32]."""
    rows, cols = weight.shape
    blocks = weight.view(rows, cols // 32, 32)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp_min(_TINY) / 6))
    scaled = blocks / torch.exp2(exponents)[..., None]
    codes = torch.bucketize(scaled.abs(), _E2M1_MIDPOINTS) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).view(rows, cols // 2, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(torch.int8), exponents


def _write_shards(out: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    names = list(tensors)
    per_shard = math.ceil(len(names) / shards)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * per_shard : (shard + 1) * per_shard]
        save_file({name: tensors[name] for name in part}, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX_NAME).write_text(json.dumps(index, indent=1))
