"""`rewright bench`: how fast a compiled model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.cli.execution import Threads, open_engine
from rewright.ir.errors import UsageError

if TYPE_CHECKING:
    from rewright.runtime.bench import Case, Result
    from rewright.runtime.engine import Engine
    from rewright.runtime.load import Artifact


def bench(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Compiled model.")],
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
) -> None:
    """Measure prefill and decode. Every prompt is random tokens, the same in every run; nothing is cached
    between runs; decode starts behind a prefilled prompt, and its time is that of the decode steps alone.

    Examples:

      rewright bench out -p 128,512 -n 64 -b 1,4

      rewright bench out --peers --json
    """
    from rewright.runtime.bench import cases, measure
    from rewright.runtime.load import Artifact

    if not 1 <= repeats <= 1000:
        raise UsageError(f"{repeats} is not from 1 to 1000", where="-r")
    artifact = Artifact.open(out)
    engine = open_engine(artifact, threads=threads)
    ours = artifact.manifest.target
    wanted = cases(engine, _numbers(prompt, "-p"), new, _numbers(batch, "-b"))
    measured: dict[str, list[Result]] = {}
    with output.ProgressBar() as bar:
        rivals = _peers(artifact, wanted) if peers else {}
        advance = bar.counter("measuring", len(wanted) * (1 + len(rivals)))
        where, text, bandwidth = _place(engine, threads)
        for name, model, chosen in [(ours, engine, wanted), *((n, e, c) for n, (e, c) in rivals.items())]:
            measured[name] = []
            for case in chosen:
                measured[name].append(measure(model, case, repeats if name == ours else min(repeats, 3)))
                advance(1)
    if json_output:
        record = {
            "target": ours,
            "numerics": artifact.manifest.numerics,
            **where,
            "read_bytes_per_second": bandwidth,
            "results": {name: [r.to_json() for r in results] for name, results in measured.items()},
        }
        output.result(json.dumps(record, indent=1))
        return
    output.note(
        f"target {ours} ({text}), {repeats} runs after one untimed; memory read at {bandwidth / 1e9:.1f} GB/s"
    )
    for line in _table(measured, ours, bandwidth):
        output.result(line)


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
