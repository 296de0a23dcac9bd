"""Memory of the sampling kernel: how each row is drawn, and the ring of tokens that the host reads."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rewright.ir.errors import CompilerBug
from rewright.runtime import _native
from rewright.runtime.card import Card
from rewright.runtime.sampling import SamplingOptions

RING_LENGTH = 64
"""Steps of which the tokens fit the ring: more than are ever under way."""
_PAUSE_SECONDS = 20e-6


class DeviceSampling:
    """Shared by all decode steps of a model.

    The ring lies in pinned memory of the host, which the kernel writes to and the host looks at: reading a
    token waits for that token only, never for what was launched behind it. The step `at` of a loop puts the
    token of row r into place [at % RING_LENGTH, r].
    """

    def __init__(self, card: Card, batch: int, vocabulary: int):
        self._card, self._batch = card, batch
        self._row_bytes = len(_native.sample_row(0, 1, 0, 0, 0, []))
        self._rows = torch.zeros(batch * self._row_bytes, dtype=torch.uint8, device=card.where)
        self._weights = torch.zeros(batch * vocabulary, dtype=torch.int64, device=card.where)
        self._ring = torch.full(
            (RING_LENGTH, batch), _native.NOTHING_YET, dtype=torch.int32, pin_memory=not card.emulated
        )

    def sampler(self, logits: tuple[int, int], batch: int, inputs: Tensor) -> _native.DeviceSampler:
        """What chooses tokens from f32[batch, V] at (address, bytes) into the inputs of the next step."""
        return _native.DeviceSampler(
            self._card.device,
            logits,
            batch,
            self._rows.data_ptr(),
            self._weights.data_ptr(),
            inputs.data_ptr(),
            self._ring.data_ptr(),
            RING_LENGTH,
            self._batch,
        )

    def begin(
        self,
        options: Sequence[SamplingOptions],
        draws: Sequence[int],
        most: Sequence[int],
        stop: frozenset[int],
    ) -> None:
        """Start a loop. No step of an earlier one may still have a token to write.

        Args:
            options: how the tokens of each row are drawn.
            draws: draws that each row's request has made before.
            most: tokens that each row may draw.
            stop: tokens that end a row.
        """
        self._ring.fill_(_native.NOTHING_YET)
        ends = sorted(stop)
        rows = [
            _native.sample_row(o.temperature, o.top_p, o.seed, draw, left, ends)
            for o, draw, left in zip(options, draws, most, strict=True)
        ]
        packed = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        self._rows[: packed.numel()].copy_(packed)

    def read(self, at: int, row: int) -> int:
        """The token that step `at` gives a row that is not over, or one of the codes of `_native` in its
        place; waits until it is there."""
        place = self._ring[at % RING_LENGTH]
        while (token := int(place[row])) == _native.NOTHING_YET:
            if self._idle() and int(place[row]) == _native.NOTHING_YET:
                raise CompilerBug(f"step {at} of a decode loop has ended without a token for row {row}")
            time.sleep(_PAUSE_SECONDS)
        place[row] = _native.NOTHING_YET
        return token

    def _idle(self) -> bool:
        """Whether everything that was launched has ended; raises what the card has to complain about."""
        return self._card.emulated or torch.cuda.current_stream(self._card.where).query()
