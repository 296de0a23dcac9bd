"""One variant bound to the card: its launches, recorded once as a CUDA graph and replayed every step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rewright.runtime.card import Card

Launch = Callable[[int], None]
"""Launches work on a stream and waits for nothing."""


class DeviceStep:
    """Launches that run as one.

    On a card they are recorded when first asked for. They run once before that, outside of the recording,
    because a kernel's first launch may load its code: the inputs must then have no valid row, so that the
    state stays as it is. A replay is one call, whatever the launches.
    """

    def __init__(self, launches: list[Launch], card: Card, *, graphs: bool):
        """
        Args:
            launches: in order.
            card: where they run.
            graphs: whether they are recorded. The emulation never is.
        """
        self._launches, self._card = launches, card
        self._graph = self._record() if graphs and not card.emulated else None

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def run(self) -> None:
        """Launch everything on torch's current stream; nothing is waited for."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch(self._card.stream)

    def _launch(self, stream: int) -> None:
        for launch in self._launches:
            launch(stream)

    def _record(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self._card.where)
        side.wait_stream(torch.cuda.current_stream(self._card.where))
        with torch.cuda.stream(side):
            self._launch(side.cuda_stream)
        torch.cuda.synchronize(self._card.where)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self._launch(side.cuda_stream)
        return graph
