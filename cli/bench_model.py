"""Which model `rewright bench` measures: a compiled one, or one of random weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewright.cli import output
from rewright.ir.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rewright.compiler import Progress
    from rewright.runtime.load import Artifact

RandomWeights = Annotated[
    Path | None,
    typer.Option(
        "--random-weights",
        metavar="CONFIG",
        help="In place of OUT: a model with this config.json (or the one in this folder) and random weights. "
        "Nothing is written.",
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(help="Longest sequence in tokens; if not given, 4096, or what -p and -n need."),
]
MaxBatch = Annotated[
    int | None, typer.Option(help="Sequences that the state is for; if not given, the largest of -b.")
]
Chunk = Annotated[int | None, typer.Option(help="Tokens of a prefill chunk, as for compile-model.")]
Numerics = Annotated[str | None, typer.Option(help="faithful, bf16 or fp32, as for compile-model.")]
Target = Annotated[str | None, typer.Option(help="host, sm80 or auto, as for compile-model.")]
NoPass = Annotated[
    list[str] | None, typer.Option("--no-pass", metavar="NAME", help="Leave a pass out. Repeatable.")
]
Kv = Annotated[
    str | None, typer.Option(metavar="FORMATS", help="How keys are stored, as compile-model --kv has it.")
]
Layers = Annotated[
    int | None,
    typer.Option(metavar="N", help="Only the first N layers, where all do not fit the memory."),
]


@dataclass(frozen=True)
class RandomOptions:
    """Options that go with --random-weights only, by their names on the command line; None where not given.

    Attributes:
        max_context, max_batch, chunk, numerics, target, no_pass, kv: as `compile-model` has them.
        layers: only the first so many layers.
    """

    max_context: int | None = None
    max_batch: int | None = None
    chunk: int | None = None
    numerics: str | None = None
    target: str | None = None
    no_pass: list[str] | None = None
    layers: int | None = None
    kv: str | None = None

    def given(self) -> list[str]:
        """Those that were given, as the command line spells them."""
        names = [f.name for f in fields(self) if getattr(self, f.name) not in (None, [])]
        return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True)
class BenchModel:
    """The model that was named.

    Attributes:
        out: a compiled model, or None.
        config: the configuration of a random one, or None.
        random: its options.
        longest: tokens of the longest sequence that is measured.
        batches: sequences that decode together.
    """

    out: Path | None
    config: Path | None
    random: RandomOptions
    longest: int
    batches: Sequence[int]

    def __post_init__(self) -> None:
        if (self.out is None) == (self.config is None):
            raise UsageError(
                "name one model: OUT, or --random-weights CONFIG",
                where="bench",
                fix="rewright bench OUT, or rewright bench --random-weights config.json",
            )
        if self.out is not None and (given := self.random.given()):
            raise UsageError(
                f"{', '.join(given)} cannot change in a compiled model",
                where=str(self.out),
                fix="compile it with other options, or measure --random-weights CONFIG",
            )

    def artifact(self, without: Sequence[str] = (), progress: Progress | None = None) -> Artifact:
        """The model; a random one is planned, its weights are not drawn yet.

        Args:
            without: passes that are left out, beside those that --no-pass names; of a random model only.
            progress: told how far planning is; by default a progress bar.

        Raises:
            UserError: it cannot be used, or not here.
        """
        if self.config is None:
            return self._compiled()
        if progress is not None:
            return self._random(self.config, without, progress)
        with output.ProgressBar() as bar:
            return self._random(self.config, without, bar)

    def to_json(self, artifact: Artifact) -> dict[str, object]:
        """What a record says of a random model; nothing of a compiled one."""
        if self.config is None:
            return {}
        limits = artifact.manifest.limits
        return {
            "random_weights": {
                "config": str(self.config),
                "layers": artifact.manifest.model["num_hidden_layers"],
                "max_context": limits.max_context,
                "max_batch": limits.max_batch,
                "chunk": limits.chunk,
                "weight_bytes": artifact.weight_bytes,
            }
        }

    def _compiled(self) -> Artifact:
        from rewright.runtime.load import Artifact

        assert self.out is not None
        return Artifact.open(self.out)

    def _random(self, config: Path, without: Sequence[str], progress: Progress) -> Artifact:
        import torch

        from rewright.compiler import CompileOptions
        from rewright.frontend.kv_formats import parse_kv
        from rewright.frontend.numerics import parse_numerics
        from rewright.passes.manager import PassOptions
        from rewright.random_artifact import RESERVE, compile_random, require_room
        from rewright.runtime.card import open_card
        from rewright.runtime.memory import total_bytes

        asked = self.random
        options = CompileOptions(
            parse_numerics(asked.numerics or "faithful"),
            max(4096, self.longest) if asked.max_context is None else asked.max_context,
            max(self.batches) if asked.max_batch is None else asked.max_batch,
            asked.chunk,
            passes=PassOptions.of(None, (*(asked.no_pass or ()), *without)),
            target=asked.target or "auto",
            kv=parse_kv(asked.kv or "bf16"),
        )
        card = open_card() if options.choose_target().name == "sm80" else None
        artifact = compile_random(
            config,
            options,
            torch.device("cpu") if card is None else card.where,
            layers=asked.layers,
            batches=self.batches,
            context=self.longest,
            progress=progress,
        )
        if card is None:
            require_room(artifact, total_bytes(), "this machine")
        else:
            reserve = 0 if card.emulated else RESERVE
            require_room(artifact, card.free_bytes() - reserve, card.name)
        return artifact
