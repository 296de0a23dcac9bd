"""`rewright bench`: how fast a compiled model runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewright.cli import output
from rewright.cli.bench_ablate import Ablate, measure_without, render, require_random
from rewright.cli.bench_compare import (
    Compare,
    FailSlower,
    check_limit,
    compare_runs,
    judge,
    read_earlier,
    render_comparison,
)
from rewright.cli.bench_model import (
    BenchModel,
    Chunk,
    Kv,
    Layers,
    MaxBatch,
    MaxContext,
    NoPass,
    Numerics,
    RandomOptions,
    RandomWeights,
    Target,
)
from rewright.cli.bench_place import begin_peak, ceiling_of, describe, peak_memory, place_of
from rewright.cli.bench_plot import Plot, draw
from rewright.cli.bench_stages import Stages, Trace, check_trace, render_profile, write_trace
from rewright.cli.bench_table import render_csv, render_markdown
from rewright.cli.execution import Precision, PrecisionOption, Threads, open_engine
from rewright.cli.picture import check_plot
from rewright.ir.errors import UsageError

if TYPE_CHECKING:
    from rewright.runtime.bench import Case, Result
    from rewright.runtime.engine import Engine
    from rewright.runtime.load import Artifact
    from rewright.runtime.profile import Profile


def bench(
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Compiled model.")] = None,
    prompt: Annotated[
        str, typer.Option("-p", "--prompt", help="Prompt lengths in tokens, by comma.")
    ] = "256",
    new: Annotated[
        int, typer.Option("-n", "--new", help="Tokens to generate; 0 measures prefill only.")
    ] = 64,
    batch: Annotated[
        str, typer.Option("-b", "--batch", help="Sequences that decode together, by comma.")
    ] = "1",
    repeats: Annotated[
        int, typer.Option("-r", "--repeats", help="Timed runs of each case, after one untimed.")
    ] = 5,
    threads: Threads = None,
    precision: PrecisionOption = Precision.low,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Measure the reference interpreter and torch bf16 eager as well."),
    ] = False,
    form: Annotated[
        str | None, typer.Option("--format", help="md (a table, the default), json or csv.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    compare: Compare = None,
    fail_slower: FailSlower = None,
    plot: Plot = None,
    stages: Stages = False,
    trace: Trace = None,
    ablate: Ablate = False,
    random_weights: RandomWeights = None,
    layers: Layers = None,
    max_context: MaxContext = None,
    max_batch: MaxBatch = None,
    chunk: Chunk = None,
    numerics: Numerics = None,
    kv: Kv = None,
    target: Target = None,
    no_pass: NoPass = None,
) -> None:
    """Measure prefill and decode. Every prompt is random tokens, the same in every run; nothing is cached
    between runs; decode starts behind a prefilled prompt, and its time is that of the decode steps alone.
    Each case runs once without the clock, then -r times; tok/s is of the median, spread is (slowest -
    fastest) / median. pp512 is prefill of 512 tokens of one sequence, tg128@512 x 8 decode of 128 tokens of
    each of 8 sequences behind 512, all 1,024 tokens counted. Bytes are those that the ops of a step read and
    write, the ceiling is the read rate of the memory, measured in the same run.

    --compare matches cases with those of an earlier --format json; with --fail-slower the exit code is 1 if
    one lost more tokens a second than that. A case that only one of the runs has never counts.

    --stages takes the step in the middle of each decode apart: time, bytes and share of every stage. --trace
    writes its launches as a file for ui.perfetto.dev or chrome://tracing.

    --ablate, with --random-weights, decodes again with each pass left out and with all of them, on a card
    also without CUDA graphs: time of a step, ratio to the default, launches and bytes.

    --random-weights needs no checkpoint: weights are drawn where the model runs, valid codes and scales,
    and the router spreads tokens over experts. It takes the options from --layers to --no-pass.

    Examples:

      rewright bench out -p 128,512 -n 64 -b 1,4

      rewright bench out --peers --format json > old.json

      rewright bench out --compare old.json --fail-slower 5 --plot out.png

      rewright bench out -p 1024 -n 32 --stages --trace step.json

      rewright bench out --precision high

      rewright bench --random-weights examples/configs/v4-flash.json --layers 12 -p 1024 -b 1,8

      rewright bench --random-weights examples/configs/v4-flash.json --layers 12 -p 1024 -n 32 --ablate
    """
    from rewright import __version__
    from rewright.runtime.bench import WARM_UP_RUNS, cases, measure
    from rewright.runtime.profile import profile

    form = _form(form, json_output, several_tables=stages or ablate)
    if not 1 <= repeats <= 1000:
        raise UsageError(f"{repeats} is not from 1 to 1000", where="-r")
    prompts, batches = _positive(prompt, "-p"), _positive(batch, "-b")
    check_limit(fail_slower, compare)
    random = RandomOptions(max_context, max_batch, chunk, numerics, target, no_pass, layers, kv)
    model = BenchModel(out, random_weights, random, max(prompts) + new, batches)
    if random_weights is not None and peers:
        raise UsageError(
            "the peers run the weights of a compiled model",
            where="--peers",
            fix="measure OUT, or leave it out",
        )
    if ablate:
        require_random(model)
        others = {"--stages": stages, "--trace": trace, "--compare": compare, "--plot": plot}
        if given := [name for name, value in others.items() if value]:
            raise UsageError(f"does not go with {', '.join(given)}", where="--ablate", fix="choose one")
        if not new:
            raise UsageError("there is no decode step to measure", where="-n", fix="choose -n 1 or more")
    if precision is Precision.high and random_weights is not None:
        raise UsageError(
            "a random model has low variants only", where="--precision high", fix="choose --numerics bf16"
        )
    if plot is not None:
        check_plot(plot)
    earlier = None if compare is None else read_earlier(compare)
    artifact = model.artifact()
    manifest = artifact.manifest
    ours = manifest.target
    wanted = cases(manifest.limits, prompts, new, batches)
    decodes = [case for case in wanted if case.new]
    apart = stages or trace is not None
    if apart and not decodes:
        raise UsageError("there is no decode step to take apart", where="-n", fix="choose -n 1 or more")
    if trace is not None:
        check_trace(trace, len(decodes))
    if ablate:
        rows = measure_without(model, artifact, decodes, repeats, threads)
        if form == "json":
            head = {"target": ours, "numerics": manifest.numerics, **model.to_json(artifact)}
            found = [row.to_json(rows[0], decodes) for row in rows]
            output.result(json.dumps({**head, "ablation": found}, indent=1))
        else:
            render(rows, decodes)
        return
    engine = open_engine(artifact, threads=threads, precision=precision)
    place = place_of(engine, threads)
    measured: dict[str, list[Result]] = {ours: []}
    profiles: list[Profile] = []
    with output.ProgressBar() as bar:
        alone = [case for case in wanted if case.batch == 1]
        advance = bar.counter("measuring", len(wanted) + (len(alone) * 2 if peers else 0))
        begin_peak(engine)
        for case in wanted:
            measured[ours].append(measure(engine, case, repeats))
            if apart and case.new:  # its slots hold the case's context
                profiles.append(profile(engine, case, repeats))
            advance(1)
        # Before the ceiling, which takes memory of its own, and peers, which hold the weights once more.
        peak = peak_memory(engine)
        ceiling = ceiling_of(engine, threads)
        for name, rival in _peers(artifact, precision).items() if peers else ():
            measured[name] = []
            for case in alone:
                measured[name].append(measure(rival, case, min(repeats, 3)))
                advance(1)
    if trace is not None:
        write_trace(trace, profiles[0])
    record: dict[str, Any] = {
        "rewright": __version__,
        "target": ours,
        "numerics": manifest.numerics,
        "kv": manifest.kv,
        "precision": precision.value,
        **model.to_json(artifact),
        **describe(artifact),
        **place.names,
        "read_bytes_per_second": ceiling,
        "peak_memory": peak,
        "results": {name: [r.to_json() for r in results] for name, results in measured.items()},
    }
    pairs = [] if earlier is None else compare_runs(earlier, record)
    if earlier is not None:
        record["comparison"] = [pair.to_json() for pair in pairs]
    if stages:
        record["stages"] = [{**p.to_json(), "step_us": _step_us(measured[ours], p.case)} for p in profiles]
    if plot is not None:
        draw(plot, measured, earlier, f"{manifest.model['model_type']}, {ours}, {place.text}")
    if form == "json":
        output.result(json.dumps(record, indent=1))
    elif form == "csv":
        render_csv(record, None if earlier is None else pairs)
    else:
        output.note(
            f"target {ours} ({place.text}), {repeats} runs after {WARM_UP_RUNS} untimed; "
            f"memory read at {ceiling / 1e9:.1f} GB/s"
        )
        render_markdown(record, measured)
        render_comparison(pairs)
        for found in profiles if stages else []:
            render_profile(found, _step_us(measured[ours], found.case))
    raise typer.Exit(judge(pairs, fail_slower))


def _form(form: str | None, json_output: bool, *, several_tables: bool) -> str:
    """How results are printed: md, json or csv."""
    if form is None:
        form = "json" if json_output else "md"
    if form not in ("md", "json", "csv"):
        raise UsageError(f"unknown format {form!r}", where="--format", fix="md, json or csv")
    if json_output and form != "json":
        raise UsageError(f"--json is not --format {form}", where="--format", fix="choose one")
    if form == "csv" and several_tables:
        raise UsageError(
            "--stages and --ablate have tables of their own", where="--format csv", fix="choose json or md"
        )
    return form


def _step_us(results: Sequence[Result], case: Case) -> float:
    """Microseconds of a step of a decode as it ordinarily runs."""
    (result,) = (r for r in results if r.case == case)
    return statistics.median(result.seconds) / case.new * 1e6


def _peers(artifact: Artifact, precision: str) -> dict[str, Engine]:
    """What the kernels are compared with. They run one sequence at a time."""
    from rewright.peers import eager_engine
    from rewright.runtime.engine import Engine

    reference = Engine(artifact, reference=True, precision=precision)
    return {"reference": reference, "torch bf16 eager": eager_engine(artifact)}


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"{text!r} is no list of numbers", where=option, fix="write 128,512")
    return [int(part) for part in parts]


def _positive(text: str, option: str) -> list[int]:
    found = _numbers(text, option)
    if min(found) < 1:
        raise UsageError(f"{min(found)} is less than 1", where=option)
    return found
