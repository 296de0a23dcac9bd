"""The front door of the frontend: a checkpoint or a configuration, ready to be traced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rewright.frontend.checkpoint import Checkpoint
from rewright.frontend.config import ModelConfig, load_config
from rewright.frontend.kv_formats import PLAIN, KvFormats
from rewright.frontend.layers import Builder
from rewright.frontend.model import Model
from rewright.frontend.numerics import Numerics
from rewright.frontend.rope_tables import rope_constants
from rewright.frontend.storage import CheckpointSource, ReleaseSource, Storage
from rewright.frontend.trace import trace
from rewright.frontend.weights import Weights
from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph
from rewright.ir.types import DType, ValueType
from rewright.ir.variant import Limits, Variant
from rewright.ir.verify import verify


@dataclass(frozen=True)
class ModelSource:
    """A model bound to its weights, of which graphs are traced.

    Attributes:
        config: the validated configuration.
        notes: what the user should know (ignored keys, tensors left out).
        limits: context, batch and chunk it is built for.
        numerics: which roundings are kept.
        model: the modules.
        checkpoint: where the weights are, None for a bare configuration.
    """

    config: ModelConfig
    notes: list[str]
    limits: Limits
    numerics: Numerics
    model: Model
    storage: Storage
    checkpoint: Checkpoint | None

    @classmethod
    def open(
        cls,
        path: Path,
        numerics: Numerics,
        *,
        max_context: int = 4096,
        max_batch: int = 1,
        chunk: int = 128,
        kv: KvFormats = PLAIN,
    ) -> ModelSource:
        """Read a checkpoint folder (configuration and shard headers only) or a config.json.

        Raises:
            BadInput: a configuration or checkpoint that cannot be used.
            UsageError: limits out of range; keys that these numerics do not pack.
        """
        kv.check(numerics)
        if path.is_dir():
            checkpoint = Checkpoint.open(path)
            config, notes, source = checkpoint.config, checkpoint.notes, CheckpointSource(checkpoint)
        else:
            config, notes = load_config(path)
            checkpoint, source = None, ReleaseSource(config)
        limits = Limits.of(max_context, max_batch, chunk, config.max_position_embeddings)
        storage = Storage(source, numerics)
        model = Model(Builder(config, storage, numerics, limits, kv=kv))
        storage.check(str(path))
        return cls(config, notes, limits, numerics, model, storage, checkpoint)

    def variants(self) -> list[Variant]:
        """Every variant that a compiled model has."""
        return self.limits.variants(self.config.index_topk)

    def graph(self, variant: Variant) -> Graph:
        """The traced and verified graph of a variant."""
        graph = trace(self.model, variant)
        verify(graph, self.weight_types())
        return graph

    def weight_types(self) -> dict[str, ValueType]:
        """Type of every weight and constant by name, sorted."""
        types = {name: b.type for name, b in self.storage.bindings.items()}
        table = ValueType(DType.F32, (self.limits.max_context, self.config.qk_rope_head_dim // 2))
        types |= dict.fromkeys(self.model.builder.constants, table)
        return dict(sorted(types.items()))

    def weights(self) -> Weights:
        """Reader of the weights; `CompilerBug` for a bare configuration."""
        if self.checkpoint is None:
            raise CompilerBug("a bare configuration has no weights")
        constants = rope_constants(self.config, self.limits.max_context)
        return Weights(self.checkpoint, self.storage.bindings, constants)
