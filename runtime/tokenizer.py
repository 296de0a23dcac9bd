"""Text to token ids and back, and streaming of text as tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from rewright.ir.errors import BadInput


class Tokenizer:
    """The tokenizer of a checkpoint (`tokenizer.json`)."""

    def __init__(self, inner: tokenizers.Tokenizer, where: str):
        self._inner = inner
        self._where = where

    @classmethod
    def open(cls, path: Path) -> Tokenizer:
        """Load `tokenizer.json`; `BadInput` if it cannot be used."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), str(path))
        except Exception as e:  # the library raises bare Exception for every kind of bad file
            raise BadInput(f"not a tokenizer ({e})", where=str(path), fix="download the file again") from e

    def check_vocabulary(self, size: int) -> None:
        """Refuse a tokenizer with ids beyond the model's embedding table."""
        largest = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= size:
            raise BadInput(
                f"holds token id {largest}, the model has {size}",
                where=self._where,
                fix="tokenizer and config.json do not belong together",
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; control tokens written out in it become their ids."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadInput(
                f"the text is not valid Unicode: {e.reason} at character {e.start}",
                where="prompt",
                fix="give the text as UTF-8",
            ) from e
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, control tokens included."""
        return self._inner.decode(list(ids), skip_special_tokens=False)


class TextStream:
    """Turns tokens into text as they arrive, holding back bytes that are no whole character yet."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token: int) -> str:
        """Text that is complete now, perhaps empty."""
        self._ids.append(token)
        text = self._stream.step(self._tokenizer._inner, token) or ""
        self._sent += len(text)
        return text

    def flush(self) -> str:
        """What was held back when no more tokens come; broken sequences become U+FFFD."""
        return self._tokenizer.decode(self._ids)[self._sent :]
