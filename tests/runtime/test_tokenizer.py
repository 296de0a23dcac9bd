"""Text to ids and back, and text that streams without broken characters."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from rewright.ir.errors import BadInput
from rewright.runtime.tokenizer import TextStream, Tokenizer

TEXTS = [
    "plain ASCII, and two lines\n\tof it",
    "Grüße, naïve café",
    "你好，世界",
    "emoji 😀 and a family 👩‍👩‍👧‍👦 and a flag 🇪🇺!",
    "mixed é😀你 a 😀é",
    "combining e\u0301 and a BOM \ufeff and a real \ufffd in the text",
    "   spaces   ",
    "<｜User｜>control é tokens<｜Assistant｜></think>😀<｜end▁of▁sentence｜>",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_v4: Path) -> Tokenizer:
    return Tokenizer.open(tiny_v4 / "tokenizer.json")


@pytest.fixture(scope="module")
def byte_ids(tiny_v4: Path) -> list[int]:
    """The token of each single byte (GPT-2's printable stand-ins for bytes)."""
    inner = tokenizers.Tokenizer.from_file(str(tiny_v4 / "tokenizer.json"))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    characters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    found = [inner.token_to_id(characters[b]) for b in range(256)]
    assert None not in found
    return found


def stream(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    """What each token gives, and what is left at the end."""
    sink = TextStream(tokenizer)
    return [sink.push(i) for i in ids], sink.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for count in range(len(ids) + 1):
        pieces, rest = stream(tokenizer, ids[:count])
        assert "".join(pieces) + rest == tokenizer.decode(ids[:count])


@pytest.mark.parametrize("text", [t for t in TEXTS if "\ufffd" not in t])
def test_bytes_of_a_character_are_held_back(tokenizer: Tokenizer, byte_ids: list[int], text: str) -> None:
    """One token a byte: a character appears with its last byte, and never as U+FFFD."""
    pieces, rest = stream(tokenizer, [byte_ids[b] for b in text.encode()])
    assert "".join(pieces) == text
    assert rest == ""
    ends = [len(text[:i].encode()) - 1 for i in range(1, len(text) + 1)]
    assert [i for i, piece in enumerate(pieces) if piece] == ends


@pytest.mark.parametrize(
    "data",
    [
        b"\x80",
        b"a\xffb",
        b"\xf0\x9f\x98",
        b"\xf0\x9f\x98a",
        b"ok \xc3\xc3\xa9 ok",
        b"\xed\xa0\x80",
        b"\xf5\x80\x80\x80 x",
        b"\xe4\xbd\xa0\xe4\xbd",
        b"\xef\xbf\xbd\xef\xbf\xbd end",
    ],
)
def test_broken_bytes_become_replacement_characters(
    tokenizer: Tokenizer, byte_ids: list[int], data: bytes
) -> None:
    pieces, rest = stream(tokenizer, [byte_ids[b] for b in data])
    assert "".join(pieces) + rest == data.decode(errors="replace")


def test_any_tokens_in_any_order(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    """Whole tokens, single bytes and control tokens mixed: nothing is lost, doubled or changed."""
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.choice((draw.choice(byte_ids), draw.randrange(4096))) for _ in range(draw.randrange(24))]
        pieces, rest = stream(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids), ids


def test_control_tokens_in_a_text_become_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<｜begin▁of▁sentence｜>") == [0]
    assert tokenizer.encode("a<｜end▁of▁sentence｜>b")[1] == 1
    assert 0 not in tokenizer.encode("no token is added")


def test_a_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match=r"not valid Unicode.*character 2"):
        tokenizer.encode("ab\udcffc")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"not JSON", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="not a tokenizer") as caught:
        Tokenizer.open(path)
    assert caught.value.where == str(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a tokenizer"):
        Tokenizer.open(tmp_path / "none.json")


def test_the_vocabulary_must_fit_the_model(tokenizer: Tokenizer, tiny_v4: Path, tmp_path: Path) -> None:
    tokenizer.check_vocabulary(4096)
    with pytest.raises(BadInput, match="holds token id 4095, the model has 4095") as caught:
        tokenizer.check_vocabulary(4095)
    assert "config.json" in str(caught.value)
    value = json.loads((tiny_v4 / "tokenizer.json").read_text())
    value["model"] |= {"vocab": {}, "merges": []}
    value["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    Tokenizer.open(tmp_path / "tokenizer.json").check_vocabulary(1)
