"""How the elements of a stored weight are ordered: layouts by name, with pack and unpack.

A weight keeps its type and its bytes; a layout permutes them so that a kernel reads them in order.
"" is row by row, as checkpoints have it.

`tile16` is what the host kernels read. Sixteen rows of a matrix [N,K] form a tile in which element k
of all sixteen lies together: [N/16][K][16]. The last tile is as wide as what is left of N. Codes of
e2m1 stay in pairs: a byte holds elements k and k+1 of one row, tiles are [N/16][K/2][16] bytes. The
leading axes of a stack of matrices stay as they are; scales per 1 x 32 elements are matrices too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.ir.types import ValueType

TILE = 16


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """A permutation of a weight's storage elements.

    Attributes:
        pack: a tensor in row order -> the same shape and dtype, elements in the layout's order.
        unpack: its inverse.
    """

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


def _tiles(matrix: Tensor) -> Tensor:
    rows = matrix.shape[-2] // TILE * TILE
    whole, rest = matrix[..., :rows, :], matrix[..., rows:, :]
    parts = []
    if rows:
        tiles = whole.unflatten(-2, (-1, TILE)).transpose(-1, -2)
        parts.append(tiles.flatten(-3))
    if matrix.shape[-2] > rows:
        parts.append(rest.transpose(-1, -2).flatten(-2))
    return torch.cat(parts, dim=-1).reshape(matrix.shape)


def _rows(packed: Tensor) -> Tensor:
    n, k = packed.shape[-2:]
    rows = n // TILE * TILE
    flat = packed.flatten(-2)
    whole, rest = flat[..., : rows * k], flat[..., rows * k :]
    parts = []
    if rows:
        parts.append(whole.unflatten(-1, (-1, k, TILE)).transpose(-1, -2).flatten(-3, -2))
    if n > rows:
        parts.append(rest.unflatten(-1, (k, n - rows)).transpose(-1, -2))
    return torch.cat(parts, dim=-2).contiguous()


def _bytewise(permute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`permute` on tensors of types that torch cannot move around (FP8) as bytes."""

    def run(tensor: Tensor) -> Tensor:
        if tensor.element_size() > 1:
            return permute(tensor)
        return permute(tensor.view(torch.uint8)).view(tensor.dtype)

    return run


LAYOUTS: dict[str, WeightLayout] = {
    "": WeightLayout(lambda t: t, lambda t: t),
    "tile16": WeightLayout(_bytewise(_tiles), _bytewise(_rows)),
}


def packable(layout: str, type: ValueType) -> bool:
    """Whether weights of a type can have a layout: tiles need matrices."""
    return layout == "" or len(type.storage_shape) >= 2
