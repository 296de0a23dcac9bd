"""The key/value row of a token: norm, RoPE, rounding, and at T = 1 the write into the window."""

from __future__ import annotations

from rewright.ir import ops
from rewright.ir.graph import type_of_value
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rounding import rounded, rounding_attrs, rounds_alike
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict

_ATTENTION = ("q", "window", "compressed", "indices", "sink", "pos", "n_valid", "slot")


def _attention(kv: object) -> OpPattern:
    operands = {name: maybe(name) for name in _ATTENTION}
    return p.sparse_attention("attend", kv=kv, **operands)


class KvRows(Rule):
    """Norm, RoPE and rounding of the keys that an attention reads -> kv_rows."""

    name = "kv_rows"
    keeps = ("attend",)

    def pattern(self) -> OpPattern:
        norm = p.rms_norm("norm", x="x", weight="weight")
        turned = p.rope("turn", x=norm, cos="cos", sin="sin", pos="pos")
        return _attention(rounded(turned))

    yields = ("round", "turn")

    def check(self, m: Match, facts: Facts) -> Verdict:
        turn = m.attrs("turn")
        if turn["stride"] != 1 or turn["inverse"]:
            return No("the rotation is not that of tokens", m.nodes["turn"])
        if "round" in m and (readers := m.read_outside("turn")):
            return No("the keys before the rounding are read elsewhere", readers[0])
        return Ok() if rounds_alike(m) else No("the two halves of the rounding differ", m.nodes["round"])

    def rewrite(self, m: Match, new: Rewriter) -> None:
        attrs = {"eps": m.attrs("norm")["eps"], **rounding_attrs(m)}
        operands = m.pick("x", "weight", "cos", "sin", "pos")
        new(ops.kv_rows, operands, attrs, gives=[m.result("round" if "round" in m else "turn")])


class KvWrite(Rule):
    """At T = 1 kv_rows and ring_write -> kv_write, and attention reads the ring that holds the row."""

    name = "kv_write"

    def pattern(self) -> tuple[OpPattern, ...]:
        rows = p.kv_rows("rows", x="x", weight="weight", cos="cos", sin="sin", pos="pos")
        store = p.ring_write("store", ring="window", rows=rows, pos="pos", n_valid="n_valid", slot="slot")
        return _attention(rows), store

    def check(self, m: Match, facts: Facts) -> Verdict:
        tokens = type_of_value(m.value("x")).shape[1]
        if tokens > 1:
            return No("a chunk of several tokens would overwrite keys that it still reads", m.nodes["store"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        operands = m.pick("x", "weight", "cos", "sin", "pos", "n_valid", "slot", "window")
        attrs = {**m.attrs("rows"), "window_rows": m.attrs("store")["ring_rows"]}
        (window,) = new(ops.kv_write, operands, attrs, gives=[m.result("store")])
        attention = {**m.pick(*_ATTENTION), "window": window}
        new(ops.sparse_attention, attention, m.attrs("attend"), gives=[m.result("attend")])


PASS = Pass(
    name="fuse_kv_write",
    stage="fused",
    summary="Makes one node of norm, RoPE, rounding and, when decoding, the window write of a key row.",
    refuses="The write when a chunk has several tokens: they read keys that it would overwrite.",
    rules=(KvRows(), KvWrite()),
)
