"""Index queries: heads, RoPE, Hadamard rotation, rounding."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, p
from rewright.passes.rounding import rounded, rounding_attrs, rounds_alike
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class IndexQuery(Rule):
    """What lies between a projection and the queries of an index_score -> index_query."""

    name = "index_query"
    keeps = ("score",)

    def pattern(self) -> OpPattern:
        turned = p.rope("turn", x=p.reshape("heads", x="q"), cos="cos", sin="sin", pos="pos")
        query = rounded(p.hadamard("rotate", x=turned))
        others = {name: name for name in ("weights", "keys", "pos", "n_valid", "slot")}
        return p.index_score("score", q=query, **others)

    def check(self, m: Match, facts: Facts) -> Verdict:
        heads, turn = m.attrs("heads"), m.attrs("turn")
        if len(heads["tail"]) != 2 or heads["keep"] != 2:
            return No("the projection is not split into heads", m.nodes["heads"])
        if turn["stride"] != 1 or turn["inverse"]:
            return No("the rotation is not that of tokens", m.nodes["turn"])
        if "round" in m and (readers := m.read_outside("rotate")):
            return No("the queries before the rounding are read elsewhere", readers[0])
        if m.attrs("quant").get("dims") is not None:
            return No("only a part of the axis is rounded", m.nodes["quant"])
        return Ok() if rounds_alike(m) else No("the two halves of the rounding differ", m.nodes["round"])

    yields = ("round", "rotate")

    def rewrite(self, m: Match, new: Rewriter) -> None:
        rounding = {name: v for name, v in rounding_attrs(m).items() if name != "dims"}
        attrs = {"heads": m.nodes["heads"].meta["types"][0].shape[2], **rounding}
        result = m.result("round" if "round" in m else "rotate")
        new(ops.index_query, m.pick("q", "cos", "sin", "pos"), attrs, gives=[result])


PASS = Pass(
    name="fuse_index_query",
    stage="fused",
    summary="Makes one node of RoPE, Hadamard rotation and rounding of index queries.",
    refuses="Rounding of a part of the axis; rotated queries that are read before the rounding.",
    rules=(IndexQuery(),),
)
