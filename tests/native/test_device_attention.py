"""The sm80 kernels of attention and of the indexer at the sizes they are made for, emulated and on a card.

The examples of the ops are too small for them: those run on the generic kernels behind the same symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from one_launch import one_launch, reference_by_row, valid_rows
from torch import Tensor

from rewright.ir.op import registry
from rewright.runtime import _native

# Of results relative to their largest value. The head norm is fp32 where the reference rounds every step
# of it to bf16, and weights are rounded relative to the largest score of a split.
TOLERANCE = 2**-6


@pytest.fixture(scope="module", params=["emulation", pytest.param("card", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> tuple[_native.Device, str]:
    if request.param == "emulation":
        return _native.open_emulation(4), "cpu"
    if not torch.cuda.is_available():
        pytest.skip("there is no card")
    kernels = Path(_native.__file__).parent / "kernels"
    return _native.open_cuda(0, sorted(map(str, kernels.glob("*.fatbin")))), "cuda"


def run(
    device: tuple[_native.Device, str],
    name: str,
    operands: list[Tensor | None],
    attrs: dict[str, Any],
    *,
    pad: bool = False,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """The result of an op's kernel and of its reference, masked rows set to zero in both."""
    op = registry()[name]
    ((want, mask),) = reference_by_row(op, operands, attrs)
    launch = one_launch(op, operands, attrs, pad=pad, target="sm80", whole=whole)
    (got,) = launch.run_on(*device)
    (again,) = launch.run_on(*device)
    got, again, want = (valid_rows(t, operands, op)[mask] for t in (got, again, want))
    assert torch.equal(got.view(torch.uint8), again.view(torch.uint8))
    return got, want


def vectors(*rows: tuple[int, ...]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.int32) for row in rows]


@dataclass(frozen=True)
class Shape:
    """A call of attention: sizes, positions, and which operands it has."""

    heads: int
    dim: int
    window: int
    pos: tuple[int, ...] = (0,)
    tokens: int = 1
    n_valid: tuple[int, ...] = (1,)
    ratio: int = 0
    capacity: int = 0
    listed: int = 0
    kv: bool = False

    def operands(self, fused: bool, seed: int = 0) -> tuple[list[Tensor | None], dict[str, Any]]:
        gen = torch.Generator().manual_seed(seed)

        def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, generator=gen).to(dtype)

        batch, slots = len(self.pos), len(self.pos) + 1
        q = randn(batch, self.tokens, self.heads, self.dim)
        kv = randn(batch, self.tokens, self.dim) if self.kv else None
        window = randn(slots, self.window, self.dim)
        compressed = indices = None
        if self.ratio:
            entries = self.capacity // self.ratio
            compressed = randn(slots, entries, self.dim)
            if self.listed:
                order = torch.argsort(torch.rand(batch, self.tokens, entries + 2, generator=gen), dim=-1)
                indices = (order[..., : self.listed] - 1).to(torch.int32)  # some are -1 or not yet visible
        sink = randn(self.heads, dtype=torch.float32)
        tables = [randn(512, 32, dtype=torch.float32), randn(512, 32, dtype=torch.float32)]
        steps = vectors(self.pos, self.n_valid, tuple(reversed(range(1, slots))))
        attrs: dict[str, Any] = {
            "ratio": self.ratio,
            "capacity": self.capacity,
            "scale": self.dim**-0.5,
        }
        if not fused:
            return [q, kv, window, compressed, indices, sink, *steps], attrs
        attrs |= {"heads": self.heads, "eps": 1e-6, "tail": [2, self.heads * self.dim // 2]}
        return [q.flatten(2), kv, window, compressed, indices, sink, *tables, *steps], attrs


SHAPES = [
    Shape(heads=4, dim=128, window=32, pos=(0,)),
    Shape(heads=8, dim=128, window=128, pos=(7, 300), n_valid=(1, 1)),
    Shape(heads=20, dim=128, window=16, pos=(5, 60), n_valid=(1, 1), ratio=4, capacity=256),
    Shape(heads=8, dim=128, window=32, pos=(0, 40), tokens=3, n_valid=(2, 3), kv=True),
    Shape(heads=4, dim=256, window=24, pos=(90,), ratio=4, capacity=256, listed=40),
    Shape(4, 128, 8, pos=(6, 33), tokens=4, n_valid=(4, 0), ratio=4, capacity=64, listed=5, kv=True),
    Shape(heads=64, dim=512, window=16, pos=(100,), ratio=4, capacity=128, listed=16),
    Shape(heads=8, dim=512, window=128, pos=(200, 30), n_valid=(1, 1), ratio=128, capacity=1024),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["attention", "sparse_attention"])
def test_attention(name: str, shape: Shape, device: tuple[_native.Device, str]) -> None:
    operands, attrs = shape.operands(name == "attention")
    got, want = run(device, name, operands, attrs, pad=shape.heads == 8)
    difference = (got.float() - want.float()).abs().max()
    assert difference <= TOLERANCE * want.float().abs().max()


def test_attention_over_several_tiles_a_split(device: tuple[_native.Device, str]) -> None:
    # 130 rows leave room for one split each.
    tokens = 130
    shape = Shape(4, 128, 40, (70,), tokens, (3,), 4, 512, 60, kv=True)
    operands, attrs = shape.operands(fused=True)
    got, want = run(device, "attention", operands, attrs, whole=True)
    assert (got.float() - want.float()).abs().max() <= TOLERANCE * want.float().abs().max()


def test_attention_where_one_score_is_far_above(device: tuple[_native.Device, str]) -> None:
    # All splits but one count for nothing, and the result is that key.
    shape = Shape(heads=4, dim=128, window=128, pos=(127,))
    operands, attrs = shape.operands(fused=False)
    q, window = operands[0], operands[2]
    assert q is not None
    assert window is not None
    window[1, 77] = 20 * q[0, 0, 0]
    got, want = run(device, "sparse_attention", operands, attrs)
    assert torch.equal(got[0, 0, 0], window[1, 77])
    assert (got.float() - want.float()).abs().max() <= TOLERANCE * want.float().abs().max()


def queries(seed: int, *shape: int) -> Tensor:
    """Values on a coarse grid: their dots are exact, so that every order of sums gives the same bits."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=gen).to(torch.bfloat16) / 2


def scored(
    seed: int, heads: int, entries: int, pos: tuple[int, ...], n_valid: tuple[int, ...]
) -> list[Tensor | None]:
    batch = len(pos)
    tokens = max(n_valid)
    q, weights = queries(seed, batch, tokens, heads, 128), queries(seed + 1, batch, tokens, heads)
    keys = queries(seed + 2, batch + 1, entries, 128)
    return [q, weights, keys, *vectors(pos, n_valid, tuple(reversed(range(1, batch + 1))))]


@pytest.mark.parametrize(
    ("heads", "pos", "n_valid"), [(64, (700,), (1,)), (8, (3, 411), (2, 3)), (20, (21, 900), (1, 0))]
)
def test_index_score(
    heads: int, pos: tuple[int, ...], n_valid: tuple[int, ...], device: tuple[_native.Device, str]
) -> None:
    attrs = {"ratio": 4, "capacity": 1024, "weight_scale": 0.011}
    got, want = run(device, "index_score", scored(3, heads, 300, pos, n_valid), attrs, pad=heads == 8)
    hidden = want.isinf()
    assert torch.equal(got.isinf(), hidden)
    seen, expected = got[~hidden].float(), want[~hidden].float()
    assert (seen - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert (seen == expected).float().mean() > 0.9


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("k", "pos", "n_valid"), [(16, (700,), (1,)), (40, (30, 411), (2, 3)), (16, (0, 900), (1, 0))]
)
def test_index_select(
    k: int, pos: tuple[int, ...], n_valid: tuple[int, ...], whole: bool, device: tuple[_native.Device, str]
) -> None:
    # Eight heads and coarse weights: sums are exact, and there are ties.
    attrs = {"ratio": 4, "capacity": 1024, "weight_scale": 0.25, "k": k}
    got, want = run(device, "index_select", scored(9, 8, 256, pos, n_valid), attrs, whole=whole)
    assert torch.equal(got, want)


def scores_like(kind: str, *shape: int) -> Tensor:
    gen = torch.Generator().manual_seed(4)
    values = torch.randn(shape, generator=gen)
    if kind == "ties":
        return torch.randint(-2, 3, shape, generator=gen) / 2
    if kind == "equal":
        return torch.ones(shape)
    if kind == "infinite":
        values[..., ::3] = float("-inf")
        values[..., 5] = float("inf")
        values[..., 6::7] = -0.0
        values[..., 9::7] = 0.0
    if kind == "close":
        return 1 + values * 2**-12
    return values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "infinite", "close"])
@pytest.mark.parametrize(
    ("entries", "k", "pos", "n_valid"),
    [
        (2048, 512, (8190,), (1,)),
        (2047, 100, (5000, 250), (2, 1)),
        (600, 512, (2399, 0), (1, 1)),
        (9000, 33, (35_999,), (1,)),
        (1300, 1200, (5199,), (1,)),
    ],
)
def test_index_topk(
    entries: int,
    k: int,
    pos: tuple[int, ...],
    n_valid: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    device: tuple[_native.Device, str],
) -> None:
    scores = scores_like(kind, len(pos), max(n_valid), entries).to(dtype)
    for b, start in enumerate(pos):
        for t in range(scores.shape[1]):
            scores[b, t, (start + t + 1) // 4 :] = float("-inf")
    operands: list[Tensor | None] = [scores, *vectors(pos, n_valid)]
    got, want = run(device, "index_topk", operands, {"ratio": 4, "k": k})
    assert torch.equal(got, want)


def test_index_topk_of_many_entries(device: tuple[_native.Device, str]) -> None:
    scores = scores_like("close", 1, 1, 1 << 16).to(torch.bfloat16)
    operands: list[Tensor | None] = [scores, *vectors(((1 << 18) - 1,), (1,))]
    got, want = run(device, "index_topk", operands, {"ratio": 4, "k": 512})
    assert torch.equal(got, want)


@pytest.mark.parametrize("fmt", ["", "e2m1", "e4m3"])
def test_index_query(fmt: str, device: tuple[_native.Device, str]) -> None:
    gen = torch.Generator().manual_seed(2)
    q = torch.randn(2, 3, 4 * 128, generator=gen).to(torch.bfloat16)
    tables = [torch.randn(64, 32, generator=gen) for _ in range(2)]
    attrs = {"heads": 4, "fmt": fmt, "block": 32 if fmt else 0, "out": "bf16" if fmt else ""}
    got, want = run(device, "index_query", [q, *tables, torch.tensor([9, 62], dtype=torch.int32)], attrs)
    assert torch.equal(got, want)
