"""The quality gate of a compilation: how much worse the compiled model predicts texts than the checkpoint.

docs/guards.md says what is compared with what, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, MachineError, Refused, UsageError
from rewright.ir.manifest import TOKENIZER_NAME
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.memory import total_bytes
from rewright.runtime.reference import ReferenceModel
from rewright.runtime.score import Encoded, encode_texts, load_texts
from rewright.runtime.stream_error import StreamError, stream_errors
from rewright.runtime.tokenizer import Tokenizer

OPTION = "--max-nll-loss"
SHOWN_TEXTS = 3
SHOWN_MODULES = 5


@dataclass(frozen=True, slots=True)
class QualityLimit:
    """What a compiled model must keep.

    Attributes:
        max_nll_loss: how many nats a token its mean negative log-likelihood may lie above the reference's.
        text: JSONL file of texts, as `rewright score --text` reads it.
    """

    max_nll_loss: float
    text: Path

    def __post_init__(self) -> None:
        if not 0 <= self.max_nll_loss < math.inf:
            raise UsageError(f"{self.max_nll_loss} is not a number of nats from 0 up", where=OPTION)


@dataclass(frozen=True, slots=True)
class Quality:
    """Mean negative log-likelihood of a token, in nats, over all texts.

    Attributes:
        nll: that of the compiled model.
        reference: that of the reference.
        tokens: how many were predicted.
    """

    nll: float
    reference: float
    tokens: int

    @property
    def loss(self) -> float:
        return self.nll - self.reference


@dataclass(frozen=True, slots=True)
class _TextLoss:
    """Sums over the tokens of a text, in nats."""

    encoded: Encoded
    nll: float
    reference: float

    @property
    def tokens(self) -> int:
        return len(self.encoded.ids) - 1

    @property
    def a_token(self) -> float:
        return (self.nll - self.reference) / self.tokens


class QualityGate:
    """A limit with its texts read and its reference opened: what is wrong with them is known before anything
    is compiled."""

    def __init__(self, limit: QualityLimit, checkpoint: Path, reference: ModelSource):
        """
        Args:
            limit: what must be kept.
            checkpoint: the checkpoint's folder.
            reference: the checkpoint opened with fp32 numerics and the compiled model's limits.

        Raises:
            BadInput: texts that cannot be scored, or no tokenizer to read them with.
            MachineError: too little memory for the reference.
        """
        self._limit, self._reference = limit, reference
        tokenizer = checkpoint / TOKENIZER_NAME
        if not tokenizer.exists():
            raise BadInput(
                f"has no {TOKENIZER_NAME}, so no text can be scored",
                where=str(checkpoint),
                fix=f"add it, or leave {OPTION} out",
            )
        encoded = encode_texts(
            Tokenizer.open(tokenizer),
            load_texts(limit.text),
            bos=reference.config.bos_token_id,
            max_context=reference.limits.max_context,
        )
        self._texts = [e for e in encoded if len(e.ids) > 1]
        needed = sum(t.nbytes for t in reference.weight_types().values())
        if needed > total_bytes():
            raise MachineError(
                f"the reference has {needed:,} bytes of fp32 weights, this machine has {total_bytes():,}",
                where=OPTION,
                fix="leave it out, or compile on a larger machine",
            )

    def check(self, artifact: Artifact, progress: Callable[[str, int, int], None]) -> Quality:
        """Score the texts with the compiled model and with the reference.

        Raises:
            Refused: the model loses more than the limit; names the texts that lose most and the modules where
                the worst of them goes wrong.
            MachineError: logits that are no numbers.
        """
        ours = ReferenceModel(artifact)
        theirs = self._reference_model(artifact)
        engines = [Engine(artifact, model=model) for model in (ours, theirs)]
        found = []
        for done, encoded in enumerate(self._texts):
            progress("checking quality", done, len(self._texts))
            sums = [float(e.score(0, encoded.ids, encoded.text.where).double().sum()) for e in engines]
            found.append(_TextLoss(encoded, *sums))
        progress("checking quality", len(found), len(found))
        tokens = sum(t.tokens for t in found)
        quality = Quality(
            sum(t.nll for t in found) / tokens, sum(t.reference for t in found) / tokens, tokens
        )
        if quality.loss > self._limit.max_nll_loss:
            found.sort(key=lambda t: -t.a_token)
            errors = stream_errors(artifact, ours, theirs, found[0].encoded.ids)
            raise self._refusal(quality, found, errors)
        return quality

    def _reference_model(self, artifact: Artifact) -> ReferenceModel:
        """The traced graphs of the fp32 checkpoint, in the variants of the compiled model."""
        reader = self._reference.weights()
        weights = {name: reader.load(name) for name in reader.names()}
        return ReferenceModel(artifact, weights=weights, graph_of=self._reference.graph)

    def _refusal(self, quality: Quality, texts: list[_TextLoss], errors: list[StreamError]) -> Refused:
        lines = [
            f"the compiled model loses {quality.loss:.4g} nats a token, {self._limit.max_nll_loss:g} are "
            f"allowed ({quality.nll:.4f} instead of {quality.reference:.4f} over {quality.tokens:,} tokens)"
        ]
        lines.append("texts that lose most, nats a token:")
        lines += [
            f"  {t.encoded.text.where}: {t.a_token:.4g} ({t.nll / t.tokens:.4f} instead of "
            f"{t.reference / t.tokens:.4f})"
            for t in texts[:SHOWN_TEXTS]
        ]
        lines.append("modules that add most error in the first of them, relative error before -> behind:")
        lines += [
            f"  {e.module}: {100 * e.before:.3g} % -> {100 * e.behind:.3g} %"
            for e in sorted(errors, key=lambda e: -e.added)[:SHOWN_MODULES]
            if e.added > 0
        ]
        return Refused(
            "\n".join(lines),
            where=OPTION,
            fix="choose options that round less (--numerics, --fold-wo, --precision-plan), or allow a larger "
            "loss",
        )
