"""State across steps: any split of a prompt, any mix of slots, and any reuse gives the same result.

In `fp32` numerics a split changes nothing but the order of sums. In `faithful` numerics roundings
amplify that: a last bit becomes a step of the FP8 activation, then another expert. What is compared
there is a model without discrete choices and without FP8 activations as a whole, and a quantised
model layer by layer, each layer fed the same streams in both runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import CONFIGS, STORAGE
from stepper import Stepper
from torch import Tensor

from rewright.ir.op import registry
from rewright.ir.variant import Variant

LENGTH = 264
TAIL = 5
"""Tokens decoded behind a prompt: enough to finish an entry of a ratio-4 layer."""

TOKENS = {"pro": 18, "flash": 20, "mixed": 15}
"""Seeds of the tokens. With these and the weights above no choice is close, see `test_choices_are_clear`."""

NO_CHOICE = {"n_routed_experts": 4, "num_experts_per_tok": 4, "index_topk": 128}
FLOATS = {"dense": "bf16", "experts": "bf16"}

SHORT = [5, 127, 129, 257]
LONG = [n + i for n in (4, 8, 64) for i in range(4)] + [126, 127, 128, 129, 130, 131, 255, 256, 257, 258]

MODELS = [
    "pro",
    pytest.param("flash", marks=pytest.mark.full),
    pytest.param("mixed", marks=pytest.mark.full),
]


@dataclass
class Model:
    """A random checkpoint and what one long sequence gives on it."""

    folder: Path
    numerics: str = "fp32"
    seed: int = 1

    @cached_property
    def ids(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, 256, (LENGTH,), generator=generator).tolist()

    @cached_property
    def loaded(self) -> Stepper:
        return Stepper.open(self.folder, self.numerics, max_batch=2, capacity=512)

    def new(self, **options: Any) -> Stepper:
        return self.loaded.fresh(**options)

    @cached_property
    def at_once(self) -> Tensor:
        """Logits of every position, the sequence in one chunk."""
        return self.new().scores(self.ids)

    def splits(self, n: int) -> dict[str, list[int]]:
        """Ways to cut a prompt of n tokens, at lengths off and on the multiples of 4 and 128."""
        cuts = {"one": [n], "last": [n - 1, 1], "first": [1, n - 1], "odd": _cut(n, 7), "fours": _cut(n, 4)}
        cuts |= {f"{size}s": _cut(n, size) for size in (33, 64, 127, 128, 129) if size < n}
        return cuts


def _cut(n: int, size: int) -> list[int]:
    return [min(size, n - i) for i in range(0, n, size)]


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]
) -> Callable[..., Model]:
    """Model by name, numerics, and changes of its configuration and storage; made once each."""
    made: dict[str, Model] = {}

    def model(
        name: str, numerics: str = "fp32", change: Mapping[str, Any] | None = None, **storage: Any
    ) -> Model:
        key = repr((name, numerics, change, storage))
        if key not in made:
            folder = tmp_path_factory.mktemp("random") / name
            config = {"vocab_size": 256, **CONFIGS[name], **(change or {})}
            checkpoint = make_checkpoint(folder, config, **{**STORAGE[name], **storage})
            made[key] = Model(checkpoint, numerics, TOKENS[name])
        return made[key]

    return model


def difference(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Largest difference in units of the standard deviation of `scale`."""
    assert a.shape == b.shape
    return ((a - b).abs().max() / scale.std()).item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal including NaN payloads and signs of zero."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def changed_states(a: Mapping[str, Tensor], b: Mapping[str, Tensor], slot: int | None = None) -> list[str]:
    """Names of states that differ in a bit."""
    where = slice(None) if slot is None else slice(slot, slot + 1)
    return [n for n in a if not same_bits(a[n][where], b[n][where])]


# -- splits of a prompt -----------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_choices_are_clear(models: Callable[..., Model], name: str) -> None:
    """No entry or expert is chosen over another by less than ten times what a split may change."""
    run, seen = models(name).new(), {}
    run.scores(models(name).ids, observe=lambda value, t: seen.update({value: t}))
    config, gaps = run.source.config, []
    for value, tensor in seen.items():
        if value.endswith(".indexer.scores"):
            ranked, k = tensor[0].sort(-1, descending=True).values, config.index_topk
            kept, dropped = ranked[:, k - 1], ranked[:, k]
            # Scores that are exactly 0 (every head negative) are so in every run.
            binding = dropped.isfinite() & ~((kept == 0) & (dropped == 0))
            gaps.append(((kept - dropped) / ranked[ranked.isfinite()].abs().max())[binding])
        elif value.endswith(".gate.logits") and (bias := value.replace("logits", "bias")) in run.weights:
            affinity = torch.nn.functional.softplus(tensor[0]).sqrt() + run.weights[bias]
            ranked, k = affinity.sort(-1, descending=True).values, config.num_experts_per_tok
            gaps.append(ranked[:, k - 1] - ranked[:, k])
    assert len(gaps) == 2 + config.num_hidden_layers - config.num_hash_layers
    assert min(gap.min().item() for gap in gaps) >= 1e-5


@pytest.mark.parametrize(
    ("name", "n"), [("pro", 140), *(pytest.param(name, LENGTH, marks=pytest.mark.full) for name in CONFIGS)]
)
def test_token_by_token_equals_one_chunk(models: Callable[..., Model], name: str, n: int) -> None:
    model = models(name)
    assert 0.5 < model.at_once.std() < 20
    assert difference(model.new().tokenwise(model.ids[:n]), model.at_once[:n], model.at_once) <= 1e-4


def check_splits(model: Model, n: int, *ways: str) -> None:
    """Splits of a prompt of n tokens give its last logits, and the tokens decoded behind it."""
    splits = model.splits(n)
    for split in [splits[way] for way in ways or splits if way in splits]:
        run = model.new()
        got = torch.stack([run.prefill(model.ids[:n], split), *run.tokenwise(model.ids[n : n + TAIL])])
        assert difference(got, model.at_once[n - 1 : n + TAIL], model.at_once) <= 1e-4, split


@pytest.mark.parametrize("n", SHORT)
def test_splits_of_a_prompt(models: Callable[..., Model], n: int) -> None:
    check_splits(models("pro"), n, "last", "odd", "127s", "129s")


@pytest.mark.full
@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_splits_at_every_length(models: Callable[..., Model], name: str, n: int) -> None:
    check_splits(models(name), n)


def test_smaller_buckets_give_the_same(models: Callable[..., Model]) -> None:
    """Each step on the smallest variant that holds it, as a run does, against the largest for all."""
    model = models("pro", change={"index_topk": 32})
    run = model.loaded.fresh(capacity=None)
    assert [run.variant(1, 1, n).capacity for n in (1, 128, 129, LENGTH)] == [128, 128, 512, 512]
    scores = "layers.1.attn.indexer.scores"
    assert [scores in run.graph(run.variant(1, 1, n)) for n in (128, 129)] == [False, True]
    got = torch.stack([run.prefill(model.ids[:125], [60, 65]), *run.tokenwise(model.ids[125:135])])
    assert difference(got, model.at_once[124:135], model.at_once) <= 1e-4


@pytest.mark.parametrize("lengths", [[129], [1, 3, 60, 1, 64]])
def test_padded_and_trimmed_chunks_agree(models: Callable[..., Model], lengths: list[int]) -> None:
    model = models("pro")
    runs = [model.new(padded=padded) for padded in (True, False)]
    ends = [run.prefill(model.ids[: sum(lengths)], lengths) for run in runs]
    assert difference(*ends, model.at_once) <= 1e-4
    for name, state in runs[0].state.items():
        scale = max(state.abs().max().item(), 1.0)
        assert (state - runs[1].state[name]).abs().max().item() <= 1e-4 * scale, name
    scores = [run.scores(model.ids[:129], [1, 128]) for run in runs]
    assert difference(*scores, model.at_once) <= 1e-4
    assert difference(scores[0], model.at_once[:129], model.at_once) <= 1e-4


def test_a_window_shorter_than_a_chunk(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    """Window 8, 64 tokens: no chunk size loses a key that its queries still see."""
    changes = {**CONFIGS["flash"], "sliding_window": 8, "vocab_size": 256}
    model = Model(make_checkpoint(tmp_path / "w8", changes, seed=4))
    ids = model.ids[:64]
    wanted = model.new().tokenwise(ids)
    for size in (2, 4, 8, 9, 64):
        got = model.new().scores(ids, _cut(64, size))
        assert difference(got, wanted, wanted) <= 1e-4, size
    wide = Model(make_checkpoint(tmp_path / "w9", {**changes, "sliding_window": 9}, seed=4)).new().scores(ids)
    assert difference(wide, wanted, wanted) > 1e-2, "the window matters"


# -- faithful numerics ------------------------------------------------------------------------


def cosine(a: Tensor, b: Tensor) -> float:
    """Mean cosine of rows."""
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    return torch.cosine_similarity(a.double(), b.double(), dim=-1).mean().item()


@pytest.mark.parametrize("name", MODELS)
def test_faithful_without_choices(models: Callable[..., Model], name: str) -> None:
    """Every expert and every entry takes part, weights in bf16: nothing amplifies a last bit."""
    model = models(name, "faithful", NO_CHOICE, **FLOATS)
    for split in ([1, 3, 60, 64, 1, 127, 8], _cut(LENGTH, 128), _cut(LENGTH, 31)):
        assert cosine(model.new().scores(model.ids, split), model.at_once) >= 0.9985
    n = 40
    assert cosine(model.new().tokenwise(model.ids[:n]), model.at_once[:n]) >= 0.9985


@pytest.mark.parametrize("name", MODELS)
def test_faithful_layer_by_layer(models: Callable[..., Model], name: str) -> None:
    """Every layer of a quantised model, fed the streams of the run in one chunk, repeats its output."""
    model = models(name, "faithful")
    seen: dict[str, Tensor] = {}
    model.new().scores(model.ids[:140], observe=lambda value, t: seen.update({value: t}))
    layers = model.loaded.source.config.num_hidden_layers
    outputs = ["streams", *(f"layers.{i}.hc_ffn.streams" for i in range(layers))]
    for given, wanted in itertools.pairwise(outputs):
        for split in ([1, 3, 60, 64, 1, 11], [121, *[1] * 7]):
            got = run_fed(model, split, given, seen[given], wanted)
            assert cosine(got, seen[wanted][0, : len(got)].flatten(1)) >= 0.9985, (wanted, split)


def run_fed(model: Model, split: list[int], given: str, value: Tensor, wanted: str) -> Tensor:
    """`wanted` of every token, flattened, where the value `given` is replaced in every step."""
    run, found, at = model.new(), [], 0
    for length in split:
        run.step(
            {0: model.ids[at : at + length]},
            overrides={given: value[:, at : at + length]},
            observe=lambda name, t: found.append(t[0].flatten(1)) if name == wanted else None,
        )
        at += length
    return torch.cat(found)


def test_faithful_splits_of_the_trained_model(tiny_v4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model keeps its result, quantisation and choices included.

    Steps of one token are compared with a head norm that rounds once whatever the number of heads in a
    step: torch's own rounds the last heads of a step once more, which a split moves.
    """
    run = Stepper.open(tiny_v4, "faithful", max_context=256, chunk=256)
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tiny_v4 / "tokenizer.json"))
    text = (tiny_v4 / "README.md").read_text()
    ids = [0, *tokenizer.encode(text, add_special_tokens=False).ids][:140]
    wanted = run.fresh().scores(ids)
    assert cosine(run.fresh().scores(ids, [1, 3, 60, 64, 1, 11]), wanted) >= 0.9985
    monkeypatch.setattr(registry()["head_rms_norm"], "reference", _head_norm_rounding_once)
    wanted = run.fresh().scores(ids)
    assert cosine(run.fresh().tokenwise(ids[:24]), wanted[:24]) >= 0.9985


def _head_norm_rounding_once(x: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt((x.square().mean(-1, keepdim=True) + eps).float()).to(x.dtype)


# -- slots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["fp32", "faithful"])
def test_a_restored_state_continues_identically(models: Callable[..., Model], numerics: str) -> None:
    model = models("pro", numerics)
    run = model.new()
    run.prefill(model.ids[:126], [126])
    saved = run.save()
    first = run.tokenwise(model.ids[126:133])
    after = run.save()
    run.poison()
    run.restore(saved)
    assert same_bits(run.tokenwise(model.ids[126:133]), first)
    assert not changed_states(run.state, after.state)
    assert changed_states(after.state, saved.state) == list(saved.state)


def test_sequences_in_a_batch_do_not_disturb_each_other(models: Callable[..., Model]) -> None:
    """Slots 0 and 1 at different positions, stepped together, against each alone."""
    model = models("pro")
    other = model.ids[::-1]
    lengths = (126, 3)
    run = model.new()
    for slot, ids in enumerate((model.ids, other)):
        run.prefill(ids[: lengths[slot]], slot=slot)
    start = run.save()
    alone = [run.fresh(), run.fresh()]
    for slot, single in enumerate(alone):
        single.restore(start)
        single.poison(1 - slot)
    for i in range(6):
        tokens = {0: [model.ids[126 + i]], 1: [other[3 + i]]}
        both = run.step(tokens)
        for slot, single in enumerate(alone):
            assert difference(single.step({slot: tokens[slot]})[0], both[slot], model.at_once) <= 1e-4
    for slot, single in enumerate(alone):
        for name, state in run.state.items():
            scale = max(state[slot].abs().max().item(), 1.0)
            assert (single.state[name][slot] - state[slot]).abs().max().item() <= 1e-4 * scale, name
    wanted = model.new()
    wanted.prefill(other[:3])
    assert difference(wanted.tokenwise(other[3:9])[-1], both[1], model.at_once) <= 1e-4


def test_a_row_of_nan_stays_in_its_row(models: Callable[..., Model]) -> None:
    """The other slot of a batch holds NaN only."""
    model = models("pro")
    run = model.new()
    run.prefill(model.ids[:126])
    run.poison(1)
    run.positions[1] = 50
    got = torch.stack([run.step({1: [5], 0: [token]})[1] for token in model.ids[126:130]])
    assert difference(got, model.at_once[126:130], model.at_once) <= 1e-4


def test_a_batch_of_chunks(models: Callable[..., Model]) -> None:
    """Chunks of different lengths at different positions in one step."""
    model = models("pro")
    run = model.new()
    run.prefill(model.ids[:30], slot=1)
    got = run.step({0: model.ids[:9], 1: model.ids[30:135]}, tokens=512)
    assert difference(got, model.at_once[[8, 134]], model.at_once) <= 1e-4
    got = run.step({1: [model.ids[135]], 0: [model.ids[9]]})
    assert difference(got, model.at_once[[135, 9]], model.at_once) <= 1e-4


@pytest.mark.parametrize("first", [2, 127])
@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "stale"])
def test_a_reused_slot_starts_clean(models: Callable[..., Model], first: int, poison: bool) -> None:
    """A prompt behind another sequence in its slot, also one shorter than any compressed entry."""
    model = models("pro")
    run, fresh = model.new(), model.new()
    run.prefill(model.ids[::-1], [LENGTH])
    run.release()
    if poison:
        run.poison()
    got, wanted = (
        [r.prefill(model.ids[:first], [first]), *r.tokenwise(model.ids[first : first + TAIL])]
        for r in (run, fresh)
    )
    assert same_bits(torch.stack(got), torch.stack(wanted))
    assert torch.isfinite(got[-1]).all()


@pytest.mark.parametrize("numerics", ["fp32", "faithful"])
@pytest.mark.parametrize("tokens", [1, 512])
def test_an_idle_row_changes_no_state(models: Callable[..., Model], numerics: str, tokens: int) -> None:
    """n_valid 0, whatever stands in the row's tokens, position and slot."""
    model = models("pro", numerics)
    run = model.new()
    for slot in (0, 1):
        run.prefill(model.ids[slot : 130 + slot], [130], slot=slot)
    before = run.save()
    runner = run.interpreter(Variant(tokens, 2, 512))

    def step(n_valid: list[int], slots: list[int], idle_position: int = 10**6) -> Tensor:
        given = {
            "tokens": [[9], [-1]],
            "pos": [p if n else idle_position for p, n in zip([130, 130], n_valid, strict=True)],
            "n_valid": n_valid,
            "slot": slots,
        }
        inputs = {name: torch.tensor(v, dtype=torch.int32) for name, v in given.items()}
        return runner.run(inputs, run.state)["logits"]

    step([0, 0], [0, 1])
    assert not changed_states(run.state, before.state)
    logits = step([1, 0], [0, 1])
    assert not changed_states(run.state, before.state, slot=1)
    rings = {n for n in run.state if n.endswith("ring")}
    assert set(changed_states(run.state, before.state, slot=0)) >= rings
    after = run.save()
    run.restore(before)
    # An idle row may even name the slot of the busy one.
    assert same_bits(step([1, 0], [0, 0], idle_position=0)[0], logits[0])
    assert not changed_states(run.state, after.state)
