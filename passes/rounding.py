"""The pattern of a rounding (quantise and dequantise), which numerics without roundings lack."""

from __future__ import annotations

from typing import Any

from rewright.passes.match import Match
from rewright.passes.pattern import Either, OpPattern, either, p


def rounded(x: OpPattern) -> Either:
    """x through a rounding of all of its last axis or of a part, or x itself.

    Labels: quant, round.
    """
    quant = p.quantize("quant", x=x)
    part = p.dequantize("round", codes=quant, scale=quant[1], base=x)
    whole = p.dequantize("round", codes=quant, scale=quant[1])
    return either(part, whole, x)


def rounding_attrs(m: Match) -> dict[str, Any]:
    """fmt, block, dims and out of a matched rounding, empty where there is none."""
    if "round" not in m:
        return {}
    return {**m.attrs("quant"), "out": m.attrs("round")["out"]}


def rounds_alike(m: Match) -> bool:
    """Whether both halves of a matched rounding have the same block and dims."""
    if "round" not in m:
        return True
    quant, back = m.attrs("quant"), m.attrs("round")
    return all(quant[name] == back[name] for name in ("block", "dims"))
