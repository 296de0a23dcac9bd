"""Whole models with packed keys, in the interpreter: bit for bit what bf16 keys give, in half the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from configs import CONFIGS, STORAGE
from stepper import Stepper
from torch import Tensor

from rewright.frontend.kv_formats import parse_kv
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite

LOSSY = "packed,window=fp4,csa=fp4,hca=fp4"
SPLIT = [1, 3, 60, 61, 7, 8]
PROMPT = sum(SPLIT)
"""Longer than the windows (128, 40), and behind it entries of both kinds are finished."""

MODELS = ["tiny", "pro", *(pytest.param(name, marks=pytest.mark.full) for name in ("flash", "mixed"))]


@pytest.fixture(scope="module")
def open_model(
    tiny_v4: Path, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Stepper]:
    """A stepper for two sequences by model and `--kv`; weights are loaded once for each model."""
    folders, loaded = {"tiny": tiny_v4}, {}

    def get(name: str, kv: str, numerics: str = "faithful", passes: PassOptions | None = None) -> Stepper:
        if name not in folders:
            folder = tmp_path_factory.mktemp("packed") / name
            folders[name] = make_checkpoint(folder, CONFIGS[name], **STORAGE[name])
        options = {"max_batch": 2, "chunk": 64, "kv": kv, "passes": passes}
        stepper = Stepper.open(folders[name], numerics, weights=loaded.get((name, numerics)), **options)
        loaded[name, numerics] = stepper.weights
        return stepper

    return get


def ids(run: Stepper, count: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, run.source.config.vocab_size, (count,), generator=generator).tolist()


def history(run: Stepper, decoded: int = 12) -> Tensor:
    """Logits of two sequences: prompts in odd chunks, a shorter one in slot 1, then decode steps of both."""
    first, second = ids(run, PROMPT + decoded), ids(run, 30 + decoded, seed=6)
    found = [run.prefill(first[:PROMPT], SPLIT, slot=0), run.prefill(second[:30], [13, 17], slot=1)]
    for at in range(decoded):
        found += run.step({1: [second[30 + at]], 0: [first[PROMPT + at]]}).unbind()
    return torch.stack(found)


@pytest.mark.parametrize("name", MODELS)
def test_packed_keys_change_no_bit(open_model: Callable[..., Stepper], name: str) -> None:
    plain, packed = open_model(name, "bf16"), open_model(name, "packed")
    assert torch.equal(history(packed), history(plain))
    sizes = [
        sum(t.nbytes for n, t in run.state.items() if not n.endswith("_ring")) for run in (packed, plain)
    ]
    assert sizes[0] < 0.8 * sizes[1]
    scored = [run.scores(ids(run, 140), [64, 64, 12]) for run in (packed, plain)]
    assert torch.equal(*scored)


def test_packed_keys_change_no_bit_in_bf16_numerics(open_model: Callable[..., Stepper]) -> None:
    passes = PassOptions(("eliminate_quant",))
    runs = [open_model("tiny", kv, "bf16", passes) for kv in ("bf16", "packed")]
    assert torch.equal(history(runs[0]), history(runs[1]))


@pytest.mark.parametrize("kv", ["packed", LOSSY, "bf16,csa=fp4", "packed,index=bf16"])
def test_passes_change_no_bit(open_model: Callable[..., Stepper], kv: str) -> None:
    traced, rewritten = open_model("tiny", kv), open_model("tiny", kv, passes=PassOptions())
    assert torch.equal(history(rewritten), history(traced))


@pytest.mark.parametrize("name", ["tiny", "pro", "mixed"])
def test_every_rewrite_is_verified(open_model: Callable[..., Stepper], name: str) -> None:
    source = open_model(name, LOSSY).source
    for variant in {v.kind: v for v in source.variants()}.values():
        report = rewrite(source, variant, PassOptions(verify=True)).report
        assert all(rule.matches == rule.expected for p in report.passes for rule in p.rules if rule.expected)


@pytest.mark.parametrize("kv", ["packed", LOSSY])
@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "stale"])
def test_a_reused_slot_starts_clean(open_model: Callable[..., Stepper], kv: str, poison: bool) -> None:
    run, fresh = open_model("pro", kv), open_model("pro", kv)
    history(run)
    for slot in range(2):
        run.release(slot)
    if poison:
        run.poison()
    got, wanted = (torch.stack([r.prefill(ids(r, 3), [3]), *r.tokenwise(ids(r, 9, 7))]) for r in (run, fresh))
    assert torch.equal(got, wanted)
    assert torch.isfinite(got).all()


def test_an_idle_row_changes_no_state(open_model: Callable[..., Stepper]) -> None:
    run = open_model("pro", "packed")
    history(run)
    before = run.save()
    run.step({0: [3], 1: []})
    for name, state in run.state.items():
        assert torch.equal(state[1].view(torch.uint8), before.state[name][1].view(torch.uint8)), name
    changed = [n for n, t in run.state.items() if not torch.equal(t[0], before.state[n][0])]
    assert all(f"layers.{layer}.attn.window" in changed for layer in range(4))


def test_a_lossy_format_keeps_splits(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    """A key is what it is rounded to, in the chunk that makes it as well as behind it. As with the model's
    own roundings: a model without discrete choices, weights in bf16."""
    changes = {"n_routed_experts": 4, "num_experts_per_tok": 4, "index_topk": 128}
    folder = make_checkpoint(
        tmp_path / "pro", {**CONFIGS["pro"], **changes}, seed=7, dense="bf16", experts="bf16"
    )
    run = Stepper.open(folder, "faithful", kv=LOSSY)
    tokens = ids(run, 200)
    whole = run.scores(tokens)
    for split in ([1, 3, 60, 64, 1, 71], [31] * 6 + [14]):
        got = run.fresh().scores(tokens, split)
        assert torch.cosine_similarity(got.double(), whole.double(), dim=-1).mean() >= 0.9985
    one_by_one = run.fresh().tokenwise(tokens[:40])
    assert torch.cosine_similarity(one_by_one.double(), whole[:40].double(), dim=-1).mean() >= 0.9985


def test_a_lossy_format_differs(open_model: Callable[..., Stepper]) -> None:
    """Every kind by itself, and each differently: an option that did nothing would go unseen."""
    kinds = ("bf16", "packed,window=fp4", "packed,csa=fp4", "packed,hca=fp4")
    found = [history(open_model("tiny", kv), decoded=4) for kv in kinds]
    for i, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[:i])


@pytest.mark.parametrize("kv", ["bf16", "packed", LOSSY])
def test_stored_bytes_are_those_of_the_graph(tiny_v4: Path, kv: str) -> None:
    source = ModelSource.open(tiny_v4, Numerics.FAITHFUL, kv=parse_kv(kv))
    graph = source.graph(source.variants()[0])
    declared = {n.meta["names"][0]: n.meta["types"][0] for n in graph.of_kind("state")}
    assert declared == source.model.builder.states
