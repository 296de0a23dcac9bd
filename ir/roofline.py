"""The least time that one step can take on a card: bytes over memory bandwidth.

    seconds = bytes that one card reads and writes / its memory bandwidth
    tokens per second = batch * tokens of a step / seconds

This is the floor of a graph as it stands, in which every value goes through memory once for every
writer and reader. It knows nothing of launches, of arithmetic (which takes over at many tokens a
step) or of what cards exchange under tensor parallelism. How weights split is in
`tensor_parallel.py`. Activations are counted whole on every card, so with several cards the floor is
too high by part of them; `CardBytes` keeps them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from rewright.ir.errors import UsageError
from rewright.ir.graph import Graph, type_of_value
from rewright.ir.round_trips import step_bytes
from rewright.ir.tensor_parallel import TensorParallel, is_split
from rewright.ir.traffic import traffic


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Attributes:
        name: as the command line spells it.
        nominal: memory bandwidth of the data sheet in bytes/s.
        memory: bytes of the data sheet, its GB taken as 10^9. A card has about 7 % more, which the
            driver, the CUDA context and workspaces take.
        measured: bytes/s of a kernel that only reads, where one was run on such a card.
    """

    name: str
    nominal: int
    memory: int
    measured: int | None = None

    @property
    def rate(self) -> int:
        """Bytes/s that floors are computed with: measured if there is such a figure, else nominal."""
        return self.measured or self.nominal

    @property
    def rate_kind(self) -> str:
        return "measured" if self.measured else "nominal"


# Nominal figures: NVIDIA's data sheets. H200: 1 GB per launch read at 4.34 TB/s (direct loads, 132 SMs).
# Of the A100 there is no measurement of ours; public kernels report 1.75 to 1.99 TB/s.
CARDS = (
    Card("a100-80g-pcie", 1_935_000_000_000, 80_000_000_000),
    Card("a100-80g-sxm", 2_039_000_000_000, 80_000_000_000),
    Card("a800-80g-pcie", 1_935_000_000_000, 80_000_000_000),
    Card("h200", 4_800_000_000_000, 141_000_000_000, 4_340_000_000_000),
)


def card_named(name: str) -> Card:
    """The card of that name; `UsageError` lists the known ones."""
    for card in CARDS:
        if card.name == name:
            return card
    raise UsageError(
        f"unknown card {name!r}", where="--card", fix=f"cards: {', '.join(c.name for c in CARDS)}"
    )


@dataclass(frozen=True, slots=True)
class CardBytes:
    """Bytes of one step on one of N cards.

    Attributes:
        cards: N.
        tokens: tokens that a step yields on all cards together: batch * tokens of the variant.
        split: bytes read of weights that are split, 1/N of them.
        replicated: bytes read of weights that every card has.
        constants, state, activations: as in `StepBytes`, read and written, whole on every card.
        resident: bytes that a card holds: its part of the weights that this graph reads, the constants and
            the state at its full length.
    """

    cards: int
    tokens: int
    split: int
    replicated: int
    constants: int
    state: int
    activations: int
    resident: int

    @property
    def total(self) -> int:
        return self.split + self.replicated + self.constants + self.state + self.activations


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of `moved` on a card, and whether the card can hold what it needs."""

    card: Card
    moved: CardBytes

    @property
    def seconds(self) -> float:
        return self.moved.total / self.card.rate

    @property
    def tokens_per_second(self) -> float:
        return self.moved.tokens / self.seconds

    @property
    def fits(self) -> bool:
        return self.moved.resident <= self.card.memory


def card_bytes(graph: Graph, cards: int = 1, context: int | None = None) -> CardBytes:
    """Bytes that one step moves on each of `cards` cards.

    Args:
        graph: the graph, at any stage.
        cards: size of the tensor-parallel group.
        context: tokens of the sequence after the step; by default the variant's capacity.

    Raises:
        UsageError: the weights cannot be split so; the error lists the sizes that can.
    """
    parallel = TensorParallel.of(graph, cards)
    moved, step = traffic(graph, context), step_bytes(graph, context)
    split = sum(parallel.read(n, b) for n, b in moved.weight_reads.items() if is_split(n))
    replicated = sum(b for n, b in moved.weight_reads.items() if not is_split(n))
    resident = sum(parallel.resident(n, b) for n, b in moved.resident.items())
    resident += sum(type_of_value(n).nbytes for n in graph.of_kind("constant", "state"))
    return CardBytes(
        cards=cards,
        tokens=graph.attrs.get("batch", 1) * graph.attrs.get("tokens", 1),
        split=split,
        replicated=replicated,
        constants=step.constants,
        state=step.state,
        activations=step.activations,
        resident=resident,
    )
