"""Kernels of the sm80 target: the phases of a decode step, and one kernel for every op behind them.

A decode step streams weights, so what lies between two streams rides in their prologues and epilogues:
norms and quantisation before a product, the residual streams and the next mixing logits behind it. The
phases below cover the parts of the fused nodes accordingly; a ratio-4 layer takes 11 launches, any other
9. Steps of more tokens, and graphs without the fusions, run on the kernels of single ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rewright.codegen.kernel import Call, KernelDef, Members, Slot
from rewright.codegen.kernels import sm80_layouts as layouts
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
    return KernelDef(
        (f"sm80.{symbol}",),
        covers,
        supports_decode,
        layouts=layouts.products,
        workspace=workspace.streamed,
        carries=_parts_of_logits,
    )


def _parts_of_logits(call: Call) -> Mapping[str, str]:
    """Mixing logits leave a phase as a part from each thread block; the reader adds them up."""
    return {mix.unit.results[0]: "hc_partials" for mix in call.each("hc_mix")}


_QUANTISED = ("quantize", "quantize_static")
_NORMED = ("rms_norm", *_QUANTISED)

START = _phase(
    "start", _slot("embed"), _slot("hc_expand", after=("embed",)), _slot("hc_mix", after=("hc_expand",))
)
"""The streams of a step's tokens, and the first mixing logits."""

SUBLAYER_IN = _phase(
    "sublayer_in",
    _slot("hc_split"),
    _slot("hc_collapse"),
    _slot("rms_norm", after=("hc_collapse",), optional=True),
    _slot(*_QUANTISED, after=("rms_norm",), optional=True),
    _slot("linear", after=(*_NORMED, "hc_collapse"), many=True),
)
"""The sub-block's input and every product of it (A: latent queries and keys, compressor rows, index
weights; G: gate logits and the shared expert's hidden row)."""

NORMED_IN = _phase(
    "normed_in",
    _slot("rms_norm"),
    _slot(*_QUANTISED, after=("rms_norm",), optional=True),
    _slot("linear", after=_NORMED, many=True),
)
"""B: queries from the latent, for attention and for the index."""

INDEX_SELECT = KernelDef(
    ("sm80.index_select_score", "sm80.index_select_topk"),
    (Slot(("index_select",)),),
    supports,
    workspace=workspace.index_select,
)
"""C and D: scores of all entries, then the best of them."""

ATTENTION = KernelDef(
    ("sm80.attention_split", "sm80.attention_combine"),
    (Slot(("attention",)),),
    supports,
    workspace=workspace.attention,
)
"""E and F: attention over parts of the keys, then their sum."""

ATTN_OUT = _phase(
    "attn_out",
    _slot(*_QUANTISED, optional=True),
    _slot("linear", after=_QUANTISED),
    _slot("hc_combine", after=("linear",)),
    _slot("hc_mix", after=("hc_combine",), optional=True),
)
"""wo_b, the streams behind it, and their mixing logits."""

EXPERTS_IN = _phase(
    "experts_in",
    _slot("swiglu"),
    _slot(*_QUANTISED, after=("swiglu",), optional=True),
    _slot("linear", after=("swiglu", *_QUANTISED)),
    Slot(("route", "route_hash"), anywhere=True),
    Slot(
        ("expert_linear",), many=True, fits=lambda unit, members: members.maker(unit.operands[4]) is not None
    ),
)
"""H: choice of experts and their gates; the shared expert's down projection rides along."""

EXPERTS_OUT = _phase(
    "experts_out",
    _slot("swiglu"),
    _slot(*_QUANTISED, after=("swiglu",), optional=True),
    _slot("expert_linear", after=("swiglu", *_QUANTISED)),
    _slot("expert_sum", after=("expert_linear",)),
    _slot("hc_combine", after=("expert_sum",)),
    _slot("hc_mix", after=("hc_combine",), optional=True),
)
"""I: the experts' down projections, the streams behind them, and their mixing logits."""

HEAD = _phase(
    "head",
    _slot("hc_head_split"),
    _slot("hc_collapse"),
    _slot("rms_norm", after=("hc_collapse",), optional=True),
    _slot("linear", after=(*_NORMED, "hc_collapse")),
)
"""The final collapse and the logits."""

# ATTN_OUT before EXPERTS_IN, which would be content with its linear.
PHASES = (
    START,
    SUBLAYER_IN,
    NORMED_IN,
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
    "grouped_linear": workspace.streamed,
    "index_select": workspace.index_select,
    "linear": workspace.streamed,
    "sparse_attention": workspace.attention,
}
"""Of kernels of one op that split their work and join it, or stream weights."""


def _single(op: str) -> KernelDef:
    return KernelDef(
        (f"sm80.{op}",),
        (Slot((op,)),),
        supports,
        layouts=layouts.products,
        workspace=_WORKSPACE.get(op, lambda _: 0),
    )


SINGLE = tuple(_single(name) for name, op in registry().items() if op.composition is None or name in FUSED)
"""One kernel for every op that is not taken apart."""

KERNELS = (*PHASES, *SINGLE)
