"""How keys are stored, chosen by the kind of state: `--kv bf16|packed[,KIND=FORMAT...]`.

The released model rounds every key it stores: window and entries to e4m3 in blocks of 64 but for the RoPE
dims, index keys to e2m1 in blocks of 32. `packed` stores exactly these codes and changes no result. `fp4`
rounds window or entries to e2m1 instead, which loses something.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from rewright.frontend.numerics import Numerics
from rewright.ir.errors import UsageError
from rewright.ir.kv_format import RowFormat

OPTION = "--kv"


class KvFormat(Enum):
    """BF16 stores a rounded key as bf16 values, PACKED as the codes and scales that it was rounded to;
    FP4 rounds it to e2m1 and stores these codes."""

    BF16 = "bf16"
    PACKED = "packed"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True)
class Rounding:
    """Format of codes and elements that share a scale, as `quantize` takes them."""

    fmt: str
    block: int


_FP8, _FP4 = Rounding("e4m3", 64), Rounding("e2m1", 32)


@dataclass(frozen=True, slots=True)
class KvFormats:
    """One format for every kind of state that holds keys.

    Attributes:
        window: rings of recent keys, of every layer.
        csa: entries of layers of ratio 4.
        hca: entries of layers of any other ratio.
        index: index keys; FP4 is what the model itself rounds them to, so there is no lossy form.
    """

    window: KvFormat = KvFormat.BF16
    csa: KvFormat = KvFormat.BF16
    hca: KvFormat = KvFormat.BF16
    index: KvFormat = KvFormat.BF16

    @classmethod
    def every(cls, format: KvFormat) -> KvFormats:
        """The same format for every kind."""
        return cls(*[format] * len(KINDS))

    @property
    def plain(self) -> bool:
        """Whether nothing is packed."""
        return self == KvFormats()

    def __str__(self) -> str:
        """The shortest text that `parse_kv` reads as this; equal values have equal texts."""
        texts = [
            [base.value, *(f"{kind}={self.of(kind).value}" for kind in KINDS if self.of(kind) is not base)]
            for base in (KvFormat.BF16, KvFormat.PACKED)
        ]
        return ",".join(min(texts, key=len))

    def of(self, kind: str) -> KvFormat:
        """The format of a kind."""
        return getattr(self, kind)

    def rounding(self, kind: str) -> Rounding:
        """What keys of a kind are rounded to."""
        return _FP4 if kind == "index" or self.of(kind) is KvFormat.FP4 else _FP8

    def rows(self, kind: str, coded: int) -> RowFormat | None:
        """How rows of a kind lie, None where they are bf16 values.

        Args:
            coded: leading dims of a row that are rounded.
        """
        if self.of(kind) is KvFormat.BF16:
            return None
        rounding = self.rounding(kind)
        return RowFormat(rounding.fmt, rounding.block, coded)

    def check(self, numerics: Numerics) -> None:
        """`UsageError` where numerics leave nothing to pack."""
        if not (self.plain or numerics.rounds):
            raise UsageError(
                f"{self} packs rounded keys, and numerics {numerics.value} have none",
                where=OPTION,
                fix="leave it out, or choose numerics faithful or bf16",
            )


PLAIN = KvFormats()
"""Keys as bf16 values."""

KINDS = tuple(field.name for field in fields(KvFormats))


def parse_kv(text: str) -> KvFormats:
    """Formats as `bf16`, `packed`, or either and exceptions behind it (`packed,csa=fp4`); `UsageError`
    says what is wrong."""
    base, *changes = text.split(",")
    if "=" in base or base == KvFormat.FP4.value:
        raise _unknown(text, f"it begins with {base!r}, not with bf16 or packed")
    found: dict[str, Any] = dict.fromkeys(KINDS, _format(base, text))
    seen: set[str] = set()
    for change in changes:
        kind, equals, name = change.partition("=")
        if not equals:
            raise _unknown(text, f"{change!r} is no KIND=FORMAT")
        if kind not in KINDS:
            raise _unknown(text, f"there is no kind {kind!r}")
        if kind in seen:
            raise _unknown(text, f"{kind} is given twice")
        seen.add(kind)
        found[kind] = _format(name, text)
    if found["index"] is KvFormat.FP4:
        raise UsageError(
            "index keys are FP4 in the released model", where=f"{OPTION} {text}", fix="write index=packed"
        )
    return KvFormats(**found)


def _format(name: str, text: str) -> KvFormat:
    try:
        return KvFormat(name)
    except ValueError:
        raise _unknown(text, f"there is no format {name!r}") from None


def _unknown(text: str, what: str) -> UsageError:
    formats = ", ".join(f.value for f in KvFormat)
    return UsageError(
        what,
        where=f"{OPTION} {text}",
        fix=f"bf16 or packed, then KIND=FORMAT by comma; kinds: {', '.join(KINDS)}; formats: {formats}",
    )
