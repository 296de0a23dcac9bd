"""The numbers of every op family against plain loops in float64, and against values worked out by hand.

State that an op must not read is filled with NaN throughout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rewright.ir import ops
from rewright.ir.formats import decode_e8m0

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
FLOATS = (BF16, F16, F32)


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    """Normal numbers in fp32, the same in every run."""
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(*shape, generator=generator)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F32)


def e8m0(values: Tensor) -> Tensor:
    return values.to(torch.uint8).view(torch.float8_e8m0fnu)


def nans(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def assert_close(got: Tensor, want: Tensor, ulp: float = 1.0, floor: float = 1e-6) -> None:
    """Within `ulp` units of got's dtype of the exact result, and `floor` of the largest one."""
    want = want.double()
    limit = ulp * torch.finfo(got.dtype).eps * want.abs() + floor * want.abs().max()
    assert got.shape == want.shape
    assert got.isfinite().all()
    assert ((got.double() - want).abs() <= limit).all()


# -- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_rms_norm(randn: Callable[..., Tensor], x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = (randn(2, 3, 64) * 3).to(x_dtype), randn(64).to(weight_dtype)
    want = torch.empty(2, 3, 64, dtype=F64)
    for b, t in itertools.product(range(2), range(3)):
        row = x[b, t].double().tolist()
        mean = sum(v * v for v in row) / len(row)
        want[b, t] = torch.tensor(
            [w * v / math.sqrt(mean + 0.25) for v, w in zip(row, weight.tolist(), strict=True)]
        )
    got = ops.rms_norm(x, weight, eps=0.25)
    assert got.dtype is x_dtype
    assert_close(got, want, ulp=0.51 if x_dtype is not F32 else 4)  # rounded once


def rounded(value: float) -> float:
    return torch.tensor(value, dtype=F64).to(BF16).item()


@pytest.mark.parametrize("heads", [2, 32])
def test_head_rms_norm_is_a_chain_of_bf16_steps(randn: Callable[..., Tensor], heads: int) -> None:
    """torch rounds the root of the last values of a step, fewer than 32, once more before dividing."""
    x = randn(1, 2, heads, 32).to(BF16)
    got = ops.head_rms_norm(x, eps=0.25)
    for t, h in itertools.product(range(2), range(heads)):
        row = x[0, t, h].tolist()
        mean = rounded(sum(rounded(v * v) for v in row) / len(row))
        root = math.sqrt(rounded(mean + 0.25))
        factors = {rounded(1 / root)} if heads == 32 else {rounded(1 / root), rounded(1 / rounded(root))}
        assert got[0, t, h].tolist() in [[rounded(v * f) for v in row] for f in factors]


def test_head_rms_norm_does_not_depend_on_the_batch() -> None:
    """The factor of a mean of 1.3828125 is a value that torch's own bf16 rsqrt gives two results for."""
    head = torch.full((1, 1, 1, 32), 1.0625, dtype=BF16)
    alone = ops.head_rms_norm(head, eps=0.2578125)
    many = ops.head_rms_norm(head.expand(67, 1, 1, 32), eps=0.2578125)
    assert torch.equal(many, alone.expand(67, 1, 1, 32))


def test_head_rms_norm_in_fp32(randn: Callable[..., Tensor]) -> None:
    x = randn(1, 2, 2, 32)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.25).sqrt()
    assert_close(ops.head_rms_norm(x, eps=0.25), want, ulp=4)


# -- rotations ----------------------------------------------------------------------------------


def angles(rows: int, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    a = torch.arange(rows)[:, None] * 0.1 / (1.0 + torch.arange(pairs))
    return a, a.cos(), a.sin()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_rope_turns_the_trailing_adjacent_pairs(
    randn: Callable[..., Tensor], inverse: bool, dtype: torch.dtype
) -> None:
    a, cos, sin = angles(16, 3)
    x, pos = randn(2, 4, 2, 10).to(dtype), (0, 9)
    got = ops.rope(x, cos, sin, i32(*pos), inverse=inverse)
    assert torch.equal(got[..., :4], x[..., :4])
    want = x.double()
    for b, t, h, i in itertools.product(range(2), range(4), range(2), range(3)):
        z = complex(*x[b, t, h, 4 + 2 * i : 6 + 2 * i].tolist())
        angle = a[pos[b] + t, i].item()
        z *= complex(math.cos(angle), math.sin(-angle if inverse else angle))
        want[b, t, h, 4 + 2 * i], want[b, t, h, 5 + 2 * i] = z.real, z.imag
    assert_close(got, want, floor=3e-7)


def test_rope_of_compressed_entries_stands_at_their_first_token(randn: Callable[..., Tensor]) -> None:
    """With stride 4, candidate t of a chunk that begins at 6 is entry 1 + t, at position 4 (1 + t)."""
    _, cos, sin = angles(32, 4)
    x = randn(1, 3, 8)
    got = ops.rope(x, cos, sin, i32(6), stride=4)
    for t, position in enumerate((4, 8, 12)):
        assert torch.equal(got[:, t], ops.rope(x[:, t : t + 1], cos, sin, i32(position))[:, 0])


def test_rope_past_the_table_reads_its_last_row(randn: Callable[..., Tensor]) -> None:
    _, cos, sin = angles(4, 4)
    x = randn(1, 1, 8).repeat(1, 3, 1)
    got = ops.rope(x, cos, sin, i32(3))
    assert torch.equal(got[0, 1], got[0, 0])
    assert torch.equal(got[0, 2], got[0, 0])


@pytest.mark.parametrize("n", [1, 2, 8, 128])
def test_hadamard_in_natural_order(n: int) -> None:
    sign = [[(-1.0) ** (j & k).bit_count() for k in range(n)] for j in range(n)]
    matrix = torch.tensor(sign, dtype=F64) / math.sqrt(n)
    got = ops.hadamard(torch.eye(n))  # row k is the transform of unit vector k
    assert_close(got, matrix.T, ulp=2)
    assert_close(got @ got.T, torch.eye(n), floor=1e-6)


def test_hadamard_rounds_once(randn: Callable[..., Tensor]) -> None:
    x = randn(2, 128).to(BF16)
    assert torch.equal(ops.hadamard(x), ops.hadamard(x.float()).to(BF16))


# -- hyper-connections --------------------------------------------------------------------------


def test_hc_mix(randn: Callable[..., Tensor]) -> None:
    streams, fn = randn(2, 3, 4, 16).to(BF16), randn(24, 64)
    want = torch.empty(2, 3, 24, dtype=F64)
    for b, t, m in itertools.product(range(2), range(3), range(24)):
        x = [v for stream in streams[b, t].tolist() for v in stream]
        dot = sum(f * v for f, v in zip(fn[m].tolist(), x, strict=True))
        want[b, t, m] = dot / math.sqrt(sum(v * v for v in x) / 64 + 0.5)
    assert_close(ops.hc_mix(streams, fn, eps=0.5), want, ulp=4)


def sinkhorn(logits: list[list[float]], iters: int, eps: float) -> list[list[float]]:
    """The steps of the released model in float64: softmax over rows, + eps, columns, then both in turn."""
    n = range(len(logits))
    top = [max(row) for row in logits]
    c = [[math.exp(logits[j][k] - top[j]) for k in n] for j in n]
    c = [[v / sum(row) + eps for v in row] for row in c]

    def columns(c: list[list[float]]) -> list[list[float]]:
        sums = [sum(c[j][k] for j in n) + eps for k in n]
        return [[c[j][k] / sums[k] for k in n] for j in n]

    c = columns(c)
    for _ in range(iters - 1):
        c = columns([[v / (sum(row) + eps) for v in row] for row in c])
    return c


HARD_LOGITS = {
    "plus and minus 100": [[100.0, -100.0, 100.0, -100.0], [-100.0, 100.0, 100.0, 100.0],
                           [100.0, 100.0, -100.0, -100.0], [-100.0, -100.0, -100.0, 100.0]],
    "one column wins": [[100.0, -100.0, -100.0, -100.0]] * 4,
    "equal": [[3.0] * 4] * 4,
    "a very negative row": [[0.5, -0.2, 0.1, 0.0], [-1e4] * 4, [1.0, 2.0, 3.0, 4.0], [0.0, 0.1, 0.2, 0.3]],
    "a very negative entry": [[0.5, -1e4, 0.1, 0.0], [0.2] * 4, [1.0, 2.0, 3.0, 4.0], [0.0, 0.1, 0.2, 0.3]],
}  # fmt: skip


@pytest.mark.parametrize("logits", HARD_LOGITS.values(), ids=HARD_LOGITS)
def test_sinkhorn_on_hard_logits(logits: list[list[float]]) -> None:
    mix = torch.cat([torch.zeros(8), torch.tensor(logits).flatten()]).view(1, 1, 24)
    _, _, comb = ops.hc_split(mix, torch.ones(3), torch.zeros(24), streams=4, iters=20, eps=1e-6)
    want = torch.tensor(sinkhorn(logits, 20, 1e-6), dtype=F64)
    assert comb.isfinite().all()
    assert (comb >= 0).all()
    assert (comb[0, 0].double() - want).abs().max() <= 1e-5
    assert (comb[0, 0].sum(0) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("streams", "iters", "eps"), [(4, 20, 1e-6), (5, 7, 1e-3), (1, 3, 1e-6), (2, 1, 0.1)]
)
def test_hc_split(randn: Callable[..., Tensor], streams: int, iters: int, eps: float) -> None:
    n, size = streams, (2 + streams) * streams
    mix, scale, base = randn(2, 3, size), f32(0.5, -2.0, 3.0), randn(size)
    pre, post, comb = ops.hc_split(mix, scale, base, streams=n, iters=iters, eps=eps)
    for b, t in itertools.product(range(2), range(3)):
        role = [0] * n + [1] * n + [2] * n * n
        m = [v * scale[r].item() + c for v, r, c in zip(mix[b, t].tolist(), role, base.tolist(), strict=True)]
        gates = [1 / (1 + math.exp(-v)) for v in m[: 2 * n]]
        matrix = [m[2 * n + n * j : 3 * n + n * j] for j in range(n)]
        assert pre[b, t].tolist() == pytest.approx([g + eps for g in gates[:n]], rel=1e-5)
        assert post[b, t].tolist() == pytest.approx([2 * g for g in gates[n:]], rel=1e-5)
        want = torch.tensor(sinkhorn(matrix, iters, eps), dtype=F64)
        assert (comb[b, t].double() - want).abs().max() <= 1e-5


def test_hc_head_split() -> None:
    got = ops.hc_head_split(f32(0.0, 1.0).view(1, 1, 2), f32(2.0), f32(0.0, -2.0), eps=0.25)
    assert got.flatten().tolist() == [0.75, 0.75]


def test_hc_streams_by_hand() -> None:
    """Two streams of one channel; the combination sums over the first index of the matrix."""
    x = f32(3.0).view(1, 1, 1)
    assert ops.hc_expand(x, streams=2).flatten().tolist() == [3.0, 3.0]
    streams = f32(1.0, 10.0).view(1, 1, 2, 1)
    assert ops.hc_collapse(streams, f32(2.0, 0.5).view(1, 1, 2)).item() == 7.0
    post, comb = f32(100.0, 1000.0).view(1, 1, 2), f32(1.0, 2.0, 3.0, 4.0).view(1, 1, 2, 2)
    got = ops.hc_combine(x, streams, post, comb)
    assert got.flatten().tolist() == [300.0 + 1 * 1 + 3 * 10, 3000.0 + 2 * 1 + 4 * 10]


def test_hc_streams_round_once(randn: Callable[..., Tensor]) -> None:
    y, streams = randn(2, 3, 16).to(BF16), randn(2, 3, 4, 16).to(BF16)
    pre, post, comb = randn(2, 3, 4), randn(2, 3, 4), randn(2, 3, 4, 4)
    want = torch.einsum("btn,btnd->btd", pre.double(), streams.double())
    assert_close(ops.hc_collapse(streams, pre), want, ulp=0.51)
    want = torch.einsum("btjk,btjd->btkd", comb.double(), streams.double())
    want += post.double()[..., None] * y.double()[:, :, None]
    assert_close(ops.hc_combine(y, streams, post, comb), want, ulp=0.51)


# -- state --------------------------------------------------------------------------------------


def test_ring_write_wraps() -> None:
    rows = torch.arange(5.0).view(1, 5, 1)
    ring = ops.ring_write(nans(2, 4, 1), rows[:, :3], i32(2), i32(3), i32(1))
    assert ring[1].flatten().tolist()[2:] + ring[1].flatten().tolist()[:1] == [0.0, 1.0, 2.0]
    assert ring[1, 1].isnan().all()
    assert ring[0].isnan().all()


def test_ring_write_keeps_the_last_of_a_chunk_longer_than_the_ring() -> None:
    rows = torch.arange(9.0).view(1, 9, 1)
    ring = ops.ring_write(nans(1, 4, 1), rows, i32(3), i32(7), i32(0))
    # positions 6..9 hold rows 3..6; rows 7 and 8 lie past the valid ones
    assert ring[0].flatten().tolist() == [5.0, 6.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_writes_without_valid_tokens_leave_the_slot_alone(
    randn: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    state = randn(3, 4, 2).to(dtype)
    state[1, 2] = math.nan
    rows = nans(2, 3, 2, dtype=dtype)
    ring = ops.ring_write(state, rows, i32(5, 9), i32(0, 0), i32(1, 0))
    cache = ops.entry_write(state, rows, i32(0, 0), i32(5, 9), i32(1, 0), ratio=4)
    for got in (ring, cache):
        assert torch.equal(got.view(torch.uint8), state.view(torch.uint8))


def test_entry_write_appends_the_finished_candidates_only() -> None:
    entries = torch.tensor([[[1.0], [2.0], [math.nan]], [[3.0], [math.nan], [math.nan]]])
    cache = ops.entry_write(torch.zeros(3, 4, 1), entries, i32(2, 1), i32(7, 0), i32(2, 0), ratio=4)
    assert cache.squeeze(-1).tolist() == [[3.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0, 1.0, 2.0, 0.0]]


# -- compression --------------------------------------------------------------------------------


def test_add_position_bias() -> None:
    ape = torch.tensor([[0.0], [10.0], [20.0], [30.0]], dtype=BF16)
    got = ops.add_position_bias(torch.ones(2, 3, 1), ape, i32(2, 7))
    assert got.squeeze(-1).tolist() == [[21.0, 31.0, 1.0], [31.0, 1.0, 11.0]]


def pooled(kv: Tensor, gate: Tensor, entry: int, ratio: int, overlap: bool) -> list[float]:
    """One entry from the rows [tokens, w] of the whole sequence."""
    channels = kv.shape[1] // 2 if overlap else kv.shape[1]
    own = [(t, channels if overlap else 0) for t in range(ratio * entry, ratio * (entry + 1))]
    before = [(t, 0) for t in range(ratio * (entry - 1), ratio * entry)] if overlap and entry else []
    result = []
    for c in range(channels):
        terms = [(gate[t, at + c].item(), kv[t, at + c].item()) for t, at in before + own]
        weights = [math.exp(z) for z, _ in terms]
        result.append(sum(w * k for w, (_, k) in zip(weights, terms, strict=True)) / sum(weights))
    return result


@pytest.mark.parametrize(
    ("ratio", "overlap", "ring"), [(4, True, 8), (4, False, 4), (8, False, 8), (2, True, 6)]
)
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 9, 30])
def test_compress_across_chunks(
    randn: Callable[..., Tensor], ratio: int, overlap: bool, ring: int, chunk: int
) -> None:
    """Every split of a sequence gives the entries of the whole; what a step must not read is NaN."""
    length, slot = 30, 2
    kv, gate = randn(length, 6), randn(length, 6)
    rings = [nans(3, ring, 6), nans(3, ring, 6)]
    channels = 3 if overlap else 6
    entries: list[Tensor] = []
    for pos in range(0, length, chunk):
        n = min(chunk, length - pos)
        rows = [torch.cat([v[pos : pos + n], nans(chunk - n, 6)])[None] for v in (kv, gate)]
        at = (i32(pos), i32(n), i32(slot))
        out, count = ops.compress(*rows, *rings, *at, ratio=ratio, overlap=overlap, out="f32")
        assert out.shape == (1, -(-chunk // ratio), channels)
        assert count.tolist() == [(pos + n) // ratio - pos // ratio]
        entries += out[0, : count.item()]
        assert not out[0, count.item() :].any()  # candidates not finished are zero
        rings = [ops.ring_write(r, v, *at) for r, v in zip(rings, rows, strict=True)]
    want = [pooled(kv, gate, i, ratio, overlap) for i in range(length // ratio)]
    assert_close(torch.stack(entries), torch.tensor(want, dtype=F64), ulp=8)


def test_compress_rows_of_a_batch_use_their_own_slots(randn: Callable[..., Tensor]) -> None:
    """A row in the middle of a sequence, one at its start, and one that is masked."""
    kv, gate = randn(8, 4), randn(8, 4)
    rings = [nans(3, 4, 4), nans(3, 4, 4)]
    for ring, rows in zip(rings, (kv, gate), strict=True):
        ring[2, :2] = rows[:2]
    chunk = [torch.stack([v[2:5], v[:3], nans(3, 4)]) for v in (kv, gate)]
    vectors = (i32(2, 0, 3), i32(3, 3, 0), i32(2, 0, 1))
    out, count = ops.compress(*chunk, *rings, *vectors, ratio=4, overlap=False, out="f32")
    assert count.tolist() == [1, 0, 0]
    assert_close(out[0], torch.tensor([pooled(kv, gate, 0, 4, False)], dtype=F64), ulp=8)
    assert not out[1:].any()


def test_compress_rounds_once(randn: Callable[..., Tensor]) -> None:
    operands = (randn(1, 4, 4), randn(1, 4, 4), nans(1, 4, 4), nans(1, 4, 4), i32(0), i32(4), i32(0))
    exact, _ = ops.compress(*operands, ratio=4, overlap=False, out="f32")
    rounded, _ = ops.compress(*operands, ratio=4, overlap=False, out="bf16")
    assert torch.equal(rounded, exact.to(BF16))


# -- attention ----------------------------------------------------------------------------------


def attend(q: Tensor, keys: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One query [H,d] over the keys [m,d] it sees, in float64; bf16 weights on bf16 input."""
    out = torch.empty(q.shape, dtype=F64)
    for h in range(q.shape[0]):
        scores = [(q[h].double() @ k.double()).item() * scale for k in keys]
        top = max(scores)
        weights = torch.tensor([math.exp(s - top) for s in scores], dtype=F64)
        denominator = weights.sum() + math.exp(sink[h].item() - top)
        out[h] = weights.to(q.dtype).double() @ keys.double() / denominator
    return out


class Tokens:
    """Random queries, keys and entries of one sequence, and the state an op finds at a position."""

    def __init__(
        self, randn: Callable[..., Tensor], tokens: int, window: int, ratio: int, dtype: torch.dtype = F32
    ):
        self.q, self.kv = randn(tokens, 2, 8).to(dtype), randn(tokens, 8).to(dtype)
        self.window, self.ratio, self.sink = window, ratio, f32(0.3, -1.0)
        self.entries = randn(tokens // ratio if ratio else 0, 8).to(dtype)

    def ring(self, pos: int) -> Tensor:
        """Rows of the tokens before `pos`, written one by one; the rest is NaN."""
        ring = nans(2, self.window, 8, dtype=self.kv.dtype)
        for t in range(pos):
            ring[1, t % self.window] = self.kv[t]
        return ring

    def cache(self, end: int) -> Tensor | None:
        """Entries finished before `end`; the rest is NaN."""
        if not self.ratio:
            return None
        cache = nans(2, len(self.entries), 8, dtype=self.kv.dtype)
        cache[1, : end // self.ratio] = self.entries[: end // self.ratio]
        return cache

    def run(self, pos: int, n: int, indices: Tensor | None = None, masked: int = 0) -> Tensor:
        """The op on tokens pos .. pos+n-1, followed by `masked` rows of NaN."""
        q = torch.cat([self.q[pos : pos + n], nans(masked, 2, 8, dtype=self.q.dtype)])
        kv = torch.cat([self.kv[pos : pos + n], nans(masked, 8, dtype=self.q.dtype)])
        capacity = len(self.entries) * self.ratio
        return ops.sparse_attention(
            q[None], kv[None], self.ring(pos), self.cache(pos + n), indices, self.sink,
            i32(pos), i32(n), i32(1), ratio=self.ratio, capacity=capacity, scale=0.5,
        )[0]  # fmt: skip

    def expected(self, pos: int, chosen: Sequence[int] | None = None) -> Tensor:
        """The query at `pos` over an explicit key set: its window, and the finished (chosen) entries."""
        window = [t for t in range(pos + 1) if t > pos - self.window]
        finished = [i for i in range(len(self.entries)) if self.ratio * (i + 1) - 1 <= pos]
        entries = finished if chosen is None else [i for i in chosen if i in finished]
        return attend(self.q[pos], torch.cat([self.kv[window], self.entries[entries]]), self.sink, 0.5)


@pytest.mark.parametrize("ratio", [0, 4, 16])
@pytest.mark.parametrize("pos", [0, 1, 3, 4, 5, 6, 7, 8, 9, 14, 15, 16, 17, 31])
def test_attention_decodes_at_every_border(randn: Callable[..., Tensor], ratio: int, pos: int) -> None:
    sequence = Tokens(randn, 32, 8, ratio)
    assert_close(sequence.run(pos, 1)[0], sequence.expected(pos), ulp=16)


@pytest.mark.parametrize("ratio", [0, 4])
@pytest.mark.parametrize("chunk", [2, 4, 8, 9, 64])
def test_attention_in_chunks_loses_no_key(randn: Callable[..., Tensor], ratio: int, chunk: int) -> None:
    """A window of 8 under 64 queries: reading the ring before the chunk is written sees every key."""
    sequence = Tokens(randn, 64, 8, ratio)
    for pos in range(0, 64, chunk):
        n = min(chunk, 64 - pos)
        out = sequence.run(pos, n, masked=chunk - n)
        assert not out[n:].any()  # masked rows give zeros
        want = torch.stack([sequence.expected(p) for p in range(pos, pos + n)])
        assert_close(out[:n], want, ulp=16)


@pytest.mark.parametrize("pos", [0, 6, 13, 29])
def test_attention_over_chosen_entries(randn: Callable[..., Tensor], pos: int) -> None:
    """Holes, entries not yet visible and indices past the cache are absent wherever they stand."""
    sequence = Tokens(randn, 32, 8, 4)
    lists = [[-1, 0, 1], [2, -1, 0], [7, 5, 3]]
    lists = [[*row, 2**31 - 1, -(2**31)] for row in lists]
    indices = torch.tensor([lists], dtype=torch.int32)
    want = torch.stack([sequence.expected(pos + t, lists[t]) for t in range(3)])
    assert_close(sequence.run(pos, 3, indices), want, ulp=16)


def test_attention_rounds_its_weights_to_bf16(randn: Callable[..., Tensor]) -> None:
    sequence = Tokens(randn, 32, 8, 4, BF16)
    for pos in (3, 9, 31):
        assert_close(sequence.run(pos, 1)[0], sequence.expected(pos), ulp=1.01, floor=1e-5)


def test_sinks_take_weight_and_give_no_value(randn: Callable[..., Tensor]) -> None:
    sequence = Tokens(randn, 8, 8, 0)
    sequence.sink = f32(-math.inf, 60.0)
    got = sequence.run(5, 1)[0]
    softmax = torch.softmax(sequence.q[5, 0] @ sequence.kv[:6].T * 0.5, -1)
    assert_close(got[0], softmax @ sequence.kv[:6], ulp=16)
    assert got[1].abs().max() < 1e-20


def test_attention_by_hand() -> None:
    """Equal scores of two keys and the sink: a third each."""
    q, kv = torch.zeros(1, 2, 1, 2), torch.tensor([[[3.0, 6.0], [6.0, 0.0]]])
    out = ops.sparse_attention(
        q, kv, nans(1, 4, 2), None, None, f32(0.0), i32(0), i32(2), i32(0), ratio=0, capacity=8, scale=1.0
    )
    assert out.flatten().tolist() == [1.5, 3.0, 3.0, 2.0]


# -- indexer ------------------------------------------------------------------------------------


def test_index_score(randn: Callable[..., Tensor]) -> None:
    q, weights, keys = randn(2, 3, 2, 8), randn(2, 3, 2), nans(3, 8, 8)
    keys[2, :3] = randn(3, 8)
    vectors = (i32(9, 5), i32(3, 0), i32(2, 0))
    got = ops.index_score(q, weights, keys, *vectors, ratio=4, capacity=16, weight_scale=0.25)
    assert got.shape == (2, 3, 4)
    for t in range(3):
        visible = (9 + t + 1) // 4
        for e in range(visible):
            dots = [(q[0, t, h].double() @ keys[2, e].double()).item() for h in range(2)]
            want = sum(max(d, 0.0) * w * 0.25 for d, w in zip(dots, weights[0, t].tolist(), strict=True))
            assert got[0, t, e].item() == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert got[0, t, visible:].tolist() == [-math.inf] * (4 - visible)
    assert (got[1] == -math.inf).all()


def test_index_score_rounds_each_step_to_bf16() -> None:
    """1 + 2^-8 is rounded off in the dot product, so twice it gives exactly 2."""
    q = torch.tensor([1.0, 2.0**-8], dtype=BF16).view(1, 1, 1, 2).repeat(1, 1, 2, 1)
    keys = torch.ones(1, 1, 2, dtype=BF16)
    weights = torch.ones(1, 1, 2, dtype=BF16)
    got = ops.index_score(q, weights, keys, i32(0), i32(1), i32(0), ratio=1, capacity=1, weight_scale=1.0)
    assert got.item() == 2.0
    exact = ops.index_score(
        q.float(),
        weights.float(),
        keys.float(),
        i32(0),
        i32(1),
        i32(0),
        ratio=1,
        capacity=1,
        weight_scale=1.0,
    )
    assert exact.item() == 2.0 + 2.0**-7


def test_index_topk_prefers_the_lower_index_among_equals() -> None:
    scores = f32(1.0, 3.0, 3.0, 0.0, 3.0, 1.0, 9.0, 9.0).view(1, 1, 8)
    got = ops.index_topk(scores, i32(23), i32(1), ratio=4, k=4)
    assert got.flatten().tolist() == [1, 2, 4, 0]


def test_index_topk_never_names_an_entry_out_of_sight() -> None:
    """Scores of entries that do not exist yet are garbage, be it large or NaN."""
    scores = torch.full((2, 3, 8), math.nan)
    scores[0, :, :3] = f32(1.0, 2.0, 3.0)
    scores[0, 0, 2] = -math.inf  # entry 2 ends at position 11, the third query's own
    scores[0, 1, 2] = -math.inf
    got = ops.index_topk(scores, i32(9, 40), i32(3, 0), ratio=4, k=3)
    assert got.tolist() == [[[1, 0, -1], [1, 0, -1], [2, 1, 0]], [[-1, -1, -1]] * 3]


def test_index_topk_masked_rows_and_the_start_hold_no_entry() -> None:
    scores = torch.ones(1, 4, 8)
    got = ops.index_topk(scores, i32(1), i32(3), ratio=4, k=2)
    assert got[0].tolist() == [[-1, -1], [-1, -1], [0, -1], [-1, -1]]


# -- routing and experts ------------------------------------------------------------------------


def affinity(logit: float) -> float:
    return math.sqrt(math.log1p(math.exp(logit)))


def test_route(randn: Callable[..., Tensor]) -> None:
    logits, bias = randn(2, 3, 8) * 3, randn(8)
    experts, weights = ops.route(logits, bias, i32(3, 3), k=3, scale=1.5)
    for b, t in itertools.product(range(2), range(3)):
        a = [affinity(v) for v in logits[b, t].tolist()]
        best = sorted(range(8), key=lambda e: -(a[e] + bias[e].item()))[:3]
        assert experts[b, t].tolist() == best
        total = sum(a[e] for e in best)
        assert weights[b, t].tolist() == pytest.approx([1.5 * a[e] / total for e in best], rel=1e-5)


def test_route_prefers_the_lower_id_among_equals() -> None:
    logits = torch.zeros(1, 1, 4)
    experts, weights = ops.route(logits, f32(0.0, 1.0, 0.0, 1.0), i32(1), k=3, scale=1.0)
    assert experts.flatten().tolist() == [1, 3, 0]
    assert weights.flatten().tolist() == pytest.approx([1 / 3] * 3)  # the bias chooses and does not weigh


def test_route_hash() -> None:
    logits = f32(0.0, 1.0, 2.0, 3.0).repeat(1, 4, 1)
    table = torch.tensor([[3, 0], [1, 2], [0, 1]])
    # the last two ids are out of the table and are clamped into it
    experts, weights = ops.route_hash(
        logits, table, torch.tensor([[1, 0, 9, -5]], dtype=torch.int32), i32(4), scale=2.0
    )
    assert experts[0].tolist() == [[1, 2], [3, 0], [0, 1], [3, 0]]
    a, b = affinity(1.0), affinity(2.0)
    assert weights[0, 0].tolist() == pytest.approx([2 * a / (a + b), 2 * b / (a + b)], rel=1e-5)


@pytest.mark.parametrize("hashed", [False, True])
def test_masked_rows_choose_nothing(hashed: bool) -> None:
    logits = nans(2, 3, 4)
    logits[0, :2] = 0.5
    n_valid = i32(2, 0)
    if hashed:
        tokens = torch.zeros(2, 3, dtype=torch.int32)
        experts, weights = ops.route_hash(logits, torch.tensor([[2, 1]]), tokens, n_valid, scale=1.0)
    else:
        experts, weights = ops.route(logits, torch.zeros(4), n_valid, k=2, scale=1.0)
    assert (experts[0, :2] >= 0).all()
    assert (weights[0, :2] == 0.5).all()
    for masked in (experts[0, 2:], experts[1]):
        assert (masked == -1).all()
    for masked in (weights[0, 2:], weights[1]):
        assert not masked.any()


def fp8_matrix(randn: Callable[..., Tensor], *shape: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes and a power-of-two scale per 128 x 128."""
    *lead, n, k = shape
    weight = (randn(*shape) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, e8m0(120 + (randn(*lead, -(-n // 128), -(-k // 128)) * 3).round().clamp(-6, 6))


def fp8_rows(randn: Callable[..., Tensor], *shape: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes and a power-of-two scale per 128 of the last axis."""
    codes = (randn(*shape) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, e8m0(120 + (randn(*shape[:-1], shape[-1] // 128) * 3).round().clamp(-6, 6))


def test_linear_in_fp8_equals_scaled_block_sums(randn: Callable[..., Tensor]) -> None:
    """The released kernel's arithmetic: a dot product per block of 128, times both scales, summed."""
    (x, x_scale), (weight, scale) = fp8_rows(randn, 1, 3, 256), fp8_matrix(randn, 130, 256)
    sx, sw = decode_e8m0(x_scale).double(), decode_e8m0(scale).double()
    want = torch.zeros(1, 3, 130, dtype=F64)
    for t, n, block in itertools.product(range(3), range(130), range(2)):
        part = slice(128 * block, 128 * (block + 1))
        dot = x[0, t, part].double() @ weight[n, part].double()
        want[0, t, n] += dot * sx[0, t, block] * sw[n // 128, block]
    assert_close(ops.linear(x, x_scale, weight, scale, out="f32"), want, ulp=1, floor=1e-6)
    assert_close(ops.linear(x, x_scale, weight, scale, out="bf16"), want, ulp=0.51, floor=1e-6)
    widened = x.float() * decode_e8m0(x_scale).repeat_interleave(128, -1)
    assert_close(ops.linear(widened, None, weight, scale, out="f32"), want, ulp=1, floor=1e-6)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize(("out", "dtype"), [("bf16", BF16), ("f32", F32)])
def test_linear_in_floats(
    randn: Callable[..., Tensor],
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out: str,
    dtype: torch.dtype,
) -> None:
    x, weight = randn(2, 3, 64).to(x_dtype), randn(5, 64).to(weight_dtype)
    got = ops.linear(x, None, weight, None, out=out)
    assert got.dtype is dtype
    assert_close(got, torch.einsum("btk,nk->btn", x.double(), weight.double()), ulp=0.51, floor=1e-6)


def test_grouped_linear(randn: Callable[..., Tensor]) -> None:
    """Rows g R .. (g+1) R - 1 of the weight belong to group g; FP8 weights do not quantise the input."""
    x = randn(2, 3, 2, 128).to(BF16)
    weight, scale = fp8_matrix(randn, 256, 128)
    got = ops.grouped_linear(x, weight, scale)
    assert got.dtype is BF16
    dense = weight.double() * decode_e8m0(scale).double().repeat_interleave(128, 0)
    for g in range(2):
        want = torch.einsum("btk,rk->btr", x[:, :, g].double(), dense[128 * g : 128 * (g + 1)])
        assert_close(got[:, :, g], want, ulp=1)
    floats = ops.grouped_linear(x.float(), dense.float(), None)
    assert_close(floats[:, :, 1], want, ulp=1)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-v for v in E2M1]


@pytest.mark.parametrize("fmt", ["f32", "e4m3", "e2m1"])
@pytest.mark.parametrize("per_expert", [False, True])
def test_expert_linear(randn: Callable[..., Tensor], fmt: str, per_expert: bool) -> None:
    """Ids outside the table give zeros, and an expert that nobody chose is not read: it is NaN."""
    experts = torch.tensor([[[3, 0], [-1, 3], [4, 1]]], dtype=torch.int32)
    shape = (1, 3, 2, 128) if per_expert else (1, 3, 128)
    x, x_scale = (randn(*shape), None) if fmt == "f32" else fp8_rows(randn, *shape)
    if fmt == "f32":
        weight, scale = randn(4, 6, 128), None
        dense = weight.double()
        weight[2] = math.nan
    elif fmt == "e4m3":
        weight, scale = fp8_matrix(randn, 4, 6, 128)
        dense = weight.double() * decode_e8m0(scale).double()
        scale.view(torch.uint8)[2] = 255
    else:
        weight = (randn(4, 6, 64) * 100).to(torch.int32).to(torch.uint8)
        scale = e8m0(120 + (randn(4, 6, 4) * 3).round().clamp(-6, 6))
        codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).int()
        dense = torch.tensor(E2M1, dtype=F64)[codes] * decode_e8m0(scale).double().repeat_interleave(32, -1)
        scale.view(torch.uint8)[2] = 255
    rows = x.double() if x_scale is None else x.double() * decode_e8m0(x_scale).double()
    want = torch.zeros(1, 3, 2, 6, dtype=F64)
    for t, place in itertools.product(range(3), range(2)):
        expert = experts[0, t, place].item()
        if 0 <= expert < 4:
            row = rows[0, t, place] if per_expert else rows[0, t]
            want[0, t, place] = dense[expert] @ row
    got = ops.expert_linear(x, x_scale, weight, scale, experts, out="f32")
    assert_close(got, want)
    assert not got[0, 1, 0].any()
    assert not got[0, 2, 0].any()


def test_expert_sum_does_not_depend_on_the_order_of_the_list(randn: Callable[..., Tensor]) -> None:
    routed, shared = randn(1, 1, 4, 64).to(BF16), randn(1, 1, 64)
    ids = [5, 0, 9, 2]
    first = ops.expert_sum(routed, torch.tensor([[ids]], dtype=torch.int32), shared)
    for order in itertools.permutations(range(4)):
        moved = torch.tensor([[[ids[i] for i in order]]], dtype=torch.int32)
        assert torch.equal(ops.expert_sum(routed[:, :, list(order)], moved, shared), first)
    assert_close(first, routed.double().sum(2) + shared.double(), ulp=4)


def test_expert_sum_runs_in_ascending_id_and_ends_with_the_shared_expert() -> None:
    """In fp32 (2^25 + 1) - 2^25 + 1 is 1, in any other order of these terms it is 2 or 0."""
    routed = f32(-(2.0**25), 1.0, 2.0**25).view(1, 1, 3, 1)
    experts = torch.tensor([[[7, 4, 1]]], dtype=torch.int32)
    assert ops.expert_sum(routed, experts, torch.ones(1, 1, 1)).item() == 1.0
    experts = torch.tensor([[[1, 7, 4]]], dtype=torch.int32)
    assert ops.expert_sum(routed, experts, torch.ones(1, 1, 1)).item() == 2.0


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_swiglu_clamps_the_gate_above_and_the_other_on_both_sides() -> None:
    gate, up = f32(50.0, -50.0, 2.0, 2.0), f32(1.0, 3.0, 50.0, -50.0)
    got = ops.swiglu(gate.view(1, 1, 4), up.view(1, 1, 4), None, limit=10.0).flatten()
    want = [silu(10.0), silu(-50.0) * 3, silu(2.0) * 10, silu(2.0) * -10]
    assert got.tolist() == pytest.approx(want, rel=1e-5)


def test_swiglu_weighs_before_it_rounds(randn: Callable[..., Tensor]) -> None:
    gate, up, weights = randn(1, 2, 3, 8).to(BF16), randn(1, 2, 3, 8).to(BF16), randn(1, 2, 3)
    want = torch.nn.functional.silu(gate.double()) * up.double() * weights.double()[..., None]
    assert_close(ops.swiglu(gate, up, weights, limit=10.0), want, ulp=0.51)


# -- quantisation, embedding, shapes ------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "block", "limit"), [("e4m3", 64, 448.0), ("e2m1", 32, 6.0)])
def test_rounding_of_part_of_an_axis(
    randn: Callable[..., Tensor], fmt: str, block: int, limit: float
) -> None:
    """quantize + dequantize over `dims` rounds these and passes the rest, in the dtype of the values."""
    x = (randn(2, 3, 192) * 5).to(BF16)
    codes, scale = ops.quantize(x, fmt=fmt, block=block, dims=[64, 128])
    got = ops.dequantize(codes, scale, x, block=block, out="bf16", dims=[64, 128])
    assert torch.equal(got[..., :64], x[..., :64])
    assert torch.equal(got[..., 128:], x[..., 128:])
    whole = ops.dequantize(*ops.quantize(x[..., 64:128], fmt=fmt, block=block), None, block=block, out="f32")
    assert torch.equal(got[..., 64:128].float(), whole)  # the product is exact in bf16
    assert not torch.equal(got, x)
    for b, t, i in itertools.product(range(2), range(3), range(64 // block)):
        part = x[b, t, 64 + block * i : 64 + block * (i + 1)].float().abs().max().item()
        exponent = math.ceil(math.log2(part / limit))
        assert decode_e8m0(scale)[b, t, i].item() == 2.0**exponent


def test_embed_clamps_ids_into_the_table() -> None:
    table = torch.arange(6.0).view(3, 2)
    tokens = torch.tensor([[0, 2, 3, 2**31 - 1, -1]], dtype=torch.int32)
    got = ops.embed(tokens, table, out="bf16")
    assert got.dtype is BF16
    assert got[0].tolist() == [[0.0, 1.0], [4.0, 5.0], [4.0, 5.0], [4.0, 5.0], [0.0, 1.0]]


def test_take_last() -> None:
    x = torch.arange(12.0).view(3, 4, 1)
    assert ops.take_last(x, i32(4, 1, 0)).flatten().tolist() == [3.0, 4.0, 8.0]


def test_reshape_is_row_major_and_copies() -> None:
    x = torch.arange(12.0).view(1, 2, 6)
    got = ops.reshape(x, tail=[3, 2])
    assert got.tolist() == x.view(1, 2, 3, 2).tolist()
    got.zero_()
    assert x.sum().item() == 66.0
