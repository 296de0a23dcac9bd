"""Runs a graph over texts and hands on the values that it quantises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rewright.calibration.sites import Site
from rewright.ir.errors import MachineError
from rewright.ir.graph import Graph
from rewright.ir.interpret import Interpreter, empty_state

Take = Callable[[Site, Tensor], None]
"""Called with a site and rows [n,columns] that it quantises."""


class Watch:
    """Picks the values of sites out of what an interpreter computes."""

    def __init__(self, sites: Sequence[Site], take: Take):
        self._take = take
        self._sites: dict[str, list[Site]] = {}
        for site in sites:
            self._sites.setdefault(site.value, []).append(site)
        self._counts = {site.count for site in sites if site.count is not None}
        self._count: dict[str, int] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        """Take in the result of an op of a step of one sequence."""
        if name in self._counts:
            self._count[name] = int(value[0])
        for site in self._sites.get(name, ()):
            valid = value if site.count is None else value[:, : self._count[site.count]]
            start, stop = site.dims
            self._take(site, valid[..., start:stop].reshape(-1, site.columns))


def run_texts(
    graph: Graph,
    weights: Mapping[str, Tensor],
    texts: Sequence[Sequence[int]],
    watch: Watch,
    advance: Callable[[int], None],
) -> None:
    """Feed texts through a graph, each from position 0 on.

    Args:
        graph: a chunk variant of batch 1 that holds the longest text.
        weights: tensors by name.
        texts: token ids.
        watch: sees every op result.
        advance: told how many more tokens are done.

    Raises:
        MachineError: logits that are no numbers.
    """
    interpreter = Interpreter(graph, weights)
    state = empty_state(graph)
    size = graph.attrs["tokens"]
    for ids in texts:
        for pos in range(0, len(ids), size):
            chunk = ids[pos : pos + size]
            inputs = {
                "tokens": torch.tensor([list(chunk)], dtype=torch.int32),
                "pos": torch.tensor([pos], dtype=torch.int32),
                "n_valid": torch.tensor([len(chunk)], dtype=torch.int32),
                "slot": torch.zeros(1, dtype=torch.int32),
            }
            logits = interpreter.run(inputs, state, observe=watch)["logits"]
            if not bool(torch.isfinite(logits).all()):
                raise MachineError(
                    f"logits at position {pos + len(chunk) - 1} are no numbers",
                    where="calibration",
                    fix="check the checkpoint with rewright score",
                )
            advance(len(chunk))
