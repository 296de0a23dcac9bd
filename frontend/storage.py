"""Which weights a model has, in which format, and where their bytes come from.

The modules of the model ask a `Storage` for every parameter by its checkpoint name. The answer is
the parameter's type in the graph; the storage keeps a `Binding` that tells how to make it from
checkpoint tensors. Routed experts are one virtual tensor per projection, bound to one checkpoint
tensor per expert and never assembled by the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rewright.frontend.checkpoint import Checkpoint
from rewright.frontend.config import ModelConfig
from rewright.frontend.numerics import Numerics
from rewright.frontend.quant_formats import SCALE_SUFFIXES, StoredWeight, resolve_weight
from rewright.ir.errors import BadInput, ProblemList
from rewright.ir.ops.linear import ACTIVATION_BLOCK
from rewright.ir.types import DType, ValueType

T = TypeVar("T")

_FLOATS = {"BF16": DType.BF16, "F16": DType.F16, "F32": DType.F32}
_INTS = {"I64": DType.I64, "I32": DType.I32}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor, and the scale to dequantise it with (None: taken as it is or widened)."""

    tensor: str
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """How a graph weight is made from the checkpoint.

    Attributes:
        type: type in the graph.
        parts: the stored tensors, in order along the first axis; several only for experts.
    """

    type: ValueType
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """Element types of a matrix and of its scale (None: a float without scale)."""

    weight: DType
    scale: DType | None


class Source(Protocol):
    """Where formats come from: a checkpoint's tensors, or the release's layout."""

    def matrix(self, base: str, rows: int, cols: int) -> tuple[Format, Part]: ...

    def tensor(self, name: str, shape: tuple[int, ...], release: DType) -> tuple[DType, Part]: ...


class ReleaseSource:
    """Formats of the release, for a configuration without a checkpoint."""

    def __init__(self, config: ModelConfig):
        self._quantized = config.quantized
        self._experts = Format(DType.F8E4M3 if config.expert_dtype == "fp8" else DType.E2M1, DType.E8M0)

    def matrix(self, base: str, rows: int, cols: int) -> tuple[Format, Part]:
        part = Part(f"{base}.weight", f"{base}.scale")
        if not self._quantized:
            return Format(DType.BF16, None), Part(part.tensor)
        return (self._experts if ".experts." in base else Format(DType.F8E4M3, DType.E8M0)), part

    def tensor(self, name: str, shape: tuple[int, ...], release: DType) -> tuple[DType, Part]:
        return release, Part(name)


class CheckpointSource:
    """Formats as the tensors of a checkpoint have them."""

    def __init__(self, checkpoint: Checkpoint):
        self._tensors = checkpoint.tensors
        self.used: set[str] = set()

    def matrix(self, base: str, rows: int, cols: int) -> tuple[Format, Part]:
        # Before it may be refused: a tensor that is refused is not left over as well.
        self.used |= self._tensors.keys() & {base + suffix for suffix in (".weight", *SCALE_SUFFIXES)}
        stored: StoredWeight = resolve_weight(self._tensors, base, rows, cols)
        scale = stored.scale.name if stored.scale is not None else None
        return Format(stored.dtype, stored.scale_dtype), Part(stored.weight.name, scale)

    def tensor(self, name: str, shape: tuple[int, ...], release: DType) -> tuple[DType, Part]:
        info = self._tensors.get(name)
        if info is None:
            raise BadInput("is not in the checkpoint", where=name)
        self.used.add(name)
        accepted = _FLOATS if release.is_float else _INTS
        if info.dtype not in accepted or info.shape != shape:
            raise BadInput(f"stored as {info}; accepted: {' or '.join(accepted)} {list(shape)}", where=name)
        return accepted[info.dtype], Part(name)

    def unused(self) -> list[str]:
        """Tensors that no parameter of the model reads."""
        return sorted(self._tensors.keys() - self.used)


class Storage:
    """Answers the model's requests and keeps the bindings.

    Args:
        source: where the formats come from.
        numerics: in FP32 every float weight becomes f32, dequantised where it has a scale.
    """

    def __init__(self, source: Source, numerics: Numerics):
        self._source = source
        self._widen = numerics is Numerics.FP32
        self.bindings: dict[str, Binding] = {}
        self.problems: list[str] = []

    def matrix(self, base: str, rows: int, cols: int) -> Format:
        """A weight [rows, cols] called `base.weight`, in any stored format."""
        return self._bind(base, (rows, cols), [base])

    def experts(self, base: str, count: int, name: str, rows: int, cols: int) -> Format:
        """The virtual weight [count, rows, cols] of projection `name` of all experts under `base`."""
        sources = [f"{base}.{e}.{name}" for e in range(count)]
        return self._bind(f"{base}.{name}", (count, rows, cols), sources)

    def require_blocks(self, base: str, cols: int) -> None:
        """Note it if the activation of a matrix with scales cannot be quantised in its blocks."""
        if cols % ACTIVATION_BLOCK:
            self.problems.append(
                f"{base}: stored with scales, so its input is quantised per {ACTIVATION_BLOCK}, "
                f"which its {cols} columns are no multiple of"
            )

    def tensor(self, name: str, shape: tuple[int, ...], release: DType) -> ValueType:
        """A tensor without scale: a float where `release` is one, else an integer table."""
        answer = self._try(lambda: self._source.tensor(name, shape, release))
        dtype, part = answer or (release, Part(name))
        wide = DType.F32 if self._widen and dtype.is_float else dtype
        self.bindings[name] = Binding(ValueType(wide, shape), (part,))
        return self.bindings[name].type

    def _bind(self, base: str, shape: tuple[int, ...], sources: list[str]) -> Format:
        rows, cols = shape[-2:]
        found = [self._try(lambda s=s: self._source.matrix(s, rows, cols)) for s in sources]
        answers = [answer for answer in found if answer is not None]
        formats = {f for f, _ in answers}
        if len(formats) > 1:
            texts = sorted(f"{f.weight.text} with {f.scale.text if f.scale else 'no'} scale" for f in formats)
            self.problems.append(f"{base}: experts are stored in different formats: {', '.join(texts)}")
        stored = answers[0][0] if answers else Format(DType.F32, None)
        parts = [p for _, p in answers]
        if self._widen:
            self.bindings[f"{base}.weight"] = Binding(ValueType(DType.F32, shape), tuple(parts))
            return Format(DType.F32, None)
        self._bind_as_stored(base, shape, stored, parts)
        return stored

    def _bind_as_stored(
        self, base: str, shape: tuple[int, ...], stored: Format, parts: Sequence[Part]
    ) -> None:
        weight_parts = tuple(Part(p.tensor) for p in parts)
        self.bindings[f"{base}.weight"] = Binding(ValueType(stored.weight, shape), weight_parts)
        if stored.scale is None:
            return
        scale_parts = tuple(Part(p.scale) for p in parts if p.scale is not None)
        scale_type = ValueType(stored.scale, scale_shape(stored.weight, shape))
        self.bindings[f"{base}.scale"] = Binding(scale_type, scale_parts)

    def _try(self, resolve: Callable[[], T]) -> T | None:
        """Resolve a request; a refusal is noted, so that all of them are reported together."""
        try:
            return resolve()
        except BadInput as e:
            text = str(e).replace("\n  -> ", "; ")
            self.problems.append(text)
            return None

    def check(self, where: str) -> None:
        """`ProblemList` of every parameter that could not be bound and every tensor left over."""
        problems = list(self.problems)
        if isinstance(self._source, CheckpointSource):
            problems += [f"{name}: no parameter of the model has this name" for name in self._source.unused()]
        if problems:
            raise ProblemList(
                "the tensors do not fit the configuration",
                problems,
                where=where,
                fix="compare config.json with the tensor names of the release",
            )


def scale_shape(weight: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block scales of a weight [..., rows, cols]."""
    *lead, rows, cols = shape
    if weight is DType.E2M1:
        return (*lead, rows, cols // 32)
    return (*lead, -(-rows // 128), -(-cols // 128))
