"""Scores of compressed entries and the choice of the best, without storing the scores."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class IndexSelect(Rule):
    """index_topk(index_score(..)) -> index_select."""

    name = "index_select"

    def pattern(self) -> OpPattern:
        names = ("q", "weights", "keys", "pos", "n_valid", "slot")
        score = p.index_score("score", **{name: name for name in names})
        return p.index_topk("choose", scores=score, pos="pos", n_valid="n_valid")

    def check(self, m: Match, facts: Facts) -> Verdict:
        same = m.attrs("score")["ratio"] == m.attrs("choose")["ratio"]
        return Ok() if same else No("scores and choice count entries at different ratios", m.nodes["choose"])

    def rewrite(self, m: Match, new: Rewriter) -> None:
        operands = m.pick("q", "weights", "keys", "pos", "n_valid", "slot")
        attrs = {**m.attrs("score"), "k": m.attrs("choose")["k"]}
        new(ops.index_select, operands, attrs, gives=[m.result("choose")])


PASS = Pass(
    name="fuse_index_select",
    stage="fused",
    summary="Makes one node of index scores and their top-k, so that the scores need not be stored.",
    refuses="Scores that are read elsewhere.",
    rules=(IndexSelect(),),
)
