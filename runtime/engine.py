"""Sequences in state slots: chunked prefill, batched decode, scoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewright.ir.errors import BadInput, CompilerBug, UsageError
from rewright.ir.variant import PRECISIONS
from rewright.runtime import _native
from rewright.runtime.card import open_card
from rewright.runtime.decode_loop import DecodeLoop, Start
from rewright.runtime.device import DeviceModel
from rewright.runtime.host import HostModel
from rewright.runtime.load import Artifact
from rewright.runtime.logit_check import require_likelihoods
from rewright.runtime.model import Model, Row
from rewright.runtime.reference import ReferenceModel


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model makes of the tokens of a sequence behind the first, n of them.

    Attributes:
        nll: f32[n], negative log-likelihood of each given those before it, natural log.
        predicted: i64[n], the most likely token at the place of each.
    """

    nll: Tensor
    predicted: Tensor


class Engine:
    """A loaded model with `max_batch` slots, each holding one sequence.

    Validity of state follows from positions alone, so a slot is reused by starting at position 0.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        reference: bool = False,
        threads: int | None = None,
        model: Model | None = None,
        loading: Callable[[int], None] | None = None,
        graphs: bool = True,
        precision: str = "low",
    ):
        """
        Args:
            artifact: the compiled model.
            reference: execute it with the interpreter over op references instead of kernels.
            threads: of the host's kernels; by default one for each core that this process may use.
            model: what executes it, in place of both.
            loading: told the bytes of each weight that is copied to a card.
            graphs: whether a card's steps are recorded as CUDA graphs.
            precision: of the variants that steps run in at first.

        Raises:
            UsageError: the model was not compiled in that precision.
            MachineError: this machine has no card for the model, or too little memory.
        """
        self.artifact = artifact
        self.limits = artifact.manifest.limits
        self.vocab_size: int = artifact.manifest.model["vocab_size"]
        require_precision(artifact, precision)
        if model is None:
            model = _model(artifact, reference, threads, loading, graphs)
        self.model = model
        self._precision = "low"
        self.precision = precision
        self._length = [0] * self.limits.max_batch

    @property
    def precision(self) -> str:
        """Precision of the variants that steps run in, one of `ir.variant.PRECISIONS`.

        It may be set between any two steps, and between decode loops: sequences go on from the state they
        have. `UsageError` for one that the model was not compiled in.
        """
        return self._precision

    @precision.setter
    def precision(self, value: str) -> None:
        if value != self._precision:
            require_precision(self.artifact, value)
            self._precision = self.model.precision = value

    def length(self, slot: int) -> int:
        """Tokens that the sequence in a slot holds."""
        return self._length[slot]

    def reset(self, slot: int) -> None:
        """Forget the sequence in a slot."""
        self._length[slot] = 0

    def prefill(
        self, slot: int, ids: Sequence[int], *, progress: Callable[[int], None] | None = None
    ) -> Tensor:
        """Append tokens in chunks; returns f32[V] on the CPU, the logits after the last one."""
        self.check(ids, self._length[slot])
        logits = None
        for chunk in self._chunks(ids):
            logits = self.model.step([Row(chunk, self._length[slot], slot)])[0]
            self._length[slot] += len(chunk)
            if progress is not None:
                progress(len(chunk))
        if logits is None:
            raise CompilerBug("prefill without tokens")
        return logits.cpu()

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Append one token to each of several slots; returns f32[V] on the CPU by slot."""
        for slot, token in tokens.items():
            self.check([token], self._length[slot])
        rows = [Row((token,), self._length[slot], slot) for slot, token in tokens.items()]
        logits = self.model.step(rows).cpu()
        for slot in tokens:
            self._length[slot] += 1
        return dict(zip(tokens, logits, strict=True))

    def can_loop(self, stop: frozenset[int] = frozenset()) -> bool:
        """Whether the model decodes by itself, `stop` ending a sequence."""
        return isinstance(self.model, DeviceModel) and len(stop) <= _native.MOST_STOPS

    def decode_loop(self, starts: Sequence[Start], stop: frozenset[int] = frozenset()) -> DecodeLoop:
        """Decode and sample without the host in between; only where `can_loop`.

        Args:
            starts: sequences, each at the length of its slot.
            stop: tokens that end a sequence.

        Raises:
            BadInput: a token outside the vocabulary, or more tokens than the compiled context.
        """
        if not isinstance(self.model, DeviceModel):
            raise CompilerBug("a decode loop on a model that has none")
        for start in starts:
            self.check([start.token], start.pos + start.most - 1)
            if start.pos != self._length[start.slot]:
                raise CompilerBug(f"a decode loop begins at {start.pos} in slot {start.slot}")
        return self.model.decode_loop(starts, stop, self._advance)

    def _advance(self, slot: int) -> None:
        self._length[slot] += 1

    def score(self, slot: int, ids: Sequence[int], name: str = "sequence") -> Tensor:
        """Negative log-likelihood of each token given those before it: f32[len(ids) - 1], natural log.

        Starts the slot's sequence over.

        Raises:
            MachineError: logits that are no numbers, with the position of the token that they are for.
        """
        return self.predict(slot, ids, name).nll

    def predict(self, slot: int, ids: Sequence[int], name: str = "sequence") -> Scored:
        """As `score`, with the most likely tokens too.

        Args:
            name: what an error calls the sequence.
        """
        self.reset(slot)
        self.check(ids, 0)
        parts: list[Tensor] = []
        predicted: list[Tensor] = []
        for chunk in self._chunks(ids[:-1]):
            start = self._length[slot]
            logits = self.model.step([Row(chunk, start, slot)], all_positions=True)[0].cpu()
            target = torch.tensor(ids[start + 1 : start + 1 + len(chunk)])
            nll = torch.nn.functional.cross_entropy(logits, target, reduction="none")
            require_likelihoods(nll, logits, name, start + 1)
            parts.append(nll)
            predicted.append(logits.argmax(-1))
            self._length[slot] += len(chunk)
        if not parts:
            return Scored(torch.empty(0), torch.empty(0, dtype=torch.int64))
        return Scored(torch.cat(parts), torch.cat(predicted))

    def _chunks(self, ids: Sequence[int]) -> list[Sequence[int]]:
        size = self.limits.chunk
        return [ids[i : i + size] for i in range(0, len(ids), size)]

    def check(self, ids: Sequence[int], start: int, where: str = "prompt") -> None:
        """Refuse token ids outside the vocabulary, and more tokens than the compiled context."""
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise BadInput(
                f"token id {wrong[0]} is not from 0 to {self.vocab_size - 1}, the model's vocabulary",
                where=where,
            )
        if start + len(ids) > self.limits.max_context:
            raise BadInput(
                f"{start + len(ids)} tokens do not fit the compiled maximum of {self.limits.max_context}",
                where=where,
                fix="shorten it, or compile with a larger --max-context",
            )


def require_precision(artifact: Artifact, precision: str) -> None:
    """`UsageError` if a model was not compiled in a precision."""
    if precision not in PRECISIONS:
        raise UsageError(
            f"there is no precision {precision!r}", where="--precision", fix=f"one of {', '.join(PRECISIONS)}"
        )
    if precision not in artifact.manifest.precisions:
        raise UsageError(
            f"it was compiled without {precision} variants",
            where=str(artifact.folder),
            fix="compile the checkpoint again with --variants low,high",
        )


def _model(
    artifact: Artifact,
    reference: bool,
    threads: int | None,
    loading: Callable[[int], None] | None,
    graphs: bool,
) -> Model:
    if reference:
        return ReferenceModel(artifact)
    if artifact.manifest.target == "sm80":
        return DeviceModel(artifact, open_card(), loading=loading, graphs=graphs)
    return HostModel(artifact, threads=threads)
