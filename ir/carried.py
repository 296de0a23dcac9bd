"""Forms in which one kernel hands a value on to another, where they are not the value row by row.

`hc_partials` are mixing logits of Hyper-Connections, f32[B,T,M], before their sum: each of
`PARTIAL_BLOCKS` thread blocks leaves f32[B*T,32] with its share of the M dot products and, at column 31,
of the sum of squares; column 30 of the first holds eps. The reader adds them up in order, then applies the
norm factor.
"""

from __future__ import annotations

from rewright.ir.types import ValueType

PARTIAL_BLOCKS = 132
"""Thread blocks that leave partial sums: as many as a launch has at most."""
PARTIAL_COLUMNS = 32

FORMS = ("hc_partials",)


def carried_bytes(form: str, type: ValueType) -> int:
    """Bytes of a value in a form."""
    if form != "hc_partials":
        raise ValueError(f"there is no form {form!r}")
    rows = type.numel // type.shape[-1]
    return PARTIAL_BLOCKS * rows * PARTIAL_COLUMNS * 4
