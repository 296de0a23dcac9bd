"""Teacher-forced scoring: perplexity of texts, and raw logits in the golden format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rewright.ir.errors import BadInput
from rewright.runtime.engine import Engine
from rewright.runtime.logit_check import require_numbers
from rewright.runtime.repetition import find_own_loop
from rewright.runtime.strict_json import check_text
from rewright.runtime.tokenizer import Tokenizer

TOTAL = "all"
"""What the sum over every kind of text is called."""

_CASE_FIX = '{"name": {"ids": [...], "prefill": n}, ...} with "nll": true or "greedy": k instead of "prefill"'
_LINE_FIX = 'write one object a line: {"kind": "prose", "text": "..."}'


@dataclass(frozen=True, slots=True)
class Text:
    """A text to score and the kind it is counted under."""

    kind: str
    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as token ids, the begin token first."""

    text: Text
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Repetition:
    """A text at which the most likely tokens fall into a loop that the text does not have.

    Attributes:
        where: the text.
        position: of the loop's first token in the text, counted from 0, the begin token's.
        unit: tokens after which it repeats.
    """

    where: str
    position: int
    unit: int


@dataclass(slots=True)
class KindScore:
    """Totals of one kind of text; nll in nats."""

    texts: int = 0
    tokens: int = 0
    nll: float = 0.0
    repetitions: list[Repetition] = field(default_factory=list)

    @property
    def mean_nll(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll)


def load_texts(path: Path) -> list[Text]:
    """Read a JSONL file of texts; `BadInput` names the line that cannot be used."""
    texts = []
    # Lines end at line feeds only: a JSON string may hold what else `splitlines` takes for an end.
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        value = _json(line, where, _LINE_FIX)
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise BadInput("no text", where=where, fix=_LINE_FIX)
        kind = value.get("kind", "text")
        if not isinstance(kind, str) or kind == TOTAL:
            raise BadInput(f"kind is not a string other than {TOTAL!r}", where=where, fix=_LINE_FIX)
        texts.append(Text(check_text(kind, where), check_text(value["text"], where), where))
    if not texts:
        raise BadInput("holds no text", where=str(path), fix=_LINE_FIX)
    return texts


def encode_texts(tokenizer: Tokenizer, texts: list[Text], *, bos: int, max_context: int) -> list[Encoded]:
    """Token ids of every text, BOS first.

    Raises:
        BadInput: a text does not fit the compiled context, or all of them are empty.
    """
    encoded = []
    for text in texts:
        ids = tokenizer.encode(text.text)
        if ids[:1] != [bos]:
            ids = [bos, *ids]
        if len(ids) > max_context:
            raise BadInput(
                f"{len(ids)} tokens do not fit the compiled maximum of {max_context}",
                where=text.where,
                fix="split the text, or compile with a larger --max-context",
            )
        encoded.append(Encoded(text, ids))
    if all(len(e.ids) < 2 for e in encoded):
        raise BadInput("every text is empty", where=texts[0].where, fix=_LINE_FIX)
    return encoded


def score_texts(engine: Engine, texts: list[Text], advance: Callable[[int], None]) -> dict[str, KindScore]:
    """Score every text from an empty context (BOS first) and add up by kind, in order of appearance.

    Args:
        advance: called with 1 after each text.

    Raises:
        BadInput: a text does not fit the compiled context, or all of them are empty.
        MachineError: logits that are no numbers; names the text and the position.
    """
    artifact = engine.artifact
    encoded = encode_texts(
        artifact.tokenizer(), texts, bos=artifact.bos, max_context=engine.limits.max_context
    )
    totals: dict[str, KindScore] = {}
    for entry in encoded:
        total = totals.setdefault(entry.text.kind, KindScore())
        scored = engine.predict(0, entry.ids, entry.text.where)
        total.texts += 1
        total.tokens += len(scored.nll)
        total.nll += float(scored.nll.double().sum())
        if (loop := find_own_loop(scored.predicted.tolist(), entry.ids[1:])) is not None:
            total.repetitions.append(Repetition(entry.text.where, loop.begin + 1, loop.unit))
        advance(1)
    return {kind: total for kind, total in totals.items() if total.tokens}


@dataclass(frozen=True, slots=True)
class Case:
    """One entry of an ids file.

    Attributes:
        ids: token ids.
        prefill: how many of them go through prefill chunks, the rest one at a time; logits after
            the prefill and after each further one are wanted. None: not wanted.
        nll: per-token negative log-likelihoods are wanted.
        greedy: number of greedy continuation tokens wanted, 0 for none.
    """

    ids: list[int]
    prefill: int | None
    nll: bool
    greedy: int


def load_cases(path: Path) -> dict[str, Case]:
    """Read an ids file; `BadInput` names the case that cannot be used."""
    value = _json(_read(path), str(path), _CASE_FIX)
    if not isinstance(value, dict) or not value:
        raise BadInput("not a JSON object of cases", where=str(path), fix=_CASE_FIX)
    return {check_text(name, str(path)): _case(case, f"{path}, case {name}") for name, case in value.items()}


def _case(value: object, where: str) -> Case:
    if not isinstance(value, dict):
        raise BadInput("not an object", where=where, fix=_CASE_FIX)
    ids, prefill = value.get("ids"), value.get("prefill")
    nll, greedy = value.get("nll", False), value.get("greedy", 0)
    if unknown := value.keys() - {"ids", "prefill", "nll", "greedy"}:
        raise BadInput(f"unknown keys: {', '.join(sorted(unknown))}", where=where, fix=_CASE_FIX)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise BadInput("ids is not a non-empty list of integers", where=where, fix=_CASE_FIX)
    if prefill is not None and (type(prefill) is not int or not 1 <= prefill <= len(ids)):
        raise BadInput(f"prefill is not from 1 to the {len(ids)} ids", where=where, fix=_CASE_FIX)
    if type(nll) is not bool or type(greedy) is not int or greedy < 0:
        raise BadInput("nll is not true or false, or greedy no number of tokens", where=where, fix=_CASE_FIX)
    if prefill is None and not nll and not greedy:
        raise BadInput("asks for nothing", where=where, fix=_CASE_FIX)
    if nll and len(ids) < 2:
        raise BadInput("nll needs at least two ids", where=where, fix=_CASE_FIX)
    return Case(ids, prefill, nll, greedy)


def score_cases(engine: Engine, cases: dict[str, Case], advance: Callable[[int], None]) -> dict[str, Tensor]:
    """Run every case.

    Returns:
        By case `name`: `name.ids` i32; `name.logits` f32[1 + len(ids) - prefill, V]; `name.nll`
        f32[len(ids) - 1]; `name.greedy` i32[k], EOS not stopping it.
    """
    for name, case in cases.items():  # refuse all bad input before any work
        engine.check(case.ids, 0, where=_case_name(name))
        if case.greedy and len(case.ids) + case.greedy - 1 > engine.limits.max_context:
            raise BadInput(
                f"{len(case.ids)} ids and {case.greedy} more do not fit the compiled maximum of "
                f"{engine.limits.max_context}",
                where=_case_name(name),
                fix="compile with a larger --max-context",
            )
    found: dict[str, Tensor] = {}
    for name, case in cases.items():
        found[f"{name}.ids"] = torch.tensor(case.ids, dtype=torch.int32)
        if case.prefill is not None:
            found[f"{name}.logits"] = torch.stack(list(_forced(engine, name, case.ids, case.prefill)))
        if case.nll:
            found[f"{name}.nll"] = engine.score(0, case.ids, _case_name(name))
        if case.greedy:
            found[f"{name}.greedy"] = torch.tensor(
                list(_greedy(engine, name, case.ids, case.greedy)), dtype=torch.int32
            )
        advance(1)
    return found


def _case_name(name: str) -> str:
    return f"case {name}"


def _forced(engine: Engine, name: str, ids: list[int], prefill: int) -> Iterator[Tensor]:
    engine.reset(0)
    yield _numbers(engine, name, engine.prefill(0, ids[:prefill]))
    for token in ids[prefill:]:
        yield _numbers(engine, name, engine.decode({0: token})[0])


def _greedy(engine: Engine, name: str, ids: list[int], count: int) -> Iterator[int]:
    engine.reset(0)
    logits = engine.prefill(0, ids)
    for left in reversed(range(count)):
        token = int(_numbers(engine, name, logits).argmax())
        yield token
        if left:
            logits = engine.decode({0: token})[0]


def _numbers(engine: Engine, name: str, logits: Tensor) -> Tensor:
    """The logits for the next token of slot 0, refused if they are no numbers."""
    require_numbers(logits, _case_name(name), engine.length(0))
    return logits


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the path") from e
    except UnicodeDecodeError as e:
        raise BadInput(f"not UTF-8 text ({e.reason} at byte {e.start})", where=str(path)) from e


def _json(text: str, where: str, fix: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"not valid JSON ({e})", where=where, fix=fix) from e
