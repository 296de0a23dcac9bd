"""Formats of stored keys: what they lose, what they save, what they cost on the host.

usage: python benchmarks/kv_formats.py [--out results.json] [--repeats 9]

Quality: mean negative log-likelihood of the evaluation texts of examples/tiny-v4 by the compiled model, and
its difference from bf16 keys. Memory: V4-Flash from its configuration, one sequence. Speed: CPU time of
prefill and decode of tiny-v4 with one thread, the formats one after the other in every round, so that all
of them see the same machine; a ratio is the median over the rounds of its time to that of bf16 keys.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from origin import origin

from rewright.compiler import CompileOptions, compile_model
from rewright.frontend.kv_formats import parse_kv
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.kv_memory import key_memory
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite
from rewright.runtime.engine import Engine
from rewright.runtime.load import Artifact
from rewright.runtime.score import encode_texts, load_texts

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny-v4"
CONFIG = ROOT / "examples" / "configs" / "v4-flash.json"
PLAIN = "bf16"
ALL_LOSSY = "packed,window=fp4,csa=fp4,hca=fp4"
FORMATS = (PLAIN, "packed", "packed,window=fp4", "packed,csa=fp4", "packed,hca=fp4", ALL_LOSSY)
TIMED = (PLAIN, "packed", ALL_LOSSY)
CONTEXTS = (1 << 10, 32 << 10, 128 << 10, 1 << 20)
PROMPT, NEW = 1024, 64


def compiled(folder: Path) -> dict[str, Engine]:
    """tiny-v4 with every format, on one thread."""
    found = {}
    for at, kv in enumerate(FORMATS):
        out = folder / str(at)
        compile_model(TINY, out, CompileOptions(max_context=2048, target="host", kv=parse_kv(kv)))
        found[kv] = Engine(Artifact.open(out), threads=1)
    return found


def quality(engines: dict[str, Engine]) -> list[dict[str, Any]]:
    """Nats a token over all texts, perplexity, and the loss against bf16 keys."""
    artifact = engines[PLAIN].artifact
    texts = encode_texts(
        artifact.tokenizer(),
        load_texts(TINY / "text" / "evaluation.jsonl"),
        bos=artifact.manifest.model["bos_token_id"],
        max_context=artifact.manifest.limits.max_context,
    )
    rows = []
    for kv, engine in engines.items():
        scores = torch.cat([engine.score(0, text.ids) for text in texts])
        nll = float(scores.double().mean())
        rows.append({"kv": kv, "nll": nll, "perplexity": math.exp(nll), "tokens": len(scores)})
    for row in rows:
        row["loss"] = row["nll"] - rows[0]["nll"]
    return rows


def memory() -> list[dict[str, Any]]:
    """Keys of V4-Flash by format and context, and the tokens that the bytes of bf16 keys hold."""
    rows = []
    for kv in (PLAIN, "packed", ALL_LOSSY):
        source = ModelSource.open(CONFIG, Numerics.FAITHFUL, max_context=CONTEXTS[-1], kv=parse_kv(kv))
        variant = max(v for v in source.variants() if v.kind == "decode")
        graph = rewrite(source, variant, PassOptions()).graph
        rows += [{"kv": kv, **key_memory(graph, context).to_json()} for context in CONTEXTS]
    return rows


def speed(engines: dict[str, Engine], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a prompt and of a decoded token behind it, and ratios to bf16 keys."""
    generator = torch.Generator().manual_seed(1)
    vocab = engines[PLAIN].artifact.manifest.model["vocab_size"]
    ids = torch.randint(2, vocab, (PROMPT + NEW,), generator=generator).tolist()
    times: dict[str, list[tuple[float, float]]] = {kv: [] for kv in TIMED}
    for round in range(repeats + 1):
        for kv in TIMED:
            taken = _timed(engines[kv], ids)
            if round > 0:  # the first is there to warm up
                times[kv].append(taken)
    rows = []
    for kv in TIMED:
        row: dict[str, Any] = {"kv": kv}
        for at, (what, count) in enumerate((("prefill", 1), ("decode", NEW))):
            mine, plain = ([pair[at] for pair in times[name]] for name in (kv, PLAIN))
            row[f"{what}_ms"] = 1e3 * statistics.median(mine) / count
            row[f"{what}_ratio"] = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
        rows.append(row)
    return rows


def _timed(engine: Engine, ids: Sequence[int]) -> tuple[float, float]:
    """CPU seconds of the prompt and of the tokens behind it."""
    engine.reset(0)
    begin = time.process_time()
    engine.prefill(0, list(ids[:PROMPT]))
    middle = time.process_time()
    for token in ids[PROMPT:]:
        engine.decode({0: token})
    return middle - begin, time.process_time() - middle


def show(record: dict[str, Any]) -> None:
    print(f"{'quality (tiny-v4)':<38}{'nats a token':>13}{'perplexity':>12}{'loss':>10}")
    for row in record["quality"]:
        print(f"{row['kv']:<38}{row['nll']:>13.5f}{row['perplexity']:>12.4f}{row['loss']:>+10.5f}")
    print(f"\n{'memory (V4-Flash)':<38}{'context':>10}{'stored MB':>12}{'read MB':>10}{'context gained':>16}")
    for row in record["memory"]:
        size = f"{row['stored'] / 1e6:>12,.1f}{row['read'] / 1e6:>10,.2f}{row['gained_context']:>16,}"
        print(f"{row['kv']:<38}{row['context']:>10,}{size}")
    print(f"\n{'speed (tiny-v4, host)':<38}{'prefill ms':>11}{'to bf16':>9}{'decode ms':>11}{'to bf16':>9}")
    for row in record["speed"]:
        prefill = f"{row['prefill_ms']:>11.1f}{row['prefill_ratio']:>9.3f}"
        print(f"{row['kv']:<38}{prefill}{row['decode_ms']:>11.3f}{row['decode_ratio']:>9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engines = compiled(Path(folder))
        record = {
            **origin("kv_formats"),
            "model": "quality and speed: examples/tiny-v4; memory: examples/configs/v4-flash.json",
            "prompt": PROMPT,
            "new": NEW,
            "rounds": options.repeats,
            "quality": quality(engines),
            "memory": memory(),
            "speed": speed(engines, options.repeats),
        }
    show(record)
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
