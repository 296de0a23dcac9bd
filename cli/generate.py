"""`rewright generate`: run a compiled model, streaming its text."""

from __future__ import annotations

import json
import secrets
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewright.cli import output
from rewright.cli.execution import Reference, Threads, open_engine
from rewright.ir.errors import BadInput, UsageError

if TYPE_CHECKING:
    from rewright.runtime.engine import Engine
    from rewright.runtime.generate import GenerateOptions
    from rewright.runtime.load import Artifact
    from rewright.runtime.repetition import Loop
    from rewright.runtime.request_detector import Decision

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Compiled model.")]
_MODES = "-p TEXT, --chat TEXT or --messages FILE"


class GeneratePrecision(StrEnum):
    low = "low"
    high = "high"
    auto = "auto"


class Effort(StrEnum):
    high = "high"
    max = "max"


def generate(
    out: Out,
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", help="Text to continue; repeatable.")
    ] = None,
    chat: Annotated[str | None, typer.Option(help="A user message to answer.")] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            help="JSON file: a list of messages, or an object with messages, tools and response_format."
        ),
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model reason first.")] = False,
    effort: Annotated[Effort | None, typer.Option(help="Reasoning effort, with --thinking.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest completion in tokens.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability mass to draw from.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers; random if not given.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    stop_on_repetition: Annotated[
        bool, typer.Option("--stop-on-repetition", help="End a completion that repeats itself.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="Print the encoded prompt and stop.")
    ] = False,
    reference: Reference = False,
    threads: Threads = None,
    precision: Annotated[
        GeneratePrecision,
        typer.Option(
            help="Variants that run: low, high (after compile-model --variants low,high), or auto, which "
            "takes high for code, mathematics and long documents."
        ),
    ] = GeneratePrecision.low,
    rules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --precision auto: rules in place of those that come along."),
    ] = None,
) -> None:
    """Generate text. Defaults for temperature and top-p come from the checkpoint.

    Examples:

      rewright generate out --chat "What is 17 + 25?" --temperature 0

      rewright generate out -p "In the beginning" --max-new-tokens 64 --seed 1

      rewright generate out --chat "Compute 8 * 17." --precision auto
    """
    from rewright.runtime.generate import GenerateOptions
    from rewright.runtime.load import Artifact
    from rewright.runtime.sampling import SamplingOptions

    if sum(x is not None and x != [] for x in (prompt, chat, messages)) != 1:
        raise UsageError("give exactly one kind of prompt", where="generate", fix=_MODES)
    if max_new_tokens < 0:
        raise UsageError(f"{max_new_tokens} is negative", where="--max-new-tokens")
    if prompt and (thinking or effort):
        raise UsageError("--thinking and --effort go with --chat or --messages", where="generate")
    if effort is not None and not thinking:
        raise UsageError("--effort goes with --thinking", where="generate", fix="add --thinking")
    if rules is not None and precision is not GeneratePrecision.auto:
        raise UsageError(
            "goes with --precision auto", where=f"--rules {rules}", fix="add it, or leave this out"
        )
    artifact = Artifact.open(out)
    texts = _prompts(artifact, prompt, chat, messages, thinking, effort)
    if show_prompt:
        if len(texts) > 1:
            raise UsageError("--show-prompt prints one prompt", where="--show-prompt", fix="give -p once")
        output.result(texts[0], end="")
        return
    defaults = artifact.generation_defaults()
    if temperature is None:
        temperature = float(defaults.get("temperature", 1.0)) if defaults.get("do_sample", True) else 0.0
    seed = secrets.randbits(32) if seed is None else seed
    sampling = SamplingOptions(
        temperature, float(defaults.get("top_p", 1.0)) if top_p is None else top_p, seed
    )
    stop = frozenset() if ignore_eos else artifact.eos
    options = GenerateOptions(sampling, max_new_tokens, stop, stop_on_repetition)
    # A prompt that cannot be used is refused before the model is mapped.
    prompts = [artifact.tokenizer().encode(text) for text in texts]
    decisions = _decide(artifact, texts, prompts, rules) if precision is GeneratePrecision.auto else None
    engine = open_engine(
        artifact,
        reference=reference,
        threads=threads,
        precision="low" if precision is GeneratePrecision.auto else precision,
    )
    _run(engine, prompts, options, None if prompt else thinking, json_output, decisions)


def _prompts(
    artifact: Artifact,
    prompt: list[str] | None,
    chat: str | None,
    messages: Path | None,
    thinking: bool,
    effort: str | None,
) -> list[str]:
    """Prompt texts with every control token written out."""
    from rewright.runtime.chat import BOS, control_tokens_in
    from rewright.runtime.messages import load_messages

    if prompt:
        return [p if p.startswith(BOS) else BOS + p for p in prompt]
    encoder = artifact.chat_encoder()
    if chat is not None:
        if found := control_tokens_in(chat):
            output.note(
                f"note: the message holds control tokens, which the model will see as such: {' '.join(found)}"
            )
        return [encoder.encode([{"role": "user", "content": chat}], thinking=thinking, effort=effort)]
    assert messages is not None
    conversation = load_messages(messages)
    if conversation.messages and conversation.messages[-1]["role"] == "assistant":
        raise BadInput(
            "the last message is the assistant's, so nothing is left to answer",
            where=str(messages),
            fix="end the conversation with a user or tool message",
        )
    return [
        encoder.encode(
            conversation.messages,
            thinking=thinking,
            effort=effort,
            tools=conversation.tools,
            response_format=conversation.response_format,
        )
    ]


def _decide(
    artifact: Artifact, texts: list[str], prompts: list[list[int]], rules: Path | None
) -> list[Decision]:
    """The precision of each prompt by the rules, told to the user."""
    from rewright.runtime.engine import require_precision
    from rewright.runtime.request_detector import RULES, RequestDetector

    require_precision(artifact, "high")
    detector = RequestDetector.open(rules or RULES)
    found = [detector.decide(text, len(ids)) for text, ids in zip(texts, prompts, strict=True)]
    for number, decision in enumerate(found, start=1):
        output.note(f"precision: {f'prompt {number}: ' if len(found) > 1 else ''}{decision}")
    return found


def _run(
    engine: Engine,
    prompts: list[list[int]],
    options: GenerateOptions,
    thinking: bool | None,
    as_json: bool,
    decisions: list[Decision] | None,
) -> None:
    """Generate and print; `thinking` is None for plain text prompts, `decisions` without --precision auto."""
    from rewright.runtime.generate import generate as complete
    from rewright.runtime.tokenizer import TextStream

    tokenizer = engine.artifact.tokenizer()
    streams = [TextStream(tokenizer) for _ in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]
    produced: list[list[int]] = [[] for _ in prompts]
    finishes = [""] * len(prompts)
    loops: list[Loop | None] = [None] * len(prompts)
    streaming = len(prompts) == 1 and not as_json
    begin = time.monotonic()
    precisions = [d.precision for d in decisions] if decisions else [engine.precision] * len(prompts)
    for event in complete(engine, prompts, options, precisions):
        at = event.request
        text = ""
        loops[at] = loops[at] or event.loop
        if event.token is not None:
            produced[at].append(event.token)
            text = streams[at].push(event.token)
        if event.finish is not None:
            text += streams[at].flush()
            finishes[at] = event.finish
        pieces[at].append(text)
        if streaming:
            output.result(text, end="\n" if event.finish else "")
    seconds = time.monotonic() - begin
    for i, ids in enumerate(prompts):
        text = "".join(pieces[i])
        if as_json:
            record = {
                "text": text,
                "tokens": produced[i],
                "finish": finishes[i],
                "prompt_tokens": len(ids),
                "seed": options.sampling.seed,
                "repetition": _repetition(loops[i], len(ids)),
                "precision": precisions[i],
                "sensitive": list(decisions[i].reasons) if decisions else None,
                **_message(text, thinking),
            }
            output.result(json.dumps(record, ensure_ascii=False))
        elif not streaming:
            output.result(f"--- {i + 1}\n{text}")
        # Behind the text, which may be on the same screen.
        _warn_of_loop(loops[i], f"prompt {i + 1}", len(ids), finishes[i])
    count = sum(map(len, produced))
    ends = ", ".join(finishes)
    seed = f"; seed {options.sampling.seed}" if options.sampling.temperature else ""
    output.note(
        f"finish: {ends}; {sum(map(len, prompts))} prompt and {count} new tokens in {seconds:.1f} s{seed}"
    )


def _repetition(loop: Loop | None, before: int) -> dict[str, int] | None:
    """Where a completion behind `before` prompt tokens became a loop: the position in the whole sequence."""
    return None if loop is None else {"position": before + loop.begin, "unit": loop.unit}


def _warn_of_loop(loop: Loop | None, name: str, before: int, finish: str) -> None:
    if loop is not None:
        more = "" if finish == "repetition" else "; --stop-on-repetition ends it there"
        output.note(
            f"warning: {name}: the text repeats every {loop.unit} tokens from position "
            f"{before + loop.begin} on{more}"
        )


def _message(text: str, thinking: bool | None) -> dict[str, Any]:
    """The completion of a chat as a message, or why it is none."""
    from rewright.runtime.chat_parse import parse_completion

    if thinking is None:
        return {}
    try:
        return {"message": parse_completion(text, thinking=thinking)}
    except BadInput as e:
        return {"message": None, "message_error": str(e)}
