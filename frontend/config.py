"""The model configuration: `config.json` of a DeepSeek-V4 release, validated as a whole.

Everything that a later stage assumes about the model is checked here, and every problem of a
configuration is reported in one error. A key with a single accepted value (`scoring_func`,
`tie_word_embeddings`, ...) is checked and then dropped: nothing downstream depends on it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewright.frontend.config_parser import FIXED, FIXED_QUANTIZATION, OVERLAP_RATIO, ROPE_TYPE, ConfigParser
from rewright.ir.errors import BadInput, ProblemList

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters of the layers that compress (`rope_scaling`, type `yarn`)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A validated DeepSeek-V4 configuration; fields are named like the keys of `config.json`.

    Attributes:
        compress_ratios: one per main layer; entries of MTP blocks are cut off.
        expert_dtype: "fp4" or "fp8", None if the file does not say (the tensors decide anyway).
        quantized: whether there is a `quantization_config`; False means a float checkpoint.
    """

    bos_token_id: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    eos_token_id: int
    expert_dtype: str | None
    hc_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    head_dim: int
    hidden_size: int
    index_head_dim: int
    index_n_heads: int
    index_topk: int
    max_position_embeddings: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_attention_heads: int
    num_experts_per_tok: int
    num_hash_layers: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    o_groups: int
    o_lora_rank: int
    q_lora_rank: int
    qk_rope_head_dim: int
    quantized: bool
    rms_norm_eps: float
    rope_scaling: RopeScaling
    rope_theta: float
    routed_scaling_factor: float
    sliding_window: int
    swiglu_limit: float
    vocab_size: int

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], where: str) -> tuple[ModelConfig, list[str]]:
        """Validate the parsed JSON object `d`, read from `where`.

        Returns:
            The configuration, and notes for the user (unknown keys that were ignored).

        Raises:
            ProblemList: every missing key, wrong type, unsupported value and broken relation.
        """
        parser = ConfigParser(d)
        values = parser.parse()
        if parser.problems:
            raise ProblemList(
                "not a DeepSeek-V4 configuration that can be compiled",
                parser.problems,
                where=where,
                fix="use the config.json that the DeepSeek-V4 release ships with its weights",
            )
        notes = []
        if parser.unknown:
            notes.append(f"{where}: unknown keys were ignored: {', '.join(sorted(parser.unknown))}")
        values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        return cls(**values), notes

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `from_dict` reads back to an equal configuration."""
        d = {**FIXED, **dataclasses.asdict(self)}
        d["compress_ratios"] = list(self.compress_ratios)
        d["rope_scaling"]["type"] = ROPE_TYPE
        if d.pop("quantized"):
            d["quantization_config"] = dict(FIXED_QUANTIZATION)
        if self.expert_dtype is None:
            del d["expert_dtype"]
        return d

    def layer_ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer; 0 if it sees the window only."""
        return self.compress_ratios[layer]

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer picks its compressed entries by an indexer."""
        return self.compress_ratios[layer] == OVERLAP_RATIO

    def is_hash_layer(self, layer: int) -> bool:
        """Whether a layer routes by token id instead of by score."""
        return layer < self.num_hash_layers

    @property
    def nope_head_dim(self) -> int:
        """Leading dims of a head that carry no position."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def group_width(self) -> int:
        """Attention output columns that one output group reads."""
        return self.num_attention_heads * self.head_dim // self.o_groups


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `BadInput` if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the path") from e
    except (ValueError, RecursionError) as e:
        raise BadInput(f"not valid JSON ({e})", where=str(path), fix="download the file again") from e
    if not isinstance(value, dict):
        raise BadInput(f"holds a JSON {type(value).__name__}, not an object", where=str(path))
    return value


def load_config(path: str | Path) -> tuple[ModelConfig, list[str]]:
    """Read and validate a configuration.

    Args:
        path: a checkpoint folder or a `config.json` itself.

    Returns:
        The configuration and notes for the user, as `ModelConfig.from_dict`.

    Raises:
        BadInput: the file is missing or not a JSON object.
        ProblemList: the configuration cannot be used.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG_NAME
    return ModelConfig.from_dict(read_json_object(path), str(path))
