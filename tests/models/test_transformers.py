"""Our model against the DeepSeek-V4 of transformers: the same random weights, both in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stepper import Stepper
from torch import Tensor, nn

from rewright.ir import ops

LENGTH = 320
TOPK = 16
INDEXED = (2, 4)
"""Layers of the configuration that have an indexer."""

SPLIT = (1, 3, 126, 128, 2, 47)
"""Chunk lengths of a prompt: off and on the multiples of 4 and 128; the rest is decoded."""


@dataclass
class Theirs:
    """One forward pass of transformers over the whole sequence.

    Attributes:
        logits: f32[n,V].
        scores: index scores f32[n,entries] by layer, also of entries out of sight.
        chosen: i32[n,k] entries picked by layer, -1 where there are no more.
        checkpoint: the model as a release checkpoint.
    """

    logits: Tensor
    scores: dict[int, Tensor]
    chosen: dict[int, Tensor]
    checkpoint: Path


def run_theirs(model: nn.Module, ids: list[int], checkpoint: Path) -> Theirs:
    scores: dict[int, Tensor] = {}
    chosen: dict[int, Tensor] = {}
    hooks = []
    for layer in INDEXED:
        indexer = model.model.layers[layer].self_attn.compressor.indexer
        for module, found in ((indexer, chosen), (indexer.scorer, scores)):
            keep = lambda _m, _i, output, found=found, layer=layer: found.update({layer: output[0]})  # noqa: E731
            hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return Theirs(logits, scores, {n: c.int() for n, c in chosen.items()}, checkpoint)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()


def build(tmp: Path, ids: list[int], topk: int) -> Theirs:
    pytest.importorskip("transformers", minversion="5.24")
    from hf_checkpoint import make_hf_model, save_release

    overrides = {"index_topk": topk}
    model = make_hf_model(overrides)
    return run_theirs(model, ids, save_release(model, tmp / f"topk{topk}", overrides))


@pytest.fixture(scope="module")
def unbound(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> Theirs:
    """The index keeps more entries than exist."""
    return build(tmp_path_factory.mktemp("hf"), ids, 512)


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> Theirs:
    """The index keeps 16 of up to 80 entries."""
    return build(tmp_path_factory.mktemp("hf"), ids, TOPK)


@pytest.fixture(scope="module")
def all_kept(unbound: Theirs) -> Stepper:
    return Stepper.open(unbound.checkpoint)


@pytest.fixture(scope="module")
def some_kept(bound: Theirs) -> Stepper:
    return Stepper.open(bound.checkpoint)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    difference = ((ours - theirs).abs().max() / theirs.std()).item()
    assert difference <= 1e-4, f"max difference {difference:.2e} of the logits' std"


def chosen_at(theirs: Theirs, start: int, stop: int) -> dict[str, Tensor]:
    """Their lists for the queries start .. stop-1, as overrides."""
    return {f"layers.{n}.attn.indexer.chosen": c[None, start:stop] for n, c in theirs.chosen.items()}


def test_the_reference_uses_all_its_parts(unbound: Theirs, bound: Theirs) -> None:
    """Guards the comparison itself: binding top-k changes their logits, and lists are full and varied."""
    assert 0.3 < unbound.logits.std() < 30
    change = (unbound.logits - bound.logits).abs().amax(-1) / unbound.logits.std()
    assert change[: 4 * TOPK].max() <= 1e-4
    assert change[-100:].median() > 1e-2
    for layer in INDEXED:
        assert (bound.chosen[layer][4 * TOPK :] >= 0).all()
        assert len(bound.chosen[layer][-1].unique()) == TOPK
        assert unbound.chosen[layer].shape[1] == LENGTH // 4


def test_scores_of_all_positions(all_kept: Stepper, unbound: Theirs, ids: list[int]) -> None:
    assert_close(all_kept.fresh().scores(ids), unbound.logits)


def test_chunks_then_decode(all_kept: Stepper, unbound: Theirs, ids: list[int]) -> None:
    ours = all_kept.fresh()
    prompt = sum(SPLIT)
    last = ours.prefill(ids[:prompt], SPLIT)
    assert_close(torch.stack([last, *ours.tokenwise(ids[prompt:])]), unbound.logits[prompt - 1 :])


@pytest.mark.full
def test_token_by_token(all_kept: Stepper, unbound: Theirs, ids: list[int]) -> None:
    assert_close(all_kept.fresh().tokenwise(ids), unbound.logits)


def test_binding_topk_with_their_lists(some_kept: Stepper, bound: Theirs, ids: list[int]) -> None:
    ours = some_kept.fresh(capacity=512)
    assert_close(ours.scores(ids, overrides=chosen_at(bound, 0, LENGTH)), bound.logits)


def test_binding_topk_with_their_lists_in_chunks_then_decode(
    some_kept: Stepper, bound: Theirs, ids: list[int]
) -> None:
    ours = some_kept.fresh(capacity=512)
    logits, position = [], 0
    for length in SPLIT:
        part = ids[position : position + length]
        logits.append(ours.prefill(part, overrides=chosen_at(bound, position, position + length)))
        position += length
    ends = [sum(SPLIT[: i + 1]) - 1 for i in range(len(SPLIT))]
    for at in range(position, LENGTH):
        logits.append(ours.decode(ids[at], overrides=chosen_at(bound, at, at + 1)))
        ends.append(at)
    assert_close(torch.stack(logits), bound.logits[ends])


def test_index_scores_and_lists(some_kept: Stepper, bound: Theirs, ids: list[int]) -> None:
    """With their lists in place every layer has their inputs: scores agree, lists but for near ties."""
    ours = some_kept.fresh(capacity=512)
    seen: dict[str, Tensor] = {}
    ours.scores(ids, overrides=chosen_at(bound, 0, LENGTH), observe=lambda name, t: seen.update({name: t}))
    vectors = [torch.tensor([v], dtype=torch.int32) for v in (0, LENGTH)]
    queries = torch.arange(LENGTH)
    for layer in INDEXED:
        found, wanted = seen[f"layers.{layer}.attn.indexer.scores"], bound.scores[layer]
        entries = wanted.shape[1]
        visible = torch.arange(entries) < ((queries + 1) // 4)[:, None]
        assert (found[0, :, :entries] == float("-inf")).eq(~visible).all()
        assert (found[0, :, entries:] == float("-inf")).all()
        slack = 1e-5 * wanted[visible].abs().max()
        assert (found[0, :, :entries] - wanted)[visible].abs().max() <= slack
        chosen = ops.index_topk(found, *vectors, ratio=4, k=TOPK)[0]
        for query in queries.tolist():
            mine = {i for i in chosen[query].tolist() if i >= 0}
            other = {i for i in bound.chosen[layer][query].tolist() if i >= 0}
            assert len(mine) == len(other) == min(TOPK, (query + 1) // 4)
            if mine != other:
                kth = min(wanted[query, i] for i in other)
                assert all(abs(wanted[query, i] - kth) <= slack for i in mine ^ other)
