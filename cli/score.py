"""`rewright score`: teacher-forced perplexity, or logits in the golden format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.cli.execution import Precision, PrecisionOption, Reference, Threads, open_engine
from rewright.cli.files import write_whole
from rewright.ir.errors import UsageError

if TYPE_CHECKING:
    from rewright.runtime.engine import Engine
    from rewright.runtime.score import KindScore


def score(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Compiled model.")],
    text: Annotated[Path | None, typer.Option(help='JSONL file of {"kind": ..., "text": ...} lines.')] = None,
    ids: Annotated[
        Path | None,
        typer.Option(help='JSON file: {"name": {"ids": [...], "prefill": n, "nll": true, "greedy": k}}.'),
    ] = None,
    logits: Annotated[Path | None, typer.Option(help="safetensors file to write; goes with --ids.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    reference: Reference = False,
    threads: Threads = None,
    precision: PrecisionOption = Precision.low,
) -> None:
    """Perplexity per kind of text (--text), or logits, NLL and greedy tokens of given ids (--ids).

    Examples:

      rewright score out --text examples/tiny-v4/text/evaluation.jsonl

      rewright score out --ids examples/tiny-v4/golden-cases.json --logits mine.safetensors

      rewright score out --text examples/tiny-v4/text/evaluation.jsonl --precision high
    """
    from rewright.runtime.load import Artifact

    if (text is None) == (ids is None):
        raise UsageError("give either --text or --ids", where="score")
    if (ids is None) != (logits is None):
        raise UsageError("--ids and --logits go together", where="score")
    engine = open_engine(Artifact.open(out), reference=reference, threads=threads, precision=precision)
    if text is not None:
        _score_text(engine, text, json_output)
    elif ids is not None and logits is not None:
        _score_ids(engine, ids, logits)


def _score_text(engine: Engine, path: Path, as_json: bool) -> None:
    from rewright.runtime.score import TOTAL, load_texts, score_texts

    texts = load_texts(path)
    with output.ProgressBar() as bar:
        totals = score_texts(engine, texts, bar.counter("scoring", len(texts)))
    totals[TOTAL] = _sum(totals.values())
    for found in totals[TOTAL].repetitions:
        output.note(
            f"warning: {found.where}: the most likely tokens repeat every {found.unit} tokens from position "
            f"{found.position} on"
        )
    if as_json:
        output.result(
            json.dumps(
                {
                    kind: {
                        "texts": t.texts,
                        "tokens": t.tokens,
                        "nll": t.mean_nll,
                        "perplexity": t.perplexity,
                        "repetitions": [asdict(r) for r in t.repetitions],
                    }
                    for kind, t in totals.items()
                }
            )
        )
        return
    width = max(4, *map(len, totals))
    output.result(f"{'kind':<{width}}  texts  tokens     nll  perplexity")
    for kind, t in totals.items():
        output.result(
            f"{kind:<{width}}  {t.texts:>5}  {t.tokens:>6}  {t.mean_nll:6.4f}  {t.perplexity:10.4f}"
        )


def _sum(totals: Iterable[KindScore]) -> KindScore:
    from rewright.runtime.score import KindScore

    total = KindScore()
    for part in totals:
        total.texts += part.texts
        total.tokens += part.tokens
        total.nll += part.nll
        total.repetitions += part.repetitions
    return total


def _score_ids(engine: Engine, path: Path, out: Path) -> None:
    from safetensors.torch import save

    from rewright.runtime.score import load_cases, score_cases

    cases = load_cases(path)
    with output.ProgressBar() as bar:
        found = score_cases(engine, cases, bar.counter("scoring", len(cases)))
    write_whole(out, save(found), str(out))
    output.result(str(out))
