"""`rewright sensitivity` as Markdown tables, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rewright.cli import output
from rewright.cli.bench_table import markdown

if TYPE_CHECKING:
    from rewright.sensitivity.statistics import Divergence
    from rewright.sensitivity.study import Finding, Study

_MILLI = 1000
_TITLES = {
    "kind": "All modules of a kind lowered",
    "module": "One module lowered",
    "forced": "Rounded to FP8 though it always stays high",
}


def render_markdown(found: Study) -> None:
    """Print a ranking for each scope, and the plan. KL is in thousandths of a nat a token."""
    kinds = list(found.reference_kinds)
    reference = found.reference
    output.result(
        f"reference: perplexity {reference.perplexity:.4f} over {reference.texts} texts, "
        f"{reference.tokens:,} tokens\n"
    )
    for scope, title in _TITLES.items():
        if findings := found.of_scope(scope):
            output.result(f"{title}:\n")
            columns = ["#", "lowered", "aspect", "KL/1000", "95 %", "perplexity", "top-1"]
            rows = [_row(at, f, kinds) for at, f in enumerate(findings, start=1)]
            for line in markdown([*columns, *(f"KL {k}" for k in kinds)], rows, left=3):
                output.result(line)
            output.result("")
    _render_plan(found, kinds)


def _row(at: int, finding: Finding, kinds: Sequence[str]) -> list[str]:
    return [
        str(at),
        finding.name,
        finding.aspect,
        *_divergence(finding.all),
        *(f"{finding.kinds[k].kl * _MILLI:.2f}" for k in kinds),
    ]


def _divergence(found: Divergence) -> list[str]:
    return [
        f"{found.kl * _MILLI:.2f}",
        f"{found.low * _MILLI:.2f} to {found.high * _MILLI:.2f}",
        f"{found.perplexity:.4f}",
        f"{found.agreement:.2%}",
    ]


def _render_plan(found: Study, kinds: Sequence[str]) -> None:
    plan = found.plan
    what = "kinds and modules" if found.of_scope("module") else "kinds"
    output.result(
        f"The plan keeps {plan.kept} of {plan.units} {what} high and saves {plan.saves:,} of "
        f"{plan.most:,} bytes a decoded token:\n"
    )
    rows = [
        ["everything low", *_divergence(plan.lowest), *([""] * len(kinds))],
        ["the plan", *_divergence(plan.all), *(f"{plan.kinds[k].kl * _MILLI:.2f}" for k in kinds)],
    ]
    columns = ["model", "KL/1000", "95 %", "perplexity", "top-1", *(f"KL {k}" for k in kinds)]
    for line in markdown(columns, rows):
        output.result(line)


def render_csv(found: Study) -> None:
    """Print a line for each experiment and kind of text, and the same for the plan."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("texts", "tokens", "nll", "perplexity", "kl", "kl_low", "kl_high", "top1_agreement")
    writer.writerow(("scope", "name", "aspect", "modules", "saves_bytes", "text_kind", *columns))
    plan = found.plan
    rows = [
        ((f.scope, f.name, f.aspect, f.modules, f.saves), {"all": f.all, **f.kinds}) for f in found.findings
    ]
    rows.append((("plan", "plan", "", plan.kept, plan.saves), {"all": plan.all, **plan.kinds}))
    for head, divergences in rows:
        for kind, d in divergences.items():
            writer.writerow(
                (*head, kind, d.texts, d.tokens, d.nll, d.perplexity, d.kl, d.low, d.high, d.agreement)
            )
    output.result(text.getvalue(), end="")
