"""Kernels of the sm80 target: the phases of a decode step, and one kernel for every op behind them.

A decode step streams weights, so what lies between two streams rides in their prologues and epilogues:
norms and quantisation before a product, the residual streams and the next mixing logits behind it. The
phases below cover the parts of the fused nodes accordingly; a ratio-4 layer takes 11 launches, any other
9. Steps of more tokens, and graphs without the fusions, run on the kernels of single ops.
"""

from __future__ import annotations

from collections.abc import Callable

from rewright.codegen.kernel import Call, KernelDef, Members, Slot
from rewright.codegen.kernels import sm80_workspace as workspace
from rewright.codegen.kernels.sm80_limits import supports, supports_decode
from rewright.codegen.units import Unit
from rewright.ir.op import registry

FUSED = ("attention", "compress_write", "index_query", "index_select", "kv_rows", "kv_write")
"""Fused ops that some kernel takes whole; the others are taken apart."""


def _slot(*ops: str, after: tuple[str, ...] = (), optional: bool = False, many: bool = False) -> Slot:
    """A slot for units that multiply, norm or sum what a unit of one of the ops `after` makes; a unit that
    begins the phase comes after nothing."""

    def fits(unit: Unit, members: Members) -> bool:
        if not after or not members.units:
            return True
        maker = members.maker(unit.operands[0])
        return maker is not None and maker.op.name in after

    return Slot(ops, optional=optional, many=many, fits=fits)


def _phase(symbol: str, *covers: Slot) -> KernelDef:
    return KernelDef((f"sm80.{symbol}",), covers, supports_decode, workspace=workspace.streamed)


_NORMED = ("rms_norm", "quantize")

# The sub-block's input, and every product of it: coefficients, collapse, norm, quantisation.
_INPUT = (
    _slot("hc_split"),
    _slot("hc_collapse"),
    _slot("rms_norm", after=("hc_collapse",)),
    _slot("quantize", after=("rms_norm",), optional=True),
    _slot("linear", after=_NORMED, many=True),
)

EMBED = _phase(
    "start", _slot("embed"), _slot("hc_expand", after=("embed",)), _slot("hc_mix", after=("hc_expand",))
)
"""The streams of a step's tokens, and the first mixing logits."""

ATTN_IN = _phase("attn_in", *_INPUT)
"""A: latent queries and keys, compressor rows, index weights."""

ATTN_Q = _phase(
    "attn_q",
    _slot("rms_norm"),
    _slot("quantize", after=("rms_norm",), optional=True),
    _slot("linear", after=_NORMED, many=True),
    _slot("index_query", after=("linear",), optional=True),
    Slot(("kv_write",), optional=True, anywhere=True),
    Slot(("compress_write",), optional=True, many=True, anywhere=True),
)
"""B: queries from the latent, index queries; beside them the small work on keys and entries."""

INDEX_SELECT = KernelDef(
    ("sm80.index_select_score", "sm80.index_select_topk"),
    (Slot(("index_select",)),),
    supports_decode,
    workspace=workspace.index_select,
)
"""C and D: scores of all entries, then the best of them."""

ATTENTION = KernelDef(
    ("sm80.attention_split", "sm80.attention_combine"),
    (Slot(("attention",)),),
    supports_decode,
    workspace=workspace.attention,
)
"""E and F: attention over parts of the keys, then their sum."""

ATTN_OUT = _phase(
    "attn_out",
    _slot("quantize", optional=True),
    _slot("linear", after=("quantize",)),
    _slot("hc_combine", after=("linear",)),
    _slot("hc_mix", after=("hc_combine",)),
)
"""wo_b, the streams behind it, and their mixing logits."""

FFN_IN = _phase("ffn_in", *_INPUT, _slot("swiglu", after=("linear",)))
"""G: gate logits, and the shared expert up to its hidden row."""

EXPERTS_IN = _phase(
    "experts_in",
    _slot("quantize", optional=True),
    _slot("linear", after=("quantize",)),
    Slot(("route", "route_hash"), anywhere=True),
    Slot(
        ("expert_linear",), many=True, fits=lambda unit, members: members.maker(unit.operands[4]) is not None
    ),
    _slot("swiglu", after=("expert_linear",)),
)
"""H: choice of experts and their hidden rows; the shared expert's down projection rides along."""

EXPERTS_OUT = _phase(
    "experts_out",
    _slot("quantize", optional=True),
    _slot("expert_linear", after=("quantize",)),
    _slot("expert_sum", after=("expert_linear",)),
    _slot("hc_combine", after=("expert_sum",)),
    _slot("take_last", after=("hc_combine",), optional=True),
    _slot("hc_mix", after=("hc_combine", "take_last")),
)
"""I: the experts' down projections, the streams behind them, and their mixing logits."""

HEAD = _phase(
    "head",
    _slot("hc_head_split"),
    _slot("hc_collapse"),
    _slot("rms_norm", after=("hc_collapse",)),
    _slot("linear", after=("rms_norm",)),
)
"""The final collapse and the logits."""

# FFN_IN before ATTN_IN, which would be content with its gate; ATTN_OUT before EXPERTS_IN likewise.
PHASES = (
    EMBED,
    FFN_IN,
    ATTN_IN,
    ATTN_Q,
    INDEX_SELECT,
    ATTENTION,
    ATTN_OUT,
    EXPERTS_IN,
    EXPERTS_OUT,
    HEAD,
)
"""The phases of a decode step."""


_WORKSPACE: dict[str, Callable[[Call], int]] = {
    "attention": workspace.attention,
    "index_select": workspace.index_select,
    "sparse_attention": workspace.attention,
}
"""Of kernels of one op that split their work and join it."""


def _single(op: str) -> KernelDef:
    return KernelDef((f"sm80.{op}",), (Slot((op,)),), supports, workspace=_WORKSPACE.get(op, lambda _: 0))


SINGLE = tuple(_single(name) for name, op in registry().items() if op.composition is None or name in FUSED)
"""One kernel for every op that is not taken apart."""

KERNELS = (*PHASES, *SINGLE)
