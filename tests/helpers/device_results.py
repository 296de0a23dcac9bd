"""What is equal among results of a card and of a reference."""

from __future__ import annotations

import torch
from torch import Tensor

from rewright.ir.formats import decode_codes

# Largest difference of a result relative to its largest value: steps of its format, of which a sum in
# another order can move a value by one or two where it stands at the edge of two.
STEPS = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float8_e4m3fn: 2**-3, torch.uint8: 0.5}


def compare(got: Tensor, want: Tensor) -> None:
    """Equal but for rounding; codes, integers and what is not finite are compared as they should be."""
    if want.dtype in (torch.int32, torch.int64) or want.dtype == torch.float8_e8m0fnu:
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        return
    step = STEPS[want.dtype]
    g, w = (decode_codes(t) if t.dtype == torch.uint8 else t for t in (got, want))
    g, w = g.double(), w.double()
    finite = w.isfinite()
    assert torch.equal(g[~finite].nan_to_num(), w[~finite].nan_to_num())
    if finite.any():
        assert (g - w)[finite].abs().max() <= step * w[finite].abs().max()
