"""Hyper-Connections: mixing before a sub-block, its output's way back, norms, the final collapse."""

from __future__ import annotations

from typing import Any

from rewright.ir import ops
from rewright.ir.graph import type_of_value
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, either, maybe, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict

MOST_STREAMS = 8


def _few_streams(m: Match, label: str, value: str) -> Verdict:
    n = type_of_value(m.value(value)).shape[-2]
    return Ok() if n <= MOST_STREAMS else No(f"{n} streams are more than {MOST_STREAMS}", m.nodes[label])


class Pre(Rule):
    """hc_mix, hc_split, hc_collapse -> hc_pre."""

    name = "hc_pre"
    yields = ("split",)

    def pattern(self) -> OpPattern:
        mix = p.hc_mix("mix", streams="streams", fn="fn")
        split = p.hc_split("split", mix=mix, scale="scale", base="base")
        return p.hc_collapse("collapse", streams="streams", pre=split)

    def check(self, m: Match, facts: Facts) -> Verdict:
        if readers := m.read_outside("split", 0):
            return No("the weights of the sum are read elsewhere", readers[0])
        return _few_streams(m, "collapse", "streams")

    def rewrite(self, m: Match, new: Rewriter) -> None:
        split = m.attrs("split")
        attrs = {"n": split["streams"], "iters": split["iters"], "hc_eps": split["eps"]}
        operands = m.pick("streams", "fn", "scale", "base")
        gives = [m.result("collapse"), m.result("split", 1), m.result("split", 2)]
        new(ops.hc_pre, operands, {**attrs, "eps": m.attrs("mix")["eps"]}, gives=gives)


class PreNorm(Rule):
    """The norm behind hc_pre, with its quantisation if there is one, joins it."""

    name = "pre_norm"
    home = "pre"
    yields = ("pre",)

    def __init__(self, norm: str):
        self.norm = norm  # rms_norm or rms_norm_quant

    def pattern(self) -> OpPattern:
        pre = p.hc_pre("pre", streams="streams", fn="fn", scale="scale", base="base")
        return OpPattern(self.norm, "norm", (("x", pre), ("weight", either("norm"))))

    def check(self, m: Match, facts: Facts) -> Verdict:
        if readers := m.read_outside("pre", 0):
            return No("the value before the norm is read elsewhere", readers[0])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        norm = m.attrs("norm")
        attrs: dict[str, Any] = {**m.attrs("pre"), "norm_eps": norm["eps"]}
        if self.norm == "rms_norm_quant":
            attrs |= {name: norm[name] for name in ("fmt", "block", "keep")}
        gives = [*m.results("norm"), m.result("pre", 1), m.result("pre", 2)]
        new(ops.hc_pre, m.pick("streams", "fn", "scale", "base", "norm"), attrs, gives=gives)


class PostPre(Rule):
    """hc_combine of one sub-block and hc_pre of the next -> hc_post_pre."""

    name = "hc_post_pre"
    yields = ("combine",)

    def pattern(self) -> OpPattern:
        combine = p.hc_combine("combine", y="y", streams="before", post="post", comb="comb")
        return p.hc_pre("pre", streams=combine, fn="fn", scale="scale", base="base", norm=maybe("norm"))

    def rewrite(self, m: Match, new: Rewriter) -> None:
        operands = m.pick("y", "before", "post", "comb", "fn", "scale", "base", "norm")
        gives = [m.result("combine"), *m.results("pre")]
        new(ops.hc_post_pre, operands, m.attrs("pre"), gives=gives)


class Head(Rule):
    """The final collapse with its norm -> hc_head, of the last valid token if only that is wanted."""

    name = "hc_head"

    def __init__(self, last_only: bool):
        self.last_only = last_only

    def pattern(self) -> OpPattern:
        streams: Any = "streams"
        if self.last_only:
            last = p.take_last("last", x="streams", n_valid="n_valid")
            streams = p.reshape("row", x=last)
        mix = p.hc_mix("mix", streams=streams, fn="fn")
        split = p.hc_head_split("split", mix=mix, scale="scale", base="base")
        collapse = p.hc_collapse("collapse", streams=streams, pre=split)
        return p.rms_norm(
            "norm", x=p.reshape("out", x=collapse) if self.last_only else collapse, weight="norm"
        )

    def check(self, m: Match, facts: Facts) -> Verdict:
        shape = m.nodes["collapse"].meta["types"][0].shape
        if self.last_only:
            row, out = m.attrs("row"), m.attrs("out")
            batch, _, *streams = type_of_value(m.value("streams")).shape
            if row["keep"] != 1 or m.nodes["row"].meta["types"][0].shape != (batch, 1, *streams):
                return No("the last token's streams are no row [B,1,n,D]", m.nodes["row"])
            if out["keep"] != 1 or len(out["tail"]) != 1:
                return No("the row does not come out as [B,D]", m.nodes["out"])
            return _few_streams(m, "collapse", "streams")
        return (
            _few_streams(m, "collapse", "streams")
            if len(shape) == 3
            else No("no [B,T,D]", m.nodes["collapse"])
        )

    def rewrite(self, m: Match, new: Rewriter) -> None:
        n = type_of_value(m.value("streams")).shape[-2]
        attrs = {
            "n": n,
            "eps": m.attrs("mix")["eps"],
            "hc_eps": m.attrs("split")["eps"],
            "norm_eps": m.attrs("norm")["eps"],
        }
        operands = m.pick("streams", "n_valid", "fn", "scale", "base", "norm")
        new(ops.hc_head, operands, attrs, gives=[m.result("norm")])


PASS = Pass(
    name="fuse_hyper_connection",
    stage="fused",
    summary="Makes one node of the Hyper-Connections between two sub-blocks and the norm behind them.",
    refuses=f"More than {MOST_STREAMS} streams; inner values that are read elsewhere.",
    rules=(
        Pre(),
        PreNorm("rms_norm_quant"),
        PreNorm("rms_norm"),
        PostPre(),
        Head(last_only=True),
        Head(last_only=False),
    ),
    requires=("canonicalize", "eliminate_quant", "fuse_norm_quant"),
)
