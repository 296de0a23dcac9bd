"""Models without a checkpoint: random weights of the right types, drawn where they will be used.

What a step costs depends on the values only through the choice of experts, so a model of random weights
can stand in for a released one when time is measured. The content is valid (no code is a NaN), activations
stay near one through any number of layers, and the gates really spread tokens over experts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rewright.codegen.pack import layouts_of
from rewright.frontend.config import CONFIG_NAME, ModelConfig
from rewright.frontend.kv_formats import PLAIN, KvFormats
from rewright.frontend.numerics import Numerics
from rewright.frontend.rope_tables import rope_constants
from rewright.frontend.source import ModelSource
from rewright.ir.errors import CompilerBug
from rewright.ir.plan import Plan
from rewright.ir.types import DType, ValueType

_CODE_RMS = {DType.F8E4M3: 104.0, DType.E2M1: 2.93}
"""Root mean square of codes as they are drawn here."""

_NO_NAN = 0xFEFEFEFE
"""Clears the last mantissa bit of four e4m3 codes in a row: 0x7F and 0xFF, the NaNs, cannot come up."""
_NO_NAN_MMA8 = 0xFF7EFF7E
"""The same in a word of layout mma8, where each half has the low seven bits of one code at 13..7 and those
of the other at 6..0."""

_SPREAD = {".ape": 0.3, ".gate.bias": 0.1, "_base": 0.5, ".attn_sink": 1.0}
"""Standard deviation of vectors with mean zero, by the end of their name."""
_AROUND_ONE = {"norm.weight": 0.1, "_scale": 0.2}
"""The same of vectors with mean one."""
_HEAD_GAIN = 3.0
"""Logits should differ."""
_TABLE_ROWS = 1 << 14
"""Rows of an expert table that are drawn at a time."""


def reduced(config: ModelConfig, ratios: Sequence[int], hash_layers: int | None = None) -> ModelConfig:
    """The model with other layers of the same widths.

    Args:
        config: the model.
        ratios: compression ratio of every layer.
        hash_layers: how many of the first layers route by token id; by default as many as the model has.
    """
    hashed = config.num_hash_layers if hash_layers is None else hash_layers
    changed = dataclasses.replace(
        config,
        compress_ratios=tuple(ratios),
        num_hidden_layers=len(ratios),
        num_hash_layers=min(hashed, len(ratios)),
        num_nextn_predict_layers=0,
    )
    return ModelConfig.from_dict(changed.to_dict(), "reduced configuration")[0]


def open_config(
    config: ModelConfig,
    *,
    max_context: int,
    max_batch: int = 1,
    chunk: int = 128,
    numerics: Numerics = Numerics.FAITHFUL,
    kv: KvFormats = PLAIN,
) -> ModelSource:
    """A configuration without a checkpoint, ready to be traced."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG_NAME
        path.write_text(json.dumps(config.to_dict()), encoding="utf-8")
        limits = {"max_context": max_context, "max_batch": max_batch, "chunk": chunk}
        return ModelSource.open(path, numerics, **limits, kv=kv)


def weight_types(plans: Iterable[Plan]) -> dict[str, ValueType]:
    """Type of every weight and constant that plans read, by name, sorted."""
    places = [(name, place) for plan in plans for name, place in plan.values.items()]
    return dict(sorted({name: place.type for name, place in places if place.space == "weight"}.items()))


def random_weights(
    plans: Sequence[Plan], source: ModelSource, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """Every weight and constant that plans read, by name; as `each_random_weight`."""
    return dict(each_random_weight(plans, source, device, seed))


def each_random_weight(
    plans: Sequence[Plan], source: ModelSource, device: str | torch.device = "cpu", seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Weights and constants that plans read, drawn one after the other on the device in the layout that
    they are read in.

    A device draws other numbers than a CPU does, from the same distributions.

    Args:
        plans: plans of one model.
        source: the model.
        device: where the tensors lie.
        seed: of the values.
    """
    constants = rope_constants(source.config, source.limits.max_context)
    maker = Maker(device, seed, experts=source.config.n_routed_experts)
    layouts, types = layouts_of(plans), weight_types(plans)
    for name in types:
        if name in constants:
            yield name, constants[name].to(device)
        else:
            yield name, maker.make(name, types, layouts[name])


class Maker:
    """Draws weights one after the other on a device.

    Args:
        device: where they lie.
        seed: of the values.
        experts: how many routed experts there are.
    """

    def __init__(self, device: str | torch.device, seed: int, *, experts: int):
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._experts = experts

    def make(self, name: str, types: Mapping[str, ValueType], layout: str = "") -> Tensor:
        """A weight.

        Args:
            name: its name, which tells what it is for.
            types: types by name, also of the matrix that a scale belongs to.
            layout: in which it lies. A layout permutes bits, so codes are drawn in place.
        """
        type = types[name]
        match type.dtype:
            case DType.F8E4M3:
                mask = _NO_NAN_MMA8 if layout == "mma8" else _NO_NAN
                return self._bits(type, mask)
            case DType.E2M1:
                return self._bits(type, 0xFFFFFFFF)
            case DType.E8M0:
                return self._scales(type, types[name.removesuffix(".scale") + ".weight"])
            case DType.I64 | DType.I32:
                return self._table(type)
        return self._floats(name, type)

    def _bits(self, type: ValueType, mask: int, offset: int = 0) -> Tensor:
        """Random words masked, plus a constant; words are of 32 bits, `offset` may not carry out of them."""
        words = torch.empty(-(-type.nbytes // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self._generator)
        words.bitwise_and_(_signed(mask))
        if offset:
            words.add_(_signed(offset))
        return words.view(torch.uint8)[: type.nbytes].view(type.dtype.torch_dtype).view(type.storage_shape)

    def _scales(self, type: ValueType, matrix: ValueType) -> Tensor:
        """Two neighbouring powers of two, with which a product has about the size of its input."""
        ideal = 1 / (_CODE_RMS[matrix.dtype] * math.sqrt(matrix.shape[-1]))
        lower = 127 + math.floor(math.log2(ideal))
        return self._bits(type, 0x01010101, lower * 0x01010101)

    def _table(self, type: ValueType) -> Tensor:
        """Distinct experts in every row."""
        rows, k = type.shape
        table = torch.empty(rows, k, dtype=type.dtype.torch_dtype, device=self.device)
        for start in range(0, rows, _TABLE_ROWS):
            part = table[start : start + _TABLE_ROWS]
            keys = torch.rand(len(part), self._experts, device=self.device, generator=self._generator)
            part.copy_(keys.topk(k, dim=-1).indices)
        return table

    def _floats(self, name: str, type: ValueType) -> Tensor:
        mean, deviation = _distribution(name, type)
        tensor = torch.empty(type.storage_shape, dtype=type.dtype.torch_dtype, device=self.device)
        return tensor.normal_(mean, deviation, generator=self._generator)


def _distribution(name: str, type: ValueType) -> tuple[float, float]:
    """Mean and standard deviation of a float weight."""
    for end, deviation in _AROUND_ONE.items():
        if name.endswith(end):
            return 1.0, deviation
    for end, deviation in _SPREAD.items():
        if name.endswith(end):
            return 0.0, deviation
    if name == "embed.weight":
        return 0.0, 1.0
    if len(type.shape) < 2:
        raise CompilerBug(f"weight {name} is a vector of an unknown kind")
    gain = _HEAD_GAIN if name == "head.weight" else 1.0
    return 0.0, gain * type.shape[-1] ** -0.5


def _signed(word: int) -> int:
    """A word of 32 bits, twice, as a signed number of 64."""
    twice = word << 32 | word
    return twice - (1 << 64) if twice >> 63 else twice
