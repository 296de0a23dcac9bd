"""docs/passes.md says what the passes do: every table and number of it is computed again."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from graphs import insert_lines, op_names

from rewright.frontend.numerics import parse_numerics
from rewright.frontend.source import ModelSource
from rewright.ir.diff import diff_graphs
from rewright.ir.diff_stat import render_stat
from rewright.ir.diff_text import render as render_diff
from rewright.ir.graph import Graph
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.traffic import traffic
from rewright.ir.variant import Variant
from rewright.passes.manager import PassFailed, Rewritten, run_passes
from rewright.passes.pipelines import PIPELINE
from rewright.rewriting import facts_of


def decode_of(source: ModelSource) -> Variant:
    return max(v for v in source.variants() if v.kind == "decode")


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs/passes.md").read_text()


@pytest.fixture(scope="module")
def flash(repo_root: Path) -> Callable[[str], Rewritten]:
    """The decode step of V4-Flash after the passes, by numerics."""

    @cache
    def get(numerics: str) -> Rewritten:
        path = repo_root / "examples/configs/v4-flash.json"
        source = ModelSource.open(path, parse_numerics(numerics), max_context=8192)
        return run_passes(source.graph(decode_of(source)), facts_of(source))

    return get


@pytest.fixture(scope="module")
def tiny(tiny_v4: Path) -> tuple[ModelSource, Graph]:
    source = ModelSource.open(tiny_v4, parse_numerics("faithful"))
    return source, source.graph(decode_of(source))


def table_below(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    lines = page.split(f"\n{heading}\n", 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def matches(done: Rewritten, name: str) -> int:
    """Matches of all rules of a name."""
    return sum(rule.matches for p in done.report.passes for rule in p.rules if rule.name == name)


def test_every_pass_stands_in_the_table_with_its_rules(page: str) -> None:
    stage, found = "", []
    for given, name, rewrites, _ in table_below(page, "## What each does"):
        stage = given.strip("`") or stage
        rules = re.findall(r"\((`\w+`(?:, `\w+`)*)\)", rewrites)
        found.append((stage, name.strip("`"), set(re.findall(r"\w+", " ".join(rules)))))
    assert found == [(p.stage, p.name, {rule.name for rule in p.rules}) for p in PIPELINE]
    assert f"lie {len(PIPELINE)} passes" in page


def test_the_report_of_flash(page: str, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in the page prints the table in the page."""
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```\n(decode-b1-c8192\n.*?)```", page, re.DOTALL)
    monkeypatch.chdir(repo_root)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/passes.md", "exec"), {})
    assert printed.getvalue() == shown


def test_the_nodes_of_a_layer(page: str, flash: Callable[[str], Rewritten]) -> None:
    layers: dict[int, list[str]] = {}
    for node in flash("faithful").graph.ops:
        if (module := node.meta["module"].split("."))[0] == "layers":
            layers.setdefault(int(module[1]), []).append(op_of(node.target).name)
    *rows, counts = table_below(page, "### The nodes of a layer")
    assert counts[0] == "nodes"
    for layer in (1, 2, 3):
        listed = [cell.strip("`") for cell in (row[layer] for row in rows) if cell != "-"]
        assert listed == layers[layer]
        assert int(counts[layer]) == len(listed)
    assert layers[0] == ["hc_pre", *layers[1][1:]]
    assert all(layers[i] == layers[2 + i % 2] for i in range(2, 42))
    assert layers[42] == [*layers[2], "hc_combine"]
    outside = [n for n in flash("faithful").graph.ops if not n.meta["module"].startswith("layers.")]
    assert [op_of(n.target).name for n in outside] == ["embed", "hc_expand", "hc_head", "linear"]


def test_nodes_by_numerics(page: str, flash: Callable[[str], Rewritten]) -> None:
    for numerics, _, nodes in table_below(page, "## Numerics"):
        report = flash(numerics.strip("`")).report
        before, after = report.passes[0].before.nodes, report.passes[-1].after.nodes
        assert nodes == f"{before:,} -> {after:,}"


def test_numbers_of_the_text(page: str, flash: Callable[[str], Rewritten]) -> None:
    done = flash("faithful")
    first, last = done.report.passes[0].before, done.report.passes[-1].after
    moved = [size.activation_reads + size.activation_writes for size in (first, last)]
    assert f"From {first.nodes:,} op nodes to {last.nodes:,}, from {moved[0]:,} bytes" in page
    assert f"activations to {moved[1]:,}." in page
    step = traffic(done.graph)
    share = last.weight_reads / (sum(step.reads.values()) + step.written)
    assert f"Weights are {100 * share:.1f} %" in page
    merged = matches(done, "merge_quant")
    assert f"`merge_quant` removes {merged} = 43 x (1 + 3) + 21" in page
    assert merged == 43 * (1 + 3) + 21
    padded = [t for node in done.graph.ops for t in node.meta["types"] if t.pitch is not None]
    assert f"{len(padded)} values of the graph above" in page
    assert "f32[1,1,4|128]" in set(map(str, padded))

    plain = flash("bf16")
    dropped = matches(plain, "unquantized_linear"), matches(plain, "dead_nodes")
    assert f"in front of {dropped[0]} linears and with it {dropped[1]} quantise nodes" in page
    assert f"beside the {matches(plain, 'merge_quant')} duplicates" in page
    for name in ("norm_quant", "grouped_linear_quant", "swiglu_quant"):
        assert matches(plain, name) == 0

    (misses,) = (rule.near for p in done.report.passes for rule in p.rules if rule.name == "fold_wo")
    sizes = {tuple(re.findall(r"[\d,]{9,}", miss.reason)) for miss in misses}
    ((folded, apart),) = sizes
    assert f"{folded} bytes instead of {apart}" in page


def test_the_message_of_a_missing_match(page: str, tiny: tuple[ModelSource, Graph]) -> None:
    source, graph = tiny
    line = "return scores = %layers.2.attn.indexer.scores"
    wanted = parse(insert_lines(print_graph(graph), "return logits", [line]))
    with pytest.raises(PassFailed) as caught:
        run_passes(wanted, facts_of(source))
    assert (
        f"```\n{caught.value.told('run it again with: rewright reproduce out.reproducer.json')}\n```" in page
    )
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(("file", "begins"), [("README.md", " {8}"), ("docs/ir.md", "~ op nodes")])
def test_excerpts_of_differences_are_what_is_printed(
    repo_root: Path, tiny: tuple[ModelSource, Graph], file: str, begins: str
) -> None:
    """Lines of `graph diff examples/tiny-v4@traced examples/tiny-v4@layout`, with --stat or without."""
    source, graph = tiny
    done = run_passes(graph, facts_of(source)).graph
    assert len(op_names(done)) == 91
    difference = diff_graphs(graph, done)
    printed = {*render_diff(difference).splitlines(), *render_stat(difference).splitlines()}
    (excerpt,) = re.findall(rf"```\n({begins}.*?)```", (repo_root / file).read_text(), re.DOTALL)
    lines = [line for line in excerpt.splitlines() if line != "..."]
    assert len(lines) > 10
    assert [line for line in lines if line not in printed] == []


def test_the_example_of_a_padded_type(repo_root: Path, tiny: tuple[ModelSource, Graph]) -> None:
    source, graph = tiny
    done = run_passes(graph, facts_of(source)).graph
    (line,) = re.findall(r"```\n(  %gate.logits .*)\n```", (repo_root / "docs/ir.md").read_text())
    assert line in print_graph(done, module="layers.2.ffn").splitlines()
