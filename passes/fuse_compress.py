"""Compression of a chunk: pooling, norm, RoPE, Hadamard rotation, rounding, and every state write."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, either, p
from rewright.passes.rounding import rounded, rounding_attrs, rounds_alike
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class CompressWrite(Rule):
    """Everything between the projections of a compressor and its next state -> compress_write."""

    name = "compress_write"

    def pattern(self) -> tuple[OpPattern, ...]:
        at = {"pos": "pos", "n_valid": "n_valid", "slot": "slot"}
        bias = p.add_position_bias("bias", gate="gate", ape="ape", pos="pos")
        pool = p.compress("pool", kv="kv", gate=bias, kv_ring="kv_ring", gate_ring="gate_ring", **at)
        norm = p.rms_norm("norm", x=pool, weight="norm")
        turned = p.rope("turn", x=norm, cos="cos", sin="sin", pos="pos")
        entries = either(rounded(p.hadamard("rotate", x=turned)), rounded(turned))
        store = p.entry_write("store", cache="cache", entries=entries, count=pool[1], pos="pos", slot="slot")
        kv_store = p.ring_write("kv_store", ring="kv_ring", rows="kv", **at)
        gate_store = p.ring_write("gate_store", ring="gate_ring", rows=bias, **at)
        return store, kv_store, gate_store

    def check(self, m: Match, facts: Facts) -> Verdict:
        pool, turn, store = m.attrs("pool"), m.attrs("turn"), m.attrs("store")
        if turn["stride"] != pool["ratio"] or turn["inverse"]:
            return No("entries are not turned by their first token", m.nodes["turn"])
        if store["ratio"] != pool["ratio"]:
            return No("entries are pooled and stored at different ratios", m.nodes["store"])
        if m.attrs("kv_store")["ring_rows"] or m.attrs("gate_store")["ring_rows"]:
            return No("the rings of the compressor are packed", m.nodes["kv_store"])
        return Ok() if rounds_alike(m) else No("the two halves of the rounding differ", m.nodes["round"])

    def rewrite(self, m: Match, new: Rewriter) -> None:
        pool = m.attrs("pool")
        attrs = {
            "ratio": pool["ratio"],
            "overlap": pool["overlap"],
            "pooled": pool["out"],
            "eps": m.attrs("norm")["eps"],
            "rotate": "rotate" in m,
            **rounding_attrs(m),
            "cache_rows": m.attrs("store")["cache_rows"],
        }
        names = ("kv", "gate", "ape", "kv_ring", "gate_ring", "cache", "norm", "cos", "sin")
        gives = [m.result("kv_store"), m.result("gate_store"), m.result("store")]
        new(ops.compress_write, m.pick(*names, "pos", "n_valid", "slot"), attrs, gives=gives)


PASS = Pass(
    name="fuse_compress",
    stage="fused",
    summary="Makes one node of a compressor from its projections to its next state.",
    refuses="A pooled value that is read elsewhere.",
    rules=(CompressWrite(),),
)
