"""Scales of activations that are known before a model runs, shared by segments of layers.

A site is a value that is quantised for linears; it is called after the first linear that reads it, for
example `layers.3.attn.wq_a.x`. A segment is a run of layers whose sites of one kind share one row of
power-of-two scales, so that a segment boundary is one change of scales.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewright.ir.errors import BadInput
from rewright.ir.types import DType, ValueType

FORMAT = 1
"""Of the file of scales that `rewright calibrate` writes."""

PREFIX = "static_scales"
"""Of the names of scale tensors in graphs."""

LEAST_EXPONENT, LARGEST_EXPONENT = -126, 127
"""Of a scale 2^e that e8m0 holds and whose reciprocal is a normal fp32 number."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One row of scales.

    Attributes:
        name: kind of its sites and number, for example `attn.wq_a.x.0`.
        block: elements of a row that share a scale.
        exponents: e of the scale 2^e of every block.
    """

    name: str
    block: int
    exponents: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.block * len(self.exponents)

    @property
    def tensor_name(self) -> str:
        return f"{PREFIX}.{self.name}"

    @property
    def type(self) -> ValueType:
        return ValueType(DType.E8M0, (len(self.exponents),))

    def tensor(self) -> Tensor:
        """e8m0[columns / block]."""
        codes = torch.tensor(self.exponents, dtype=torch.int32) + 127
        return codes.to(torch.uint8).view(torch.float8_e8m0fnu)


@dataclass(frozen=True)
class StaticScales:
    """The scales of a model.

    Attributes:
        checkpoint: fingerprint of the checkpoint that they were calibrated for.
        segments: by name.
        sites: name of the segment of every site, by site.
    """

    checkpoint: str
    segments: Mapping[str, Segment] = field(default_factory=dict)
    sites: Mapping[str, str] = field(default_factory=dict)

    def find(self, sites: Iterable[str]) -> Segment | None:
        """Scales of a value by the names that its site could have; None if it has none."""
        name = next((self.sites[site] for site in sites if site in self.sites), None)
        return None if name is None else self.segments[name]

    def to_json(self) -> dict[str, Any]:
        """JSON object; `parse_static_scales` reads it."""
        segments = {
            s.name: {"block": s.block, "exponents": list(s.exponents)}
            for _, s in sorted(self.segments.items())
        }
        return {
            "checkpoint": {"fingerprint": self.checkpoint},
            "segments": segments,
            "sites": dict(sorted(self.sites.items())),
        }

    def digest(self) -> str:
        """SHA-256 over the scales and where they are used."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def read_scales(path: Path) -> StaticScales:
    """The scales of a file; `BadInput` if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"is no file of scales of format {FORMAT}")
        return parse_static_scales(value)
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the path") from e
    except (ValueError, RecursionError) as e:
        raise BadInput(str(e), where=str(path), fix="name a file that rewright calibrate has written") from e


def parse_static_scales(value: Any) -> StaticScales:
    """Read what `to_json` gives; `ValueError` says what is wrong."""
    if not isinstance(value, dict):
        raise ValueError("is not an object")
    segments, sites = value.get("segments"), value.get("sites")
    if not isinstance(segments, dict) or not isinstance(sites, dict):
        raise ValueError("has no segments and sites")
    found = {name: _segment(name, segment) for name, segment in segments.items()}
    for site, segment in sites.items():
        if segment not in found:
            raise ValueError(f"site {site} names a segment {segment!r} that it does not have")
    checkpoint = value.get("checkpoint")
    fingerprint = checkpoint.get("fingerprint") if isinstance(checkpoint, dict) else None
    if not isinstance(fingerprint, str):
        raise ValueError("does not say which checkpoint it is for")
    return StaticScales(fingerprint, found, sites)


def _segment(name: str, value: Any) -> Segment:
    block = value.get("block") if isinstance(value, dict) else None
    exponents = value.get("exponents") if isinstance(value, dict) else None
    if type(block) is not int or block < 1:
        raise ValueError(f"segment {name}: block is {block!r}, not a number of elements")
    if not isinstance(exponents, list) or not exponents:
        raise ValueError(f"segment {name}: exponents are no list of integers")
    for e in exponents:
        if type(e) is not int or not LEAST_EXPONENT <= e <= LARGEST_EXPONENT:
            raise ValueError(
                f"segment {name}: exponent {e!r} is not from {LEAST_EXPONENT} to {LARGEST_EXPONENT}"
            )
    return Segment(name, block, tuple(exponents))
