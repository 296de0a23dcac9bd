"""The detector of sensitive requests: its rules are data, and it only counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewright.ir.errors import BadInput
from rewright.runtime.pattern_cost import MOST_CHOICES, choices
from rewright.runtime.request_detector import LOOKED_AT, PIECE, RULES, RequestDetector
from rewright.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def detector() -> RequestDetector:
    return RequestDetector.open()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Here it is:\n```python\nx\n```", "code fence: 2 of 4 lines"),
        ("def f(x):\n    return x", "code: 2 of 2 lines"),
        ('#include <stdio.h>\nint main() {\n  puts("x");\n}', "code: 4 of 4 lines"),
        ("SELECT name\nFROM people;", "code: 2 of 2 lines"),
        ("Why this?\n\n  x = 1\n  y += f(x)\n", "code: 2 of 3 lines"),
        ("Write me a small program that counts words.", "question about code: 1 of 1 line"),
        ("I get a TypeError here", "question about code: 1 of 1 line"),
        ("What is 17 + 25?", "calculation: 1 of 1 line"),
        ("17*25", "calculation: 1 of 1 line"),
        ("2x + 3 = 9, x is what?", "calculation: 1 of 1 line"),
        ("Compute the sum of 3 and 9.", "question about mathematics: 1 of 1 line"),
        ("Prove that there is no largest prime number.", "question about mathematics: 1 of 1 line"),
        (r"What is \frac{a}{b}?", "mathematical notation: 1 of 1 line"),
        ("∫ x dx", "mathematical notation: 1 of 1 line"),
    ],
)
def test_what_is_sensitive(detector: RequestDetector, text: str, rule: str) -> None:
    decision = detector.decide(text, 10)
    assert rule in decision.reasons
    assert decision.precision == "high"
    assert str(decision) == f"high ({'; '.join(decision.reasons)})"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "In the beginning God created the heaven and the earth.",
        "Who was the 3rd king, and how many sons had he in those 40 years?",
        "Tell me about well-known state-of-the-art e-mail, and/or letters; then stop.",
        "The chapters 3-5 and 12:13 are from 2021-05-03.",
        "If you like it: say so.\nIt is for you and for me.\nFrom now on we wait.",
    ],
)
def test_what_is_not(detector: RequestDetector, text: str) -> None:
    assert str(detector.decide(text, 100)) == "low (no rule applies)"


def test_long_documents_are_counted_in_tokens(detector: RequestDetector) -> None:
    assert detector.decide("word", 2047).precision == "low"
    assert detector.decide("word", 2048).reasons == ("long document: 2,048 tokens",)


def test_control_tokens_end_lines(detector: RequestDetector) -> None:
    text = "<｜begin▁of▁sentence｜><｜User｜>```\nx<｜Assistant｜></think>"
    assert detector.decide(text, 9).reasons == ("code fence: 1 of 2 lines",)


def test_the_beginning_and_the_end_are_looked_at(detector: RequestDetector) -> None:
    filler = "and so on. " * LOOKED_AT
    for text in (f"17 + 25\n{filler}", f"{filler}\n17 + 25"):
        assert detector.decide(text, 9).precision == "high"
    assert detector.decide(f"{filler}\n17 + 25\n{filler}", 9).precision == "low"


def test_texts_of_the_example_as_the_page_says(
    tiny_v4: Path, repo_root: Path, detector: RequestDetector
) -> None:
    """Of a chat everything before the answer."""
    tokenizer = Tokenizer.open(tiny_v4 / "tokenizer.json")
    texts: Counter[str] = Counter()
    high: Counter[str] = Counter()
    for name in ("calibration", "evaluation"):
        for line in (tiny_v4 / "text" / f"{name}.jsonl").read_text().splitlines():
            value = json.loads(line)
            text = value["text"].partition("<｜Assistant｜>")[0]
            texts[value["kind"]] += 1
            high[value["kind"]] += detector.decide(text, len(tokenizer.encode(text))).precision == "high"
    page = (repo_root / "docs/variants.md").read_text()
    for kind, count in texts.items():
        assert f"| {kind} | {count} | {high[kind]} |" in page


def test_the_page_names_every_rule(repo_root: Path, detector: RequestDetector) -> None:
    page = (repo_root / "docs/variants.md").read_text()
    assert [rule.name for rule in detector.rules if f"| {rule.name} |" not in page] == []
    assert all(rule.description for rule in detector.rules)


RULE = '[[rule]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = ", "not valid TOML"),
        ("", "format None, this Rewright reads 1"),
        ("format = 2\n", "format 2, this Rewright reads 1"),
        ("format = 1\n", r"has no \[\[rule\]\]"),
        ("format = 1\nrule = []\n", r"has no \[\[rule\]\]"),
        ("format = 1\nrule = [1]\n", r"has no \[\[rule\]\]"),
        ("format = 1\nruel = 1\n", "unknown keys: ruel"),
        ("format = 1\n[[rule]]\ntokens = 1\n", "rule 1: has no name"),
        ('format = 1\n[[rule]]\nname = "a\\nb"\ntokens = 1\n', "rule 1: has no name"),
        (f"format = 1\n{RULE}", r"rule 1 \(a\): counts either tokens or lines with patterns"),
        (f"format = 1\n{RULE}tokens = 1\npatterns = ['a']\n", "counts either"),
        (f"format = 1\n{RULE}tokens = 0\n", "tokens cannot be 0, it is an integer from 1 on"),
        (f"format = 1\n{RULE}tokens = true\n", "tokens cannot be True"),
        (f"format = 1\n{RULE}tokens = 1\nlines = 1\nshare = 1\n", "lines and share do not go with tokens"),
        (f"format = 1\n{RULE}patterns = 'a'\n", "patterns is not a list of strings"),
        (f"format = 1\n{RULE}patterns = []\n", "patterns is not a list of strings"),
        (f"format = 1\n{RULE}patterns = [1]\n", "patterns is not a list of strings"),
        (f"format = 1\n{RULE}patterns = ['a']\nlines = 1.5\n", "lines cannot be 1.5"),
        (f"format = 1\n{RULE}patterns = ['a']\nshare = 2\n", "share cannot be 2, it is from 0 to 1"),
        (f"format = 1\n{RULE}patterns = ['a']\nshare = nan\n", "share cannot be nan"),
        (f"format = 1\n{RULE}patterns = ['a']\ncolour = 2\n", "unknown keys: colour"),
        (f"format = 1\n{RULE}patterns = ['a']\ndescription = 2\n", "description is not a string"),
        (f"format = 1\n{RULE}patterns = ['(a']\n", r"pattern '\(a' cannot be used: missing \)"),
        (f"format = 1\n{RULE}patterns = ['(a+)+b']\n", "cannot be used: it repeats a group"),
        (f"format = 1\n{RULE}patterns = ['a*b*c*d']\n", "may try .* ways at one place, 4,096 are allowed"),
        (f"format = 1\n{RULE}patterns = ['x?']\n", "is found in every line"),
        (f"format = 1\n{RULE}tokens = 1\n{RULE}tokens = 2\n", "two rules are called 'a'"),
    ],
)
def test_rules_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message) as caught:
        RequestDetector.open(path)
    assert caught.value.where is not None
    assert caught.value.where.startswith(str(path))
    assert caught.value.fix


def test_rules_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        RequestDetector.open(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="not valid TOML"):
        RequestDetector.open(tmp_path / "binary.toml")


def test_rules_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        "format = 1\n[[rule]]\nname = 'names'\nlines = 2\nshare = 0.5\npatterns = ['^God', 'LORD']\n"
    )
    own = RequestDetector.open(path)
    assert own.decide("God said\nthe LORD\nx\ny", 9).reasons == ("names: 2 of 4 lines",)
    assert own.decide("God said\nthe LORD\nx\ny\nz", 9).precision == "low"
    assert own.decide("God said", 10**6).precision == "low"


@pytest.mark.parametrize(
    ("pattern", "bound"),
    [
        ("abc", 1),
        ("a+", 256),
        ("a*b?", 512),
        (r"\d{2,5}x", 4),
        (r"\d{3}", 1),
        ("a{,7}", 8),
        ("a{250,}", 7),
        ("a{999999}", 1),
        ("[*+?]", 1),
        (r"[]a*]+\*", 256),
        (r"[^\]]*", 256),
        ("(a|b|c)(d|e)", 6),
        ("(?:a|b)?", 4),
        ("(?i)a|(?P<n>b+?)(?!c)", 257),
        ("a{x}{}", 1),
        ("", 1),
    ],
)
def test_ways_to_try(pattern: str, bound: int) -> None:
    assert choices(pattern, 256) == bound


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a)+", "repeats a group"),
        ("(a|aa)*b", "repeats a group"),
        ("(a){2,3}", "repeats a group"),
        ("(?:(a))*", "repeats a group"),
        (r"(a)\1", "refers back"),
        ("(?P=n)", "no bound is known"),
        ("(?(1)a|b)", "no bound is known"),
        ("(?x) a # (", "no bound is known"),
        ("a)", "closed that was not opened"),
    ],
)
def test_patterns_without_a_bound(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choices(pattern, 256)


ADVERSARY = st.lists(
    st.tuples(
        st.sampled_from(
            ["a", " ", "(", "\\", "$", "1", "1 ", "a1+", "=", "Write ", "x.", "\u00a0", "｜", "<｜"]
        ),
        st.integers(1, 3 * PIECE),
    ),
    max_size=20,
)


@settings(deadline=None, max_examples=60)
@given(ADVERSARY, st.booleans())
def test_what_a_prompt_says_costs_nothing(runs: list[tuple[str, int]], lines: bool) -> None:
    """Any text is decided; how much of it patterns see is bounded, and so is what each can try there."""
    detector = RequestDetector.open()
    text = ("\n" if lines else "").join(part * count for part, count in runs) * 50
    assert detector.decide(text, 1).precision in ("low", "high")
    assert all(choices(p.pattern, PIECE) <= MOST_CHOICES for r in detector.rules for p in r.patterns)


def test_the_file_comes_along() -> None:
    assert RULES.is_file()
