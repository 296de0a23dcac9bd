"""Turns checkpoint tensors into graph weights, a part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rewright.frontend.checkpoint import Checkpoint
from rewright.frontend.storage import Binding, Part
from rewright.ir.errors import BadInput
from rewright.ir.formats import dequantize_weight
from rewright.ir.types import DType, ValueType


class Weights:
    """The graph weights of a model: read from a checkpoint as bound, or given (constants).

    Memory never holds more than one stored tensor and its converted form.
    """

    def __init__(
        self, checkpoint: Checkpoint, bindings: Mapping[str, Binding], constants: Mapping[str, Tensor]
    ):
        self._checkpoint = checkpoint
        self._bindings = bindings
        self._constants = constants

    def parts(self, name: str) -> Iterator[Tensor]:
        """Tensors that, one after the other in memory, make up the weight `name`."""
        if name in self._constants:
            yield self._constants[name]
            return
        binding = self._bindings[name]
        for part in binding.parts:
            yield self._part(part, binding.type)

    def load(self, name: str) -> Tensor:
        """A whole weight; for tests and small models."""
        if name in self._constants:
            return self._constants[name]
        shape = self._bindings[name].type.storage_shape
        return torch.cat([p.reshape(-1) for p in self.parts(name)]).view(shape)

    def names(self) -> list[str]:
        """Every weight and constant, sorted."""
        return sorted([*self._bindings, *self._constants])

    def _part(self, part: Part, type: ValueType) -> Tensor:
        tensor = self._checkpoint.read(part.tensor)
        if part.scale is not None:
            tensor = dequantize_weight(tensor, self._checkpoint.read(part.scale))
        elif type.dtype is DType.F32:
            tensor = tensor.float()
        if not type.dtype.is_float and tensor.dtype in (torch.int64, torch.int32):
            self._check_experts(tensor, part.tensor)
        return tensor.contiguous()

    def _check_experts(self, table: Tensor, name: str) -> None:
        """Entries of a token-to-expert table must be experts."""
        count = self._checkpoint.config.n_routed_experts
        wrong = ((table < 0) | (table >= count)).nonzero()
        if len(wrong):
            at = wrong[0].tolist()
            raise BadInput(
                f"holds {int(table[tuple(at)])} at index {at}, there are {count} experts",
                where=name,
                fix="the table and n_routed_experts do not belong together",
            )
