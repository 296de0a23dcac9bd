"""Attention with what its queries and its result go through."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict

_OTHERS = ("kv", "window", "compressed", "indices", "sink", "n_valid", "slot")


class Attention(Rule):
    """Heads, head norm, RoPE, sparse_attention, inverse RoPE, groups -> attention.

    Where every head is a group of its own there is no reshape into groups.
    """

    name = "attention"

    def __init__(self, *, grouped: bool):
        self.grouped = grouped

    def pattern(self) -> tuple[OpPattern, ...]:
        tables = {"cos": "cos", "sin": "sin", "pos": "pos"}
        norm = p.head_rms_norm("norm", x=p.reshape("heads", x="q"))
        turned = p.rope("turn", x=norm, **tables)
        others = {name: maybe(name) for name in _OTHERS}
        attend = p.sparse_attention("attend", q=turned, pos="pos", **others)
        back = p.rope("back", x=attend, **tables)
        return (attend, back, p.reshape("groups", x=back)) if self.grouped else (attend, back)

    def check(self, m: Match, facts: Facts) -> Verdict:
        turn, back, heads = m.attrs("turn"), m.attrs("back"), m.attrs("heads")
        if turn["stride"] != 1 or turn["inverse"]:
            return No("the queries are not turned by their token", m.nodes["turn"])
        if back["stride"] != 1 or not back["inverse"]:
            return No("the result is not turned back", m.nodes["back"])
        if len(heads["tail"]) != 2 or heads["keep"] != 2:
            return No("the projection is not split into heads", m.nodes["heads"])
        if self.grouped and m.attrs("groups")["keep"] != 2:
            return No("the result is not reshaped token by token", m.nodes["groups"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        last = "groups" if self.grouped else "back"
        attrs = {
            "heads": m.nodes["heads"].meta["types"][0].shape[2],
            "eps": m.attrs("norm")["eps"],
            "tail": list(m.nodes[last].meta["types"][0].shape[2:]),
            **m.attrs("attend"),
        }
        operands = m.pick("q", "cos", "sin", "pos", *_OTHERS)
        new(ops.attention, operands, attrs, gives=[m.result(last)])


PASS = Pass(
    name="fuse_attention",
    stage="fused",
    summary="Makes one node of attention, the head norm and RoPE before it and the inverse RoPE behind it.",
    refuses="Queries or results that are read elsewhere; RoPE that is not that of tokens, or not undone.",
    rules=(Attention(grouped=True), Attention(grouped=False)),
)
