"""`rewright bench`: how fast a compiled model runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.cli.bench_ablate import Ablate, measure_without, render, require_random
from rewright.cli.bench_model import (
    BenchModel,
    Chunk,
    Layers,
    MaxBatch,
    MaxContext,
    NoPass,
    Numerics,
    RandomOptions,
    RandomWeights,
    Target,
)
from rewright.cli.bench_stages import Stages, Trace, check_trace, render_profile, write_trace
from rewright.cli.execution import Threads, open_engine
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
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Measure the reference interpreter and torch bf16 eager as well."),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    stages: Stages = False,
    trace: Trace = None,
    ablate: Ablate = False,
    random_weights: RandomWeights = None,
    layers: Layers = None,
    max_context: MaxContext = None,
    max_batch: MaxBatch = None,
    chunk: Chunk = None,
    numerics: Numerics = None,
    target: Target = None,
    no_pass: NoPass = None,
) -> None:
    """Measure prefill and decode. Every prompt is random tokens, the same in every run; nothing is cached
    between runs; decode starts behind a prefilled prompt, and its time is that of the decode steps alone.

    --stages takes the step in the middle of each decode apart: time, bytes and share of every stage. --trace
    writes its launches as a file for ui.perfetto.dev or chrome://tracing.

    --ablate, with --random-weights, decodes again with each pass left out and with all of them, on a card
    also without CUDA graphs: time of a step, ratio to the default, launches and bytes.

    --random-weights needs no checkpoint: weights are drawn where the model runs, valid codes and scales,
    and the router spreads tokens over experts. It takes the options from --layers to --no-pass.

    Examples:

      rewright bench out -p 128,512 -n 64 -b 1,4

      rewright bench out --peers --json

      rewright bench out -p 1024 -n 32 --stages --trace step.json

      rewright bench --random-weights examples/configs/v4-flash.json --layers 12 -p 1024 -b 1,8

      rewright bench --random-weights examples/configs/v4-flash.json --layers 12 -p 1024 -n 32 --ablate
    """
    from rewright.runtime.bench import cases, measure
    from rewright.runtime.profile import profile

    if not 1 <= repeats <= 1000:
        raise UsageError(f"{repeats} is not from 1 to 1000", where="-r")
    prompts, batches = _positive(prompt, "-p"), _positive(batch, "-b")
    random = RandomOptions(max_context, max_batch, chunk, numerics, target, no_pass, layers)
    model = BenchModel(out, random_weights, random, max(prompts) + new, batches)
    if random_weights is not None and peers:
        raise UsageError(
            "the peers run the weights of a compiled model",
            where="--peers",
            fix="measure OUT, or leave it out",
        )
    if ablate:
        require_random(model)
        if stages or trace is not None:
            raise UsageError("goes with neither --stages nor --trace", where="--ablate", fix="choose one")
        if not new:
            raise UsageError("there is no decode step to measure", where="-n", fix="choose -n 1 or more")
    artifact = model.artifact()
    ours = artifact.manifest.target
    wanted = cases(artifact.manifest.limits, prompts, new, batches)
    decodes = [case for case in wanted if case.new]
    apart = stages or trace is not None
    if apart and not decodes:
        raise UsageError("there is no decode step to take apart", where="-n", fix="choose -n 1 or more")
    if trace is not None:
        check_trace(trace, len(decodes))
    if ablate:
        rows = measure_without(model, artifact, decodes, repeats, threads)
        if json_output:
            head = {"target": ours, "numerics": artifact.manifest.numerics, **model.to_json(artifact)}
            found = [row.to_json(rows[0], decodes) for row in rows]
            output.result(json.dumps({**head, "ablation": found}, indent=1))
        else:
            render(rows, decodes)
        return
    engine = open_engine(artifact, threads=threads)
    measured: dict[str, list[Result]] = {}
    profiles: list[Profile] = []
    with output.ProgressBar() as bar:
        rivals = _peers(artifact, wanted) if peers else {}
        advance = bar.counter("measuring", len(wanted) * (1 + len(rivals)))
        where, text, bandwidth = _place(engine, threads)
        for name, (runner, chosen) in {ours: (engine, wanted), **rivals}.items():
            measured[name] = []
            for case in chosen:
                measured[name].append(measure(runner, case, repeats if name == ours else min(repeats, 3)))
                if apart and name == ours and case.new:  # its slots hold the case's context
                    profiles.append(profile(engine, case, repeats))
                advance(1)
    if trace is not None:
        write_trace(trace, profiles[0])
    if json_output:
        record = {
            "target": ours,
            "numerics": artifact.manifest.numerics,
            **model.to_json(artifact),
            **where,
            "read_bytes_per_second": bandwidth,
            "results": {name: [r.to_json() for r in results] for name, results in measured.items()},
        }
        if stages:
            record["stages"] = [
                {**p.to_json(), "step_us": _step_us(measured[ours], p.case)} for p in profiles
            ]
        output.result(json.dumps(record, indent=1))
        return
    output.note(
        f"target {ours} ({text}), {repeats} runs after one untimed; memory read at {bandwidth / 1e9:.1f} GB/s"
    )
    for line in _table(measured, ours, bandwidth):
        output.result(line)
    for found in profiles if stages else []:
        render_profile(found, _step_us(measured[ours], found.case))


def _step_us(results: Sequence[Result], case: Case) -> float:
    """Microseconds of a step of a decode as it ordinarily runs."""
    (result,) = (r for r in results if r.case == case)
    return statistics.median(result.seconds) / case.new * 1e6


def _place(engine: Engine, threads: int | None) -> tuple[dict[str, str | int], str, float]:
    """What executes the model, for records and for people, and the bytes a second that it reads."""
    from rewright.runtime import _native
    from rewright.runtime.bench import card_bandwidth, read_bandwidth
    from rewright.runtime.device import DeviceModel
    from rewright.runtime.threads import thread_count

    count = thread_count(threads)
    if not isinstance(engine.model, DeviceModel):
        vector = _native.vector_name()
        return {"vector": vector, "threads": count}, f"{vector}, {count} threads", read_bandwidth(count)
    card = engine.model.card
    bandwidth = read_bandwidth(1) if card.emulated else card_bandwidth(card.where)
    return {"card": card.name}, card.name, bandwidth


def _peers(artifact: Artifact, wanted: list[Case]) -> dict[str, tuple[Engine, list[Case]]]:
    """What the kernels are compared with. They run one sequence at a time, so batches are left out."""
    from rewright.peers import eager_engine
    from rewright.runtime.engine import Engine

    single = [case for case in wanted if case.batch == 1]
    return {
        "reference": (Engine(artifact, reference=True), single),
        "torch bf16 eager": (eager_engine(artifact), single),
    }


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


def _table(measured: dict[str, list[Result]], ours: str, bandwidth: float) -> list[str]:
    """Peers of a card run on this CPU, whose memory was not measured: their share of it is left out."""
    own = {r.case: r for r in measured[ours]}
    width = max(len("torch bf16 eager"), *(len(case.name) for case in own))
    lines = [
        f"{'case':<{width}}  {'tok/s':>9}  {'spread':>6}  {'MB/token':>8}  {'of memory':>9}  {'against':>8}"
    ]
    for name, results in measured.items():
        if len(measured) > 1:
            lines.append(name)
        for r in results:
            share = f"{r.bytes_per_second / bandwidth:.1%}" if ours in ("host", name) else ""
            ratio = "" if name == ours else f"{own[r.case].tokens_per_second / r.tokens_per_second:7.1f}x"
            label = ("  " if len(measured) > 1 else "") + r.case.name
            lines.append(
                f"{label:<{width}}  {r.tokens_per_second:>9,.1f}  {r.spread:>6.0%}  "
                f"{r.bytes_per_token / 1e6:>8.2f}  {share:>9}  {ratio:>8}".rstrip()
            )
    if len(measured) > 1:
        lines.append(f"against: how many times faster {ours} is")
    return lines
