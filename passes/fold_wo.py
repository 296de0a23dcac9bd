"""wo_b . wo_a as one matrix."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rewright.ir import ops
from rewright.ir.derived import DerivedWeight
from rewright.ir.errors import Refused
from rewright.ir.formats import dequantize_weight
from rewright.ir.graph import name_of, operands_of, type_of_value
from rewright.ir.types import DType, ValueType
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, either, maybe, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict

FOLDED = ".wo.weight"
"""What the name of a folded matrix ends with."""


def is_folded(weight: str) -> bool:
    """Whether a weight of this name is wo_a and wo_b in one."""
    return weight.endswith(FOLDED)


class FoldWo(Rule):
    """wo_b(wo_a(o)) -> linear(o) with one matrix [D, G*K], computed in fp64.

    With r rows a group, n outputs and k inputs of a group the two matrices hold (n + k) r elements a
    group and the product n k: it pays when the rank is large, or where the launch saved outweighs
    the bytes. It drops the rounding of wo_a's result and the quantisation behind it.
    """

    name = "fold_wo"
    keeps_numerics = False

    def __init__(self, quantized: bool):
        self.quantized = quantized

    def pattern(self) -> tuple[OpPattern, ...]:
        groups = either(p.reshape("groups", x="o"), "o")  # heads that are groups need no reshape
        first = p.grouped_linear("first", x=groups, weight="wo_a", scale=maybe("s_a"))
        flat = p.reshape("flat", x=first)
        weight = {"weight": "wo_b", "scale": maybe("s_b")}
        if not self.quantized:
            return first, flat, p.linear("second", x=flat, **weight)
        quant = p.quantize("quant", x=flat)
        return first, flat, quant, p.linear("second", x=quant, x_scale=quant[1], **weight)

    def check(self, m: Match, facts: Facts) -> Verdict:
        for label in m.nodes.keys() & {"groups", "flat"}:
            if m.attrs(label)["keep"] != 2 or (label == "flat" and len(m.attrs(label)["tail"]) != 1):
                return No("the groups are not laid side by side", m.nodes[label])
        if m.attrs("quant").get("dims") is not None:
            return No("only a part of the axis is quantised", m.nodes["quant"])
        if facts.fold_wo == "never":
            return No("it is switched off", m.nodes["second"])
        if any(type_of_value(m.value(name)).dtype is DType.E2M1 for name in ("wo_a", "wo_b")):
            return No("the precision plan stores its parts as FP4", m.nodes["second"])
        if facts.fold_wo == "always":
            return Ok()
        folded, apart = self.folded(m).nbytes, self._bytes_apart(m)
        sizes = f"{folded:,} bytes folded against {apart:,} as stored"
        if facts.numerics == "faithful":
            reason = "faithful numerics keep the rounding and the quantisation between the two"
            return No(f"{reason}; {sizes}", m.nodes["second"])
        return Ok() if folded < apart else No(sizes, m.nodes["second"])

    @staticmethod
    def folded(m: Match) -> ValueType:
        """Type of the product: [D, G*K] in the dtype of the activation."""
        groups, width = _groups(m)
        activation = type_of_value(m.value("o")).dtype
        return ValueType(activation, (type_of_value(m.value("wo_b")).shape[0], groups * width))

    @staticmethod
    def _bytes_apart(m: Match) -> int:
        stored = (m.values.get(name) for name in ("wo_a", "s_a", "wo_b", "s_b"))
        return sum(type_of_value(v).nbytes for v in stored if v is not None)

    def rewrite(self, m: Match, new: Rewriter) -> None:
        type = self.folded(m)
        groups, _ = _groups(m)
        sources = [m.values.get(name) for name in ("wo_a", "s_a", "wo_b", "s_b")]
        name = name_of(m.value("wo_a")).removesuffix(".wo_a.weight") + FOLDED
        scaled = tuple(v is not None for v in sources)
        weight = new.weight(
            DerivedWeight(
                name=name,
                type=type,
                sources=tuple(name_of(v) for v in sources if v is not None),
                compute=partial(_fold_stored, name=name, scaled=scaled, groups=groups, dtype=type.dtype),
            )
        )
        tail = {"tail": [type.shape[1]], "keep": 2}
        names = [m.result("groups").name if "groups" in m else f"{name_of(m.value('o'))}.flat"]
        (flat,) = new(ops.reshape, {"x": m["o"]}, tail, gives=[None], names=names)
        out = {"out": m.attrs("second")["out"]}
        new(ops.linear, {"x": flat, "weight": weight}, out, gives=[m.result("second")])


def _groups(m: Match) -> tuple[int, int]:
    """Groups, and inputs of one."""
    x = operands_of(m.nodes["first"])[0]
    assert x is not None
    _, _, groups, width = type_of_value(x).shape
    return groups, width


def _fold_stored(*tensors: Tensor, name: str, scaled: tuple[bool, ...], groups: int, dtype: DType) -> Tensor:
    """The folded matrix from the stored tensors of wo_a and wo_b, with or without scales."""
    given = iter(tensors)
    wo_a, s_a, wo_b, s_b = (next(given) if present else None for present in scaled)
    assert wo_a is not None
    assert wo_b is not None
    first, second = dequantize_weight(wo_a, s_a).double(), dequantize_weight(wo_b, s_b).double()
    folded = fold(first, second, groups).to(dtype.torch_dtype)
    check_fold(folded, first, second, groups, name)
    return folded


def fold(wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    """wo_a f64[G*R,K], wo_b f64[D,G*R] -> f64[D,G*K]: column block g is wo_b's block g times wo_a's."""
    first = wo_a.unflatten(0, (groups, -1))
    second = wo_b.unflatten(1, (groups, -1))
    return torch.cat([second[:, g] @ first[g] for g in range(groups)], dim=1)


def check_fold(folded: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int, name: str) -> None:
    """Compare the folded matrix with the two on random vectors; `Refused` beyond its own rounding.

    Rounding F to its dtype changes y = F x by at most eps/2 |F| |x| per element, far less than what a
    wrong order of groups does.
    """
    x = torch.randn(4, folded.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    middle = torch.einsum("bgk,grk->bgr", x.unflatten(1, (groups, -1)), wo_a.unflatten(0, (groups, -1)))
    want = middle.flatten(1) @ wo_b.mT
    wide = folded.double()
    limit = torch.finfo(folded.dtype).eps * (x.abs() @ wide.abs().mT) + torch.finfo(torch.float64).eps
    error = (x @ wide.mT - want).abs()
    if not (error <= limit).all():
        worst = float((error / limit).max())
        raise Refused(
            f"the folded matrix is not the product of its parts: {worst:.3g} times the rounding error",
            where=name,
            fix="compile with --fold-wo never and report it",
        )


PASS = Pass(
    name="fold_wo",
    stage="fused",
    summary="Folds wo_a and wo_b into one matrix where that saves bytes.",
    refuses="Where the product holds more bytes than its parts, and in faithful numerics, unless forced.",
    rules=(FoldWo(quantized=True), FoldWo(quantized=False)),
    requires=("eliminate_quant",),
)
