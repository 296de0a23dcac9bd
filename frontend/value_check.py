"""Refuses stored values that no model can compute with: NaN codes and non-finite floats."""

from __future__ import annotations

import math

import torch

from rewright.ir.errors import BadInput

# dtype -> integer type of the same width, mask, smallest masked code that is not a finite number.
# Comparing codes needs no arithmetic on types that torch has none for.
_NON_FINITE: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float8_e4m3fn: (torch.uint8, 0x7F, 0x7F),
    torch.float8_e8m0fnu: (torch.uint8, 0xFF, 0xFF),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
}
_CHUNK = 1 << 18  # elements; bounds the temporaries and keeps them in the cache


def check_values(tensor: torch.Tensor, name: str) -> None:
    """Check that every float, FP8 code and scale of a contiguous tensor is a finite number.

    Integers and packed FP4 codes have no such values.

    Raises:
        BadInput: names the tensor, the index of the first offender and its code.
    """
    if tensor.dtype not in _NON_FINITE:
        return
    as_int, mask, least = _NON_FINITE[tensor.dtype]
    codes = tensor.view(as_int).view(-1)
    for start in range(0, codes.numel(), _CHUNK):
        chunk = codes[start : start + _CHUNK] & mask
        if int(chunk.max()) >= least:
            offset = int((chunk >= least).nonzero()[0])
            _refuse(tensor, start + offset, name)


def _refuse(tensor: torch.Tensor, position: int, name: str) -> None:
    index = [int(i) for i in torch.unravel_index(torch.tensor(position), tensor.shape)]
    element = tensor.view(-1)[position]
    value = element.to(torch.float64).item()
    shown = "NaN" if math.isnan(value) else str(value)
    code = "".join(f"{byte:02X}" for byte in reversed(element.view(1).view(torch.uint8).tolist()))
    what = f"holds {shown} (code 0x{code}) at index {index}"
    raise BadInput(what, where=name, fix="download its shard again, or repair the weights it was made from")
