"""Scoring: files that are read, and what is computed for them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import rewright
from rewright.ir.errors import BadInput
from rewright.runtime.engine import Engine
from rewright.runtime.model import Row
from rewright.runtime.repetition import find_loop
from rewright.runtime.score import (
    Case,
    KindScore,
    Repetition,
    Text,
    load_cases,
    load_texts,
    score_cases,
    score_texts,
)


@pytest.fixture(scope="module")
def engine(compiled_tiny: Path) -> Engine:
    return rewright.load(compiled_tiny)


def nothing(count: int) -> None:
    assert count == 1


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


class TestTextFiles:
    def test_lines(self, tmp_path: Path) -> None:
        lines = ['{"text": "a"}', "", '{"kind": "code", "text": "b", "source": "ignored"}', "  ", ""]
        path = written(tmp_path / "t.jsonl", "\n".join(lines))
        assert load_texts(path) == [
            Text("text", "a", f"{path}, line 1"),
            Text("code", "b", f"{path}, line 3"),
        ]

    def test_windows_line_ends(self, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_bytes(b'{"text": "a"}\r\n{"text": "b"}\r\n')
        assert [t.text for t in load_texts(tmp_path / "t.jsonl")] == ["a", "b"]

    @pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u00a0"])
    def test_separators_inside_a_text_end_no_line(self, tmp_path: Path, separator: str) -> None:
        text = f"one{separator}two"
        path = written(tmp_path / "t.jsonl", json.dumps({"text": text}, ensure_ascii=False))
        assert [t.text for t in load_texts(path)] == [text]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "not valid JSON"),
            pytest.param("[" * 100_000, "not valid JSON", id="deep"),
            ('"text"', "no text"),
            ("[]", "no text"),
            ("{}", "no text"),
            ('{"text": null}', "no text"),
            ('{"text": 5}', "no text"),
            ('{"text": "a", "kind": 5}', "kind is not a string"),
            ('{"text": "a", "kind": null}', "kind is not a string"),
            ('{"text": "a", "kind": "all"}', "kind is not a string other than 'all'"),
            ('{"text": "\\ud800"}', "surrogate"),
            ('{"text": "a", "kind": "\\udfff"}', "surrogate"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, line: str, message: str) -> None:
        path = written(tmp_path / "t.jsonl", '{"text": "fine"}\n' + line)
        with pytest.raises(BadInput, match=message) as caught:
            load_texts(path)
        assert caught.value.where == f"{path}, line 2"

    def test_files_without_a_text(self, tmp_path: Path) -> None:
        for content in ("", "\n \n"):
            with pytest.raises(BadInput, match="holds no text"):
                load_texts(written(tmp_path / "t.jsonl", content))

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
        with pytest.raises(BadInput, match=r"not UTF-8 text .*byte 13"):
            load_texts(tmp_path / "latin.jsonl")
        for path in (tmp_path / "none", tmp_path):
            with pytest.raises(BadInput, match="cannot be read"):
                load_texts(path)


class TestTexts:
    def test_totals_by_kind(self, engine: Engine) -> None:
        texts = [Text("b", "In the beginning", ""), Text("a", "x = 1", ""), Text("b", "And it came", "")]
        found = score_texts(engine, texts, nothing)
        assert list(found) == ["b", "a"]
        tokenizer = engine.artifact.tokenizer()
        nll = [engine.score(0, [0, *tokenizer.encode(t.text)]) for t in texts]
        assert (found["b"].texts, found["b"].tokens) == (2, len(nll[0]) + len(nll[2]))
        assert found["b"].nll == pytest.approx(float(nll[0].sum() + nll[2].sum()))
        assert found["a"].mean_nll == pytest.approx(float(nll[1].mean()))
        assert found["a"].perplexity == pytest.approx(math.exp(float(nll[1].mean())))

    def test_a_text_that_begins_with_the_begin_token_gets_no_second(self, engine: Engine) -> None:
        plain = score_texts(engine, [Text("k", "In the beginning", "")], nothing)["k"]
        marked = Text("k", "<｜begin▁of▁sentence｜>In the beginning", "")
        assert score_texts(engine, [marked], nothing)["k"] == plain

    def test_an_empty_text_among_others_counts_for_nothing(self, engine: Engine) -> None:
        found = score_texts(engine, [Text("e", "", ""), Text("k", "abc", "")], nothing)
        assert list(found) == ["k"]

    def test_nothing_but_empty_texts(self, engine: Engine) -> None:
        with pytest.raises(BadInput, match="every text is empty") as caught:
            score_texts(engine, [Text("e", "", "t.jsonl, line 1")], nothing)
        assert caught.value.where == "t.jsonl, line 1"

    def test_a_text_that_is_too_long_is_named_before_any_work(self, engine: Engine) -> None:
        counted: list[int] = []
        texts = [Text("k", "short", "line 1"), Text("k", "word " * 2000, "line 2")]
        with pytest.raises(BadInput, match="do not fit the compiled maximum of 1024") as caught:
            score_texts(engine, texts, counted.append)
        assert caught.value.where == "line 2"
        assert counted == []

    def test_predictions_that_fall_into_a_loop_are_told(self, engine: Engine) -> None:
        """Whatever it is fed, this model predicts one token, which one of the texts has all through."""
        tokenizer = engine.artifact.tokenizer()
        words = " ".join(f"{n} sheep" for n in range(40))
        one = tokenizer.encode(" sheep")[-1]

        class Stuck:
            def step(self, rows: Sequence[Row], *, all_positions: bool = False) -> torch.Tensor:
                assert all_positions
                logits = torch.zeros(len(rows), len(rows[0].tokens), engine.vocab_size)
                logits[..., one] = 1
                return logits

        stuck = Engine(engine.artifact, model=Stuck())
        own = tokenizer.decode([one] * 60)
        assert tokenizer.encode(own) == [one] * 60
        texts = [Text("a", words, "line 1"), Text("a", "short", "line 2"), Text("b", own, "line 3")]
        found = score_texts(stuck, texts, nothing)
        assert found["a"].repetitions == [Repetition("line 1", 1, 1)]
        assert found["b"].repetitions == []

    @pytest.mark.parametrize("name", ["evaluation", "calibration"])
    def test_no_loop_in_the_texts_of_the_example(self, engine: Engine, tiny_v4: Path, name: str) -> None:
        """They have refrains, tables and ruled lines. Prose only: the others take longer."""
        texts = [t for t in load_texts(tiny_v4 / "text" / f"{name}.jsonl") if t.kind == "prose"]
        assert score_texts(engine, texts, nothing)["prose"].repetitions == []
        for text in texts:
            assert find_loop(engine.artifact.tokenizer().encode(text.text)) is None

    def test_mean_over_tokens(self) -> None:
        assert KindScore(2, 4, 8.0).mean_nll == 2
        assert KindScore(2, 4, 8.0).perplexity == pytest.approx(math.exp(2))


class TestCaseFiles:
    def test_cases(self, tmp_path: Path) -> None:
        value = {
            "a": {"ids": [1, 2], "prefill": 1},
            "b": {"ids": [1, 2], "nll": True},
            "c": {"ids": [1], "greedy": 3},
        }
        assert load_cases(written(tmp_path / "c.json", json.dumps(value))) == {
            "a": Case([1, 2], 1, False, 0),
            "b": Case([1, 2], None, True, 0),
            "c": Case([1], None, False, 3),
        }

    @pytest.mark.parametrize(
        ("case", "message"),
        [
            ([], "not an object"),
            (None, "not an object"),
            ({"nll": True}, "ids is not"),
            ({"ids": [], "greedy": 1}, "ids is not"),
            ({"ids": "12", "greedy": 1}, "ids is not"),
            ({"ids": [1, "2"], "greedy": 1}, "ids is not"),
            ({"ids": [1, 2.0], "greedy": 1}, "ids is not"),
            ({"ids": [True], "greedy": 1}, "ids is not"),
            ({"ids": [1, None], "greedy": 1}, "ids is not"),
            ({"ids": [1, 2], "prefill": 0}, "prefill is not from 1 to the 2 ids"),
            ({"ids": [1, 2], "prefill": 3}, "prefill is not"),
            ({"ids": [1, 2], "prefill": -1}, "prefill is not"),
            ({"ids": [1, 2], "prefill": True}, "prefill is not"),
            ({"ids": [1, 2], "prefill": "1"}, "prefill is not"),
            ({"ids": [1, 2], "nll": 1}, "nll is not true or false"),
            ({"ids": [1, 2], "nll": None}, "nll is not true or false"),
            ({"ids": [1, 2], "greedy": -1}, "greedy no number"),
            ({"ids": [1, 2], "greedy": 1.5}, "greedy no number"),
            ({"ids": [1, 2]}, "asks for nothing"),
            ({"ids": [1, 2], "nll": False, "greedy": 0}, "asks for nothing"),
            ({"ids": [1], "nll": True}, "at least two ids"),
            ({"ids": [1, 2], "nll": True, "zzz": 1, "aaa": 2}, "unknown keys: aaa, zzz"),
        ],
    )
    def test_a_bad_case_is_named(self, tmp_path: Path, case: object, message: str) -> None:
        value = {"good": {"ids": [1], "greedy": 1}, "bad": case}
        path = written(tmp_path / "c.json", json.dumps(value))
        with pytest.raises(BadInput, match=message) as caught:
            load_cases(path)
        assert caught.value.where == f"{path}, case bad"
        assert caught.value.fix

    def test_files_without_cases(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        for text in ("", "{", "[" * 100_000):
            with pytest.raises(BadInput, match="not valid JSON"):
                load_cases(written(path, text))
        for text in ("[]", "{}", "null", "5"):
            with pytest.raises(BadInput, match="not a JSON object of cases") as caught:
                load_cases(written(path, text))
            assert caught.value.where == str(path)

    def test_a_name_that_no_file_can_hold(self, tmp_path: Path) -> None:
        path = written(tmp_path / "c.json", '{"\\ud800": {"ids": [1], "greedy": 1}}')
        with pytest.raises(BadInput, match="surrogate"):
            load_cases(path)


class TestCases:
    IDS = (0, 2209, 390, 859, 312)

    def test_everything_that_can_be_asked_for(self, engine: Engine) -> None:
        ids = list(self.IDS)
        found = score_cases(engine, {"x": Case(ids, 3, True, 2)}, nothing)
        assert list(found) == ["x.ids", "x.logits", "x.nll", "x.greedy"]
        assert (found["x.ids"].dtype, found["x.greedy"].dtype) == (torch.int32, torch.int32)
        assert (found["x.logits"].shape, found["x.logits"].dtype) == ((3, 4096), torch.float32)
        torch.testing.assert_close(found["x.nll"], engine.score(0, ids), rtol=0, atol=0)

        engine.reset(0)
        rows = [engine.prefill(0, ids[:3]), *(engine.decode({0: t})[0] for t in ids[3:])]
        torch.testing.assert_close(found["x.logits"], torch.stack(rows), rtol=0, atol=0)
        engine.reset(0)
        first = int(engine.prefill(0, ids).argmax())
        assert found["x.greedy"].tolist() == [first, int(engine.decode({0: first})[0].argmax())]

    def test_only_what_is_asked_for(self, engine: Engine) -> None:
        ids = list(self.IDS)
        assert list(score_cases(engine, {"x": Case(ids, 5, False, 0)}, nothing)) == ["x.ids", "x.logits"]
        assert list(score_cases(engine, {"x": Case(ids, None, False, 1)}, nothing)) == ["x.ids", "x.greedy"]

    @pytest.mark.parametrize(
        ("case", "message"),
        [
            (Case([1, 4096], None, False, 1), "token id 4096"),
            (Case([-1], None, False, 1), "token id -1"),
            (Case([10**30], None, False, 1), "token id 1000"),
            (Case([1] * 1025, 1, False, 0), "1025 tokens do not fit"),
            (Case([1] * 1024, None, False, 2), "1024 ids and 2 more do not fit"),
        ],
    )
    def test_a_case_that_cannot_run_is_named_before_any_work(
        self, engine: Engine, case: Case, message: str
    ) -> None:
        counted: list[int] = []
        with pytest.raises(BadInput, match=message) as caught:
            score_cases(engine, {"fine": Case([1], 1, False, 0), "bad": case}, counted.append)
        assert caught.value.where == "case bad"
        assert counted == []
