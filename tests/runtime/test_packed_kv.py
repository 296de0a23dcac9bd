"""Compiled models with packed keys on the host target: bit for bit what bf16 keys give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from configs import CONFIGS, STORAGE
from torch import Tensor

from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.kv_formats import parse_kv
from rewright.frontend.numerics import Numerics
from rewright.ir.errors import Refused
from rewright.passes.manager import PassOptions
from rewright.runtime.engine import Engine
from rewright.runtime.host import HostModel
from rewright.runtime.load import Artifact

LOSSY = "packed,window=fp4,csa=fp4,hca=fp4"
EDGES = (3, 127, 256)
"""Prompts that end before a compressed entry, before the window is full, and after two entries of 128."""


@pytest.fixture(scope="module")
def compiled(
    tiny_v4: Path, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Compile a model for two sequences; kept for the module."""
    folders, found = {"tiny": tiny_v4}, {}

    def get(name: str, kv: str, passes: PassOptions | None = None, numerics: str = "faithful") -> Path:
        key = name, kv, passes, numerics
        if key not in found:
            if name not in folders:
                folder = tmp_path_factory.mktemp(name) / "checkpoint"
                folders[name] = make_checkpoint(folder, CONFIGS[name], **STORAGE[name])
            options = CompileOptions(
                Numerics(numerics),
                384,
                2,
                chunk=48,
                target="host",
                kv=parse_kv(kv),
                passes=passes or PassOptions(),
            )
            found[key] = tmp_path_factory.mktemp("compiled") / name
            compile_model(folders[name], found[key], options)
        return found[key]

    return get


def engine(out: Path, **options: bool | int) -> Engine:
    return Engine(Artifact.open(out), **{"threads": 1, **options})


def history(run: Engine, prompt: int, decoded: int = 10) -> Tensor:
    """Logits of a prompt in slot 1 and of one in slot 0, then of decode steps of both."""
    generator = torch.Generator().manual_seed(prompt)
    vocab = run.artifact.manifest.model["vocab_size"]
    ids = torch.randint(2, vocab, (2, prompt + decoded), generator=generator).tolist()
    for slot in range(2):
        run.reset(slot)
    found = [run.prefill(1, ids[1][: prompt // 2 + 1]), run.prefill(0, ids[0][:prompt])]
    for at in range(decoded):
        rows = run.decode({0: ids[0][prompt + at], 1: ids[1][prompt // 2 + 1 + at]})
        found += [rows[0], rows[1]]
    return torch.stack(found)


@pytest.mark.parametrize("prompt", EDGES)
@pytest.mark.parametrize(
    "name", ["tiny", "mixed", *(pytest.param(n, marks=pytest.mark.full) for n in ("pro", "flash"))]
)
def test_packed_keys_change_no_bit(compiled: Callable[..., Path], name: str, prompt: int) -> None:
    packed, plain = (engine(compiled(name, kv)) for kv in ("packed", "bf16"))
    assert torch.equal(history(packed, prompt), history(plain, prompt))
    memory = [run.artifact.manifest.memory.state_bytes for run in (packed, plain)]
    assert memory[0] < memory[1]


def test_likelihoods_are_the_same(compiled: Callable[..., Path]) -> None:
    ids = torch.randint(2, 256, (140,), generator=torch.Generator().manual_seed(1)).tolist()
    scores = [engine(compiled("tiny", kv)).score(0, ids) for kv in ("packed", "bf16")]
    assert torch.equal(*scores)


@pytest.mark.parametrize(("name", "kv"), [("tiny", "packed"), ("mixed", LOSSY), ("tiny", "bf16,hca=fp4")])
def test_fused_kernels_compute_what_their_parts_do(compiled: Callable[..., Path], name: str, kv: str) -> None:
    fused, traced = engine(compiled(name, kv)), engine(compiled(name, kv, PassOptions(to="traced")))
    assert torch.equal(history(fused, 131), history(traced, 131))


@pytest.mark.parametrize("kv", ["packed", LOSSY])
def test_logits_are_the_interpreters(compiled: Callable[..., Path], kv: str) -> None:
    out = compiled("tiny", kv)
    ours, theirs = history(engine(out), 131), history(engine(out, reference=True), 131)
    assert torch.cosine_similarity(ours, theirs).mean() >= 0.9985


def test_numerics_without_quantised_activations(compiled: Callable[..., Path]) -> None:
    runs = [engine(compiled("tiny", kv, None, "bf16")) for kv in ("packed", "bf16")]
    assert torch.equal(history(runs[0], 131), history(runs[1], 131))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(compiled: Callable[..., Path], threads: int) -> None:
    out = compiled("tiny", LOSSY)
    assert torch.equal(history(engine(out, threads=threads), 131), history(engine(out), 131))


@pytest.mark.parametrize("kv", ["packed", LOSSY])
def test_a_poisoned_state_changes_nothing(compiled: Callable[..., Path], kv: str) -> None:
    clean, poisoned = engine(compiled("tiny", kv)), engine(compiled("tiny", kv))
    assert isinstance(poisoned.model, HostModel)
    for prompt in EDGES:
        poisoned.model.state.fill_(0xFF)
        assert torch.equal(history(poisoned, prompt), history(clean, prompt))


def test_the_choice_is_kept(compiled: Callable[..., Path]) -> None:
    assert Artifact.open(compiled("tiny", LOSSY)).manifest.kv == LOSSY


@pytest.mark.parametrize("kv", ["packed", "bf16,index=packed"])
def test_sm80_refuses_packed_keys(tiny_v4: Path, tmp_path: Path, kv: str) -> None:
    """At compile time, in words, and nothing is left."""
    with pytest.raises(Refused, match=r"holds packed keys \(.*\); these kernels read bf16 only") as caught:
        compile_model(tiny_v4, tmp_path / "out", CompileOptions(target="sm80", kv=parse_kv(kv)))
    assert caught.value.exit_code == 5
    assert "--kv bf16" in str(caught.value)
    assert not list(tmp_path.iterdir())
