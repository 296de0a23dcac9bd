"""How the elements of a stored weight are ordered: layouts by name, with pack and unpack.

A weight keeps its type and its bytes; a layout permutes them so that a kernel reads them in order.
"" is row by row, as checkpoints have it.

`tile16` is what the host kernels read. Sixteen rows of a matrix [N,K] form a tile in which element k
of all sixteen lies together: [N/16][K][16]. The last tile is as wide as what is left of N. Codes of
e2m1 stay in pairs: a byte holds elements k and k+1 of one row, tiles are [N/16][K/2][16] bytes. The
leading axes of a stack of matrices stay as they are; scales per 1 x 32 elements are matrices too.

`mma8`, `mma4` and `mma16` are what the sm80 kernels read: matrices of e4m3, of packed e2m1 and of 16-bit
elements in the order in which the lanes of a warp hand them to a matrix instruction (operand A of
m16n8k16), so that a lane's next 16 bytes are its next fragments. A tile is sixteen rows; lane 4g + t holds
of each 32 columns the columns 8t .. 8t+7 of rows g and g+8, eight consecutive ones, so that activations are
read in their own order. Within a word of codes bits are spread so that each fp16 pair comes out with a mask
and a shift (`_spread8`, `_spread4`). `mma4_scale` puts the scales per 1 x 32 of a tile in the same order:
[N/16][K/128][16][4].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.ir.types import DType, ValueType

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


def _fragments(matrix: Tensor) -> Tensor:
    """[...,N,K] -> [...,N/16,K/32,lane,step 2,k pair 2,row half 2,k 2]: what each lane holds of a tile."""
    tiles = matrix.unflatten(-1, (-1, 4, 2, 2, 2)).unflatten(-6, (-1, 2, 8))
    # axes now: tile, row half, g, k/32, t, step, k pair, k
    lead = list(range(tiles.dim() - 8))
    at = len(lead)
    order = (0, 3, 2, 4, 5, 6, 1, 7)
    return tiles.permute(*lead, *(at + i for i in order)).flatten(-6, -5)


def _from_fragments(fragments: Tensor) -> Tensor:
    """The inverse of `_fragments`."""
    parts = fragments.unflatten(-5, (8, 4))
    lead = list(range(parts.dim() - 8))
    at = len(lead)
    order = (0, 6, 2, 1, 3, 4, 5, 7)
    return parts.permute(*lead, *(at + i for i in order)).flatten(-5).flatten(-4, -2)


def _spread8(codes: Tensor) -> Tensor:
    """Fragments of e4m3 codes [...,k pair,row half,k] -> 32-bit words [...,k pair].

    The 16 bits of k hold the code c of row half 0 as the fp16 2^-8 c (sign at 15, the rest at 13..7), and
    in the gaps that of row half 1: sign at 14, the rest at 6..0.
    """
    c = codes.int()
    low, high = c[..., 0, :], c[..., 1, :]
    halves = (low & 0x80) << 8 | (low & 0x7F) << 7 | (high & 0x80) << 7 | high & 0x7F
    return halves[..., 0] | halves[..., 1] << 16


def _gather8(words: Tensor) -> Tensor:
    """The inverse of `_spread8`."""
    halves = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], dim=-1)
    low = halves >> 8 & 0x80 | halves >> 7 & 0x7F
    high = halves >> 7 & 0x80 | halves & 0x7F
    return torch.stack([low, high], dim=-2).to(torch.uint8)


_SIGNS4, _VALUES4 = (15, 12, 14, 13), (9, 6, 3, 0)
"""Bits of an fp16 where the four e2m1 codes of a step lie: (k pair 0, row half 0), (0,1), (1,0), (1,1)."""


def _spread4(codes: Tensor) -> Tensor:
    """Fragments of e2m1 codes [...,k pair,row half,k] -> 32-bit words [...]: each code's sign and value at
    the bits above."""
    c = codes.int().flatten(-3, -2)
    halves = sum((c[..., i, :] >> 3) << s | (c[..., i, :] & 7) << v for i, (s, v) in _PLACES4)
    assert isinstance(halves, Tensor)
    return halves[..., 0] | halves[..., 1] << 16


_PLACES4 = tuple(enumerate(zip(_SIGNS4, _VALUES4, strict=True)))


def _gather4(words: Tensor) -> Tensor:
    """The inverse of `_spread4`."""
    halves = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], dim=-1)
    codes = [(halves >> s & 1) << 3 | halves >> v & 7 for _, (s, v) in _PLACES4]
    return torch.stack(codes, dim=-2).unflatten(-2, (2, 2)).to(torch.uint8)


def _pack8(codes: Tensor) -> Tensor:
    return _spread8(_fragments(codes)).contiguous().view(torch.uint8).view(codes.shape)


def _unpack8(packed: Tensor) -> Tensor:
    words = packed.contiguous().view(torch.int32)
    *lead, n, k = packed.shape
    return _from_fragments(_gather8(words.view(*lead, n // 16, k // 32, 32, 2, 2)))


def _pack4(pairs: Tensor) -> Tensor:
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    steps = _spread4(_fragments(codes))  # [...,tile,k/32,lane,step]
    words = steps.unflatten(-3, (-1, 2)).transpose(-2, -3)  # [...,tile,k/64,lane,k/32,step]
    return words.contiguous().view(torch.uint8).view(pairs.shape)


def _unpack4(packed: Tensor) -> Tensor:
    *lead, n, half = packed.shape
    words = packed.contiguous().view(torch.int32).view(*lead, n // 16, half // 32, 32, 2, 2)
    codes = _from_fragments(_gather4(words.transpose(-2, -3).flatten(-4, -3)))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _pack16(matrix: Tensor) -> Tensor:
    steps = _fragments(matrix.view(torch.int16)).transpose(-5, -4)  # [...,tile,k/32,step,lane,..]
    return steps.contiguous().view(matrix.dtype).view(matrix.shape)


def _unpack16(packed: Tensor) -> Tensor:
    *lead, n, k = packed.shape
    steps = packed.contiguous().view(torch.int16).view(*lead, n // 16, k // 32, 2, 32, 2, 2, 2)
    return _from_fragments(steps.transpose(-5, -4)).contiguous().view(packed.dtype)


def _pack_scales(scales: Tensor) -> Tensor:
    tiles = scales.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 16))
    return tiles.transpose(-2, -3).contiguous().view(scales.shape)


def _unpack_scales(packed: Tensor) -> Tensor:
    *lead, n, k = packed.shape
    return packed.reshape(*lead, n // 16, k // 4, 16, 4).transpose(-2, -3).reshape(packed.shape)


LAYOUTS: dict[str, WeightLayout] = {
    "": WeightLayout(lambda t: t, lambda t: t),
    "tile16": WeightLayout(_bytewise(_tiles), _bytewise(_rows)),
    "mma8": WeightLayout(_bytewise(_pack8), _bytewise(_unpack8)),
    "mma4": WeightLayout(_pack4, _unpack4),
    "mma16": WeightLayout(_pack16, _unpack16),
    "mma4_scale": WeightLayout(_bytewise(_pack_scales), _bytewise(_unpack_scales)),
}


def packable(layout: str, type: ValueType) -> bool:
    """Whether weights of a type can have a layout: tiles need matrices, fragments whole tiles of them."""
    if layout == "":
        return True
    if len(type.storage_shape) < 2:
        return False
    rows, columns = type.shape[-2:]
    match layout:
        case "mma8":
            return type.dtype is DType.F8E4M3 and rows % TILE == 0 and columns % 32 == 0
        case "mma4":
            return type.dtype is DType.E2M1 and rows % TILE == 0 and columns % 64 == 0
        case "mma16":
            return type.dtype.bits == 16 and rows % TILE == 0 and columns % 32 == 0
        case "mma4_scale":
            return type.dtype is DType.E8M0 and rows % TILE == 0 and columns % 4 == 0
    return True
