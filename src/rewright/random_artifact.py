"""A compiled model that is on no disk: planned from a configuration, its weights random.

It takes the place of an opened one wherever a model is executed, so what is measured are the kernels and the
plans that a checkpoint of this configuration would get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rewright.codegen.pack import layouts_of
from rewright.codegen.targets import Target
from rewright.compiler import CompileOptions, Progress, plan_all, rewrite_all
from rewright.frontend.config import CONFIG_NAME, ModelConfig, load_config
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, CompilerBug, MachineError, UsageError
from rewright.ir.graph import Graph
from rewright.ir.manifest import Manifest, Memory, graph_path
from rewright.ir.plan import Plan
from rewright.ir.types import ValueType
from rewright.ir.variant import Limits, Variant, smallest_capacity
from rewright.passes.fold_wo import is_folded
from rewright.passes.pipelines import REACHABLE
from rewright.random_model import each_random_weight, open_config, reduced, weight_types
from rewright.runtime.load import Artifact

RESERVE = 2 << 30
"""Bytes of a card that weights, state and activations leave free: working memory of torch and of sampling,
and the block that its bandwidth is measured with."""
CONFIG_OPTION = "--random-weights"


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RandomArtifact(Artifact):
    """A model of random weights, as `Artifact` shows one to what executes it.

    Attributes:
        source: the model.
        graphs: the last graph of each of its variants.
        plans: their plans.
        where: where weights are drawn.
    """

    source: ModelSource
    graphs: dict[Variant, Graph]
    plans: dict[Variant, Plan]
    where: torch.device

    def graph(self, variant: Variant, stage: str | None = None) -> Graph:
        if stage not in (None, self.manifest.stages[-1]):
            raise CompilerBug(f"a random model keeps no graph of stage {stage}")
        return self.graphs[variant]

    def plan_text(self, variant: Variant) -> str:
        return self.plans[variant].to_text()

    def each_weight(self) -> Iterator[tuple[str, Tensor]]:
        return each_random_weight(list(self.plans.values()), self.source, self.where)

    @property
    def weight_types(self) -> dict[str, ValueType]:
        """Type of every weight and constant, by name."""
        return weight_types(self.plans.values())

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.weight_types.values())


def read_config(path: Path, layers: int | None = None) -> ModelConfig:
    """The configuration of a model, or of its first layers; blocks that no step runs are cut off.

    Args:
        path: a config.json, or a folder with one.
        layers: how many layers; all by default.

    Raises:
        BadInput: there is no usable configuration.
        UsageError: the model does not have so many layers.
    """
    if not path.exists():
        raise BadInput(
            "no such file or folder", where=str(path), fix=f"name a {CONFIG_NAME}, or a folder with one"
        )
    config = load_config(path)[0]
    count = config.num_hidden_layers
    if layers is not None and not 1 <= layers <= count:
        raise UsageError(f"{layers} is not from 1 to the model's {count} layers", where="--layers")
    return reduced(config, config.compress_ratios[:layers])


def needed_variants(
    variants: Iterable[Variant], limits: Limits, batches: Iterable[int], context: int
) -> list[Variant]:
    """The variants that prefill of one sequence and decode of `batches` sequences take, up to a context;
    beyond the limits the largest."""
    fitting = [v for v in variants if not v.all_positions]
    capacity = smallest_capacity(fitting, min(context, limits.max_context))
    held = [min(b, limits.max_batch) for b in batches]
    rows = {min(v.batch for v in fitting if v.tokens == 1 and v.batch >= b) for b in held}
    wanted = {(1, limits.chunk), *((b, 1) for b in rows)}
    return [v for v in fitting if (v.batch, v.tokens) in wanted and v.capacity <= capacity]


def compile_random(
    path: Path,
    options: CompileOptions,
    where: torch.device,
    *,
    layers: int | None = None,
    batches: Sequence[int] = (1,),
    context: int | None = None,
    progress: Progress = _silent,
) -> RandomArtifact:
    """Plan a model from its configuration. Its weights are drawn when they are asked for.

    Args:
        path: a config.json, or a folder with one.
        options: as for a checkpoint.
        where: where weights are drawn.
        layers: only the first so many layers.
        batches: sequences that decode together; nothing else is planned.
        context: longest sequence that is run; by default what the options hold.
        progress: told how far the work is.

    Raises:
        UserError: as `compile_model`, and for a number of layers that the model does not have.
    """
    target = options.choose_target()
    source = _open(path, options, target, layers)
    variants = needed_variants(
        source.variants(), source.limits, batches, source.limits.max_context if context is None else context
    )
    model = rewrite_all(source, options, variants=variants, progress=progress)
    plans = plan_all(model.graphs, target, progress)
    memory = Memory(max(p.arena_bytes for p in plans), max(p.state_bytes for p in plans))
    stages = REACHABLE[: REACHABLE.index(options.passes.to) + 1]
    manifest = Manifest(
        model=source.config.to_dict(),
        fingerprint="",
        target=target.name,
        abi=target.abi,
        numerics=options.numerics.value,
        kv=str(options.kv),
        passes=options.passes.passes,
        fold_wo=any(map(is_folded, model.derived)),
        precision=model.precision,
        static_scales="",
        stages=stages,
        memory=memory,
        limits=source.limits,
        variants={v: graph_path(stages[-1], v.name) for v in variants},
        tensors={},
        layouts={name: layout for name, layout in sorted(layouts_of(plans).items()) if layout},
        files={},
    )
    return RandomArtifact(path, manifest, source, model.graphs, {p.variant: p for p in plans}, where)


def _open(path: Path, options: CompileOptions, target: Target, layers: int | None) -> ModelSource:
    return open_config(
        read_config(path, layers),
        max_context=options.max_context,
        max_batch=options.max_batch,
        chunk=target.chunk(options.chunk, options.max_batch),
        numerics=options.numerics,
        kv=options.kv,
    )


def require_room(artifact: RandomArtifact, free: int, what: str) -> None:
    """Refuse a model that is too large, and say how many of its layers are not.

    Args:
        artifact: the model.
        free: bytes that it may take.
        what: whose bytes these are, for people.

    Raises:
        MachineError: with the bytes needed and free.
    """
    memory = artifact.manifest.memory
    besides = memory.arena_bytes + memory.state_bytes
    needed = artifact.weight_bytes + besides
    if needed <= free:
        return
    layers = layers_that_fit(artifact.weight_types, free - besides)
    fewer = f"measure the first layers only, at most --layers {layers}, or choose" if layers else "choose"
    raise MachineError(
        f"random weights, state and activations need {needed:,} bytes, {what} has {free:,} free for them",
        where=f"{CONFIG_OPTION} {artifact.folder}",
        fix=f"{fewer} a smaller --max-context or --max-batch, or end what else takes the memory",
    )


def layers_that_fit(types: dict[str, ValueType], room: int) -> int:
    """How many of the first layers fit so many bytes, together with all that belongs to no layer."""
    by_layer: dict[int, int] = {}
    for name, type in types.items():
        head, _, rest = name.partition(".")
        if head == "layers":
            layer = int(rest.partition(".")[0])
            by_layer[layer] = by_layer.get(layer, 0) + type.nbytes
        else:
            room -= type.nbytes
    fitting = 0
    for layer in sorted(by_layer):
        room -= by_layer[layer]
        if room < 0:
            break
        fitting += 1
    return fitting
