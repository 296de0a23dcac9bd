"""Errors by module: a damaged weight is found where it is, though all that follows is wrong too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rewright.runtime.load import Artifact
from rewright.runtime.reference import ReferenceModel
from rewright.runtime.stream_error import StreamError, module_of, stream_errors

IDS = [0, 2209, 390, 859, 312, 17, 902, 44, 1033, 5, 77, 2209]


@pytest.fixture(scope="module")
def artifact(compiled_tiny: Path) -> Artifact:
    return Artifact.open(compiled_tiny)


@pytest.fixture(scope="module")
def reference(artifact: Artifact) -> ReferenceModel:
    return ReferenceModel(artifact)


def test_modules_of_values() -> None:
    found = {
        name: module_of(name)
        for name in ("streams", "layers.3.hc_attn.streams", "layers.10.hc_ffn.streams", "head", "embed")
    }
    assert list(found.values()) == ["embed", "layers.3.attn", "layers.10.ffn", "head", None]
    assert module_of("layers.3.hc_attn.u") is None


def test_a_model_has_no_error_against_itself(artifact: Artifact, reference: ReferenceModel) -> None:
    errors = stream_errors(artifact, reference, reference, IDS)
    layers = [f"layers.{i}.{part}" for i in range(6) for part in ("attn", "ffn")]
    assert errors == [StreamError(module, 0.0, 0.0) for module in ("embed", *layers, "head")]
    assert reference.observe is None


@pytest.mark.parametrize(
    ("weight", "module"),
    [
        ("layers.0.attn_norm.weight", "layers.0.attn"),
        ("layers.2.ffn_norm.weight", "layers.2.ffn"),
        ("layers.4.attn_norm.weight", "layers.4.attn"),
        ("layers.5.hc_ffn_fn", "layers.5.ffn"),
        ("embed.weight", "embed"),
        ("norm.weight", "head"),
    ],
)
def test_damage_is_found_where_it_is(
    artifact: Artifact, reference: ReferenceModel, weight: str, module: str
) -> None:
    weights = dict(artifact.weights_by_row())
    weights[weight] = -weights[weight].float().roll(1, -1).to(weights[weight].dtype)
    damaged = ReferenceModel(artifact, weights=weights)
    errors = stream_errors(artifact, damaged, reference, IDS)
    assert max(errors, key=lambda e: e.added).module == module
    at = [e.module for e in errors].index(module)
    assert all(e.behind == 0 for e in errors[:at])
    assert all(e.before == b.behind for b, e in pairwise(errors))
    assert errors[at].behind > 0.01
    if weight == "embed.weight":  # what the figure means, computed once more
        rows = torch.tensor(IDS[:-1])
        ours, theirs = (w["embed.weight"][rows].double() for w in (weights, artifact.weights()))
        assert errors[0].behind == pytest.approx(float((ours - theirs).norm() / theirs.norm()), rel=1e-5)
